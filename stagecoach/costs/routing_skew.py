"""How many experts of a layer the tokens of a step choose between them.

Owns the estimate of routing: counted with random gates where it was, and the same skew elsewhere.
"""

import math
from itertools import pairwise

# Distinct experts of 256, of which a token chooses 8, by tokens: counted in an engine whose weights
# are random. Even routing would give 8, 30.5, 57.4, 160, 222 and 256.
_COUNTED = ((1, 8.0), (4, 30.0), (8, 54.2), (31, 140.0), (64, 192.0), (256, 247.3))
_COUNTED_EXPERTS, _COUNTED_CHOSEN = 256, 8


def distinct_experts(num_tokens: float, num_experts: int, num_chosen: int) -> float:
    """Expected distinct experts of one layer in a step of `num_tokens` tokens."""
    if num_tokens <= 0:
        return 0.0
    # What a token of another model fills of its experts, in tokens of the counted one.
    share = num_chosen / num_experts
    even = _even_share(num_tokens, share)
    counted_share = _COUNTED_CHOSEN / _COUNTED_EXPERTS
    alike_tokens = math.log1p(-min(even, 1 - 1e-12)) / math.log1p(-counted_share)
    skew = _counted_share(alike_tokens) / _even_share(alike_tokens, counted_share)
    least = min(num_experts, num_chosen)
    return min(float(num_experts), max(least, skew * even * num_experts))


def _even_share(num_tokens: float, share: float) -> float:
    return 1.0 - (1.0 - share) ** num_tokens if share < 1 else 1.0


def _counted_share(num_tokens: float) -> float:
    """Between counted points along the logarithm of tokens; beyond them the last skew fades."""
    first, last = _COUNTED[0], _COUNTED[-1]
    if num_tokens <= first[0]:
        return _even_share(num_tokens, _COUNTED_CHOSEN / _COUNTED_EXPERTS)
    if num_tokens >= last[0]:
        return min(1.0, last[1] / _COUNTED_EXPERTS + math.log2(num_tokens / last[0]) / 64)
    for (low, few), (high, many) in pairwise(_COUNTED):
        if num_tokens <= high:
            place = math.log(num_tokens / low) / math.log(high / low)
            return (few + place * (many - few)) / _COUNTED_EXPERTS
    raise AssertionError(f"no place for {num_tokens}")
