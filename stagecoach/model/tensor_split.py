"""Local sizes under tensor parallelism.

What does not divide was refused by `compatibility/rules.py` before any worker started.
"""


def local_size(key: str, value: int, tp_size: int) -> int:
    """One rank's share of `value`, which config.json calls `key`."""
    assert value % tp_size == 0, f"{key}={value} is not divisible by {tp_size} ranks"
    return value // tp_size


def vocab_shard_size(vocab_size: int, tp_size: int) -> int:
    """Vocabulary rows of each rank; the last rank's may reach beyond the vocabulary."""
    return -(-vocab_size // tp_size)
