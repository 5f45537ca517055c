"""Between text and tokens: the tokenizer, and the chat format that is written in its tokens."""
