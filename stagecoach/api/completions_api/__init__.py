"""OpenAI's text completions (/v1/completions)."""
