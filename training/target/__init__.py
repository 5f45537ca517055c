"""The demo target: a Kimi-K3 in miniature."""
