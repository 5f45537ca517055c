"""Anthropic's Messages API (/v1/messages), over the conversations of `chat_run`."""
