"""OpenAI's chat completions, and the conversations that all chat protocols are answered with."""
