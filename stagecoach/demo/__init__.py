"""The bundled small model: its checkpoint, its tokenizer, and the tasks it was trained on."""
