"""How the experts' products from packed MXFP4 weights are cut on a GPU, by the number of pairs.

Dimensions: E experts, P pairs of a token and an expert.
"""

from typing import NamedTuple

_NUM_PROCESSORS = 132
CHUNK = 128  # inputs that four threads read of a row
MOST_ROWS = 256  # of weights that a block of `mxfp4_many.cu` multiplies at a time


class Mxfp4ProductTiles(NamedTuple):
    """One product of Triton's kernels."""

    block_n: int
    block_k: int  # whole segments of 64
    num_warps: int
    num_stages: int


class Mxfp4SortedTiles(NamedTuple):
    """Both products of Triton's kernels over pairs sorted by expert."""

    block_m: int  # pairs of a tile
    gate_up: Mxfp4ProductTiles
    down: Mxfp4ProductTiles


class FewCut(NamedTuple):
    """How one product is shared out by `mxfp4.cu`."""

    k_warps: int  # of a block's, that share the inputs of the same rows
    rows: int  # of outputs, that a block makes at a time
    blocks_of_rows: int  # that a block makes one after the other


class FewTiles(NamedTuple):
    """Both products by `mxfp4.cu`, whose tiles have up to 8 pairs."""

    is_sorted: bool  # otherwise every pair is a tile
    most_distinct: int  # experts that may be read
    num_warps: int  # of a block
    num_stages: int  # chunks on their way to a warp
    num_blocks: int  # that share a processor

    def cut(self, num_inputs: int, num_outputs: int, num_tiles: int, *, is_gated: bool) -> FewCut:
        """Few chunks are not worth sharing; few blocks would leave processors without work."""
        num_chunks = -(-num_inputs // CHUNK)
        k_warps = 4 if num_chunks >= 16 else 2 if num_chunks >= 8 else 1
        rows = (16 if is_gated else 32) * self.num_warps // k_warps
        num_blocks = -(-num_outputs // rows) * min(num_tiles, self.most_distinct)
        most_blocks = 32 // self.num_warps
        blocks_of_rows = max(1, min(most_blocks, num_blocks // (_NUM_PROCESSORS * 8)))
        return FewCut(k_warps, rows, blocks_of_rows)


class ManyCut(NamedTuple):
    """How one product is shared out by `mxfp4_many.cu`."""

    num_blocks: int
    blocks_of_rows: int  # that are made one after the other for a tile of pairs


class ManyTiles(NamedTuple):
    """Both products by `mxfp4_many.cu`."""

    pairs: int  # of a tile
    few_pairs: int  # of the forms for tiles that are not full
    more_pairs: int
    warpgroups: int  # that multiply

    @property
    def rows(self) -> int:
        """Of weights that a block multiplies at a time."""
        return 64 * self.warpgroups

    @property
    def num_stages(self) -> int:
        """Chunks of inputs and weights that a processor's shared memory holds, 8 at most."""
        rest = _MOST_SHARED_BYTES - self._row_bytes - _MOST_STAGES * 16
        return min(_MOST_STAGES, rest // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.num_stages * (self._stage_bytes + 16) + self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return 4 * 32 * -(-self.pairs // 32)

    @property
    def _stage_bytes(self) -> int:
        """Inputs of the pairs in bfloat16; codes of 64 bytes a row, and 4 scales."""
        return self.pairs * CHUNK * 2 + self.rows * (64 + 4)

    def cut(
        self,
        num_inputs: int,
        num_outputs: int,
        num_tiles: int,
        num_processors: int,
        *,
        is_gated: bool,
    ) -> ManyCut:
        """Every block walks through its share of the work; a piece is some 24 chunks of inputs."""
        rows = self.rows // 2 if is_gated else self.rows
        assert num_outputs % rows == 0, f"{num_outputs} outputs, {rows} at a time"
        num_rows = num_outputs // rows
        blocks_of_rows = max(1, min(num_rows, 24 * CHUNK // num_inputs))
        num_pieces = num_tiles * -(-num_rows // blocks_of_rows)
        return ManyCut(min(num_processors, num_pieces), blocks_of_rows)


_MOST_SHARED_BYTES = 227 * 1024  # that a block may have
_MOST_STAGES = 8
FEW_PAIRS = 8  # of a tile of `mxfp4.cu`
# Without sorting a pair reads its expert by itself.
_MOST_UNSORTED_PAIRS = 32
# Warps of a block, chunks on their way to each, and blocks of a processor.
_FEW_UNSORTED, _FEW_SORTED = (4, 4, 4), (8, 3, 2)
# Pairs an expert, from which on `mxfp4_many.cu` is taken, or where that cannot be, Triton's form.
_MOST_FEW_MEAN, _MOST_FEW_MEAN_BEFORE_TRITON = 0.5, 10.0
# From so many pairs an expert on, the row of the table counts. Two blocks of four warps share a
# processor, so that one decodes while the other multiplies.
_BLOCKS = Mxfp4ProductTiles(128, 64, 4, 3)
_SORTED = (
    (0.0, Mxfp4SortedTiles(16, Mxfp4ProductTiles(64, 128, 4, 3), Mxfp4ProductTiles(64, 128, 4, 3))),
    (10.0, Mxfp4SortedTiles(64, _BLOCKS, _BLOCKS)),
    (48.0, Mxfp4SortedTiles(128, _BLOCKS, _BLOCKS)),
)
# The same for `mxfp4_many.cu`. Rows begin at twice the one before or later: so of the powers of
# two, which are compiled ahead, each row has one.
_MANY = (
    (0.0, ManyTiles(16, 8, 16, 4)),
    (9.0, ManyTiles(32, 16, 16, 4)),
    (25.0, ManyTiles(64, 16, 32, 2)),
    (51.0, ManyTiles(128, 48, 96, 2)),
    (103.0, ManyTiles(256, 96, 160, 2)),
)
# Products of float32 run without tensor cores.
_SORTED_FLOAT32 = Mxfp4SortedTiles(
    16, Mxfp4ProductTiles(32, 64, 4, 2), Mxfp4ProductTiles(32, 64, 4, 2)
)


def few_tiles(num_pairs: int, num_experts: int, *, has_many: bool) -> FewTiles | None:
    """The cut for few pairs an expert; None: there are too many.

    Args:
        has_many: whether `mxfp4_many.cu` takes those.
    """
    most_mean = _MOST_FEW_MEAN if has_many else _MOST_FEW_MEAN_BEFORE_TRITON
    if num_pairs > max(_MOST_UNSORTED_PAIRS, most_mean * num_experts):
        return None
    is_sorted = num_pairs > _MOST_UNSORTED_PAIRS
    form = _FEW_SORTED if is_sorted else _FEW_UNSORTED
    return FewTiles(is_sorted, min(num_pairs, num_experts), *form)


def many_tiles(num_pairs: int, num_experts: int) -> ManyTiles:
    """The cut of `mxfp4_many.cu` for so many pairs, even if some of them are nobody's."""
    mean = num_pairs / num_experts
    return next(tiles for least, tiles in reversed(_MANY) if mean >= least)


def all_many_tiles() -> tuple[ManyTiles, ...]:
    """Every cut that `many_tiles` may choose."""
    return tuple(tiles for _, tiles in _MANY)


def mxfp4_sorted_tiles(num_pairs: int, num_experts: int, *, is_float32: bool) -> Mxfp4SortedTiles:
    """The cut of Triton's kernels for so many pairs, even if some of them are nobody's."""
    if is_float32:
        return _SORTED_FLOAT32
    mean = num_pairs / num_experts
    return next(tiles for least, tiles in reversed(_SORTED) if mean >= least)


def all_mxfp4_sorted_tiles() -> tuple[Mxfp4SortedTiles, ...]:
    """Every cut that `mxfp4_sorted_tiles` may choose for bfloat16."""
    return tuple(tiles for _, tiles in _SORTED)
