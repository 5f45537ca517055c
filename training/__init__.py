"""Training of the bundled models. Nothing in the engine imports it."""
