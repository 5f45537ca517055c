"""How a row of any length is held in blocks whose sizes are powers of two."""

from triton import next_power_of_2

LONGEST_ROW = 16_384  # inputs that one program may hold


def whole_blocks(num_inputs: int) -> tuple[int, int]:
    """Two powers of two, or one and 0, that hold so many inputs; only the second may be larger."""
    block_inputs = 1 << (num_inputs.bit_length() - 1)
    rest = num_inputs - block_inputs
    return block_inputs, next_power_of_2(rest) if rest else 0
