"""How the experts' products are cut on a GPU, by the number of tokens.

Dimensions: T tokens, K experts a token, E experts, P = T * K pairs.
"""

from typing import NamedTuple


class PairCut(NamedTuple):
    """The second product, in which a program adds up a token's experts block by block."""

    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int


class WholeCut(NamedTuple):
    """A product in which a program has all its weights on their way at once."""

    block_outputs: int
    num_warps: int


class PairTiles(NamedTuple):
    """Both products of pairs that read their experts by themselves."""

    gate_up: WholeCut
    down: PairCut | WholeCut


class ProductTiles(NamedTuple):
    """One grouped product."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    has_descriptor: bool = False  # weights come by the tensor memory accelerator
    halves: bool = False  # a tile that is at most half full costs half as much


class SortedTiles(NamedTuple):
    """Both products over pairs sorted by expert."""

    block_m: int  # pairs of a tile
    gate_up: ProductTiles
    down: ProductTiles


MOST_FEW_PAIRS = 32
MOST_PAIR_INPUTS = 8192  # that a program may hold of a row
# Of all experts of one token. With more tokens, what several programs read again costs more.
_MOST_WHOLE_DOWN = 8192

# From so many pairs an expert on, the row of the table counts: the fastest cuts on an H200 in
# bfloat16, with 256 experts of 2,304 x 1,024.
_SORTED = (
    (
        0.0,
        SortedTiles(16, ProductTiles(32, 256, 4, 3), ProductTiles(64, 128, 4, 4)),
    ),
    (
        12.0,
        SortedTiles(32, ProductTiles(64, 128, 4, 3), ProductTiles(64, 128, 4, 4)),
    ),
    (
        24.0,
        SortedTiles(64, ProductTiles(64, 64, 4, 4), ProductTiles(128, 64, 4, 4)),
    ),
    (
        48.0,
        SortedTiles(
            128,
            ProductTiles(128, 64, 8, 4, has_descriptor=True),
            ProductTiles(256, 64, 8, 4, has_descriptor=True, halves=True),
        ),
    ),
    (
        150.0,
        SortedTiles(
            128,
            ProductTiles(128, 64, 8, 4, has_descriptor=True, halves=True),
            ProductTiles(256, 64, 8, 4, has_descriptor=True, halves=True),
        ),
    ),
)
# Products of float32 run without tensor cores.
_SORTED_FLOAT32 = SortedTiles(16, ProductTiles(32, 32, 4, 2), ProductTiles(32, 32, 4, 2))


def pair_tiles(num_tokens: int, num_chosen: int, latent: int, width: int) -> PairTiles:
    """The cut for few pairs; the fastest on an H200 in bfloat16, of 2,304 x 1,024."""
    gate_up = WholeCut(1, 4 if latent <= 4096 else 8)
    if width % 1024 == 0:
        if num_tokens == 1 and num_chosen * width <= _MOST_WHOLE_DOWN:
            return PairTiles(gate_up, WholeCut(1, 4))
        return PairTiles(gate_up, PairCut(4, 1024, 4, 3))
    if width % 512 == 0:
        return PairTiles(gate_up, PairCut(8, 512, 4, 3))
    return PairTiles(gate_up, PairCut(16, 128, 4, 3))


def sorted_tiles(num_pairs: int, num_experts: int, *, is_float32: bool) -> SortedTiles:
    """The cut for so many pairs, even if some of them are nobody's."""
    if is_float32:
        return _SORTED_FLOAT32
    mean = num_pairs / num_experts
    return next(tiles for least, tiles in reversed(_SORTED) if mean >= least)


def all_sorted_tiles() -> tuple[SortedTiles, ...]:
    """Every cut that `sorted_tiles` may choose for bfloat16."""
    return tuple(tiles for _, tiles in _SORTED)


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """No division of the pairs among the experts makes more tiles."""
    return min(num_pairs, (num_pairs + (block_m - 1) * min(num_experts, num_pairs)) // block_m)
