"""How many tokens of which request go into a step: pure arithmetic on plain numbers."""


def pages_for(num_tokens: int, block_size: int) -> int:
    """Pages that hold tokens [0, num_tokens)."""
    return -(-num_tokens // block_size)


def cohort_size(num_decoding: int, num_stages: int) -> int:
    """Most decode windows of one plan, so that as many plans as stages can share them.

    With all of them in one plan, every other stage would wait for its result.
    """
    return -(-num_decoding // num_stages)


def chunk_length(*, num_remaining: int, budget: int, num_free_positions: int) -> int:
    """Tokens of the next prefill chunk; 0 only if the budget or the memory is used up.

    Chunks are not rounded to pages or to kernel blocks: a length that is rounded down can be 0
    for ever, and the kernels take any length.

    Args:
        num_remaining: committed tokens not yet in a plan.
        budget: tokens this step may still compute.
        num_free_positions: tokens that the pages held and the pages available have room for.
    """
    return max(0, min(num_remaining, budget, num_free_positions))
