"""What operators and tools ask of a server: health, tokens, metrics, profiles, the dashboard."""
