"""Training of the demo draft."""
