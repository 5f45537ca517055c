"""OpenAI's Responses API (/v1/responses), over the conversations of `chat_run`."""
