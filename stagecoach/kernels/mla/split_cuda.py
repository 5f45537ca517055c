"""Launches the attention over split contexts: tiles, how many pieces, and scratch.

Owns the choice of tiles. How the pieces lie is decided on the device, from the true lengths;
here only capacities are known, so that a launch can be captured.

Dimensions: T tokens, H query heads, G key groups, C key width, P width of a second part of keys,
V value width, R cache rows, X row width, S segments.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from stagecoach.kernels.mla.split_kernel import attend_pieces_kernel, sum_pieces_kernel
from stagecoach.kernels.quantization import FP8_DTYPE
from stagecoach.kernels.ragged import RowLayout

NUM_PROCESSORS = 132
_MIN_PIECE_POSITIONS = 64
# Values that one program of the sum holds, and up to how many rows of outputs are few.
_SUM_VALUES, _FEW_ROWS = 4096, 512


class Segments(NamedTuple):
    """The segments of one call; all int32."""

    num_segments: int
    num_tokens: int
    max_tokens: int  # of a segment
    max_context: int
    lengths: Tensor  # offsets of their tokens [S + 1]; of blocks: is_real [S]
    token_segments: Tensor  # segment of each token [T], -1: none; of blocks: is_real [S]
    starts_S: Tensor
    first_pages_S: Tensor
    pages_P: Tensor
    page_size: int
    block_tokens: int = 0  # rows of the queries' own, beside the cache; 0: they are in it
    is_causal: bool = False  # within a block


class Scratch(NamedTuple):
    """What the pieces of segments leave for their sum, where a segment has several."""

    partial_o: Tensor  # float32 [pieces, G, query rows, V]
    partial_top: Tensor  # float32 [pieces, G, query rows], the base-2 logarithms of their weights
    pieces_S2: Tensor  # int32, the first piece of a segment and how many it has


class SumTile(NamedTuple):
    """What one program of the sum holds at a time."""

    pieces: int
    heads: int
    values: int


class SplitTile(NamedTuple):
    """What one program holds, and how it is compiled."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int
    programs_per_processor: int = 1
    has_descriptors: bool = True  # whole tiles come by the copy engine


def query_tile(num_rows: int) -> int:
    """Query rows (tokens x heads of a group) that one program takes: 12 -> 16, 24 -> 32."""
    return min(64, max(16, next_power_of_2(num_rows)))


def split_tile(num_rows: int, dtype: torch.dtype) -> SplitTile:
    """The tile for segments of up to `num_rows` query rows.

    Measured on an H200, 8 contexts of 32,768, each row 512 + 64 bfloat16: 12 rows 84 us (limit
    71, by bytes), 32 rows 117, 96 rows 336, 256 rows 639 (limit 185, by products). Two buffers of
    64 positions are what fits beside the queries; tiles of 32 took 1.1 to 1.6 times as long.
    """
    rows = query_tile(num_rows)
    if dtype == torch.float32:
        return SplitTile(16, 16, 4, 1)
    return SplitTile(rows, 64, 8, 2 if rows == 64 else 3)


def attend_split(
    q_THC: Tensor,
    q_pe_THP: Tensor | None,
    cache_RX: Tensor,
    own_TX: Tensor | None,
    segments: Segments,
    layout: RowLayout,
    scale: float,
    tile: SplitTile | None = None,
) -> Tensor:
    """softmax(q k * scale) v of each token over what it sees: [T, H, V] in `q_THC.dtype`.

    Args:
        q_THC: bfloat16 or float32, heads in one piece.
        q_pe_THP: queries of the keys' second part.
        cache_RX: of the same type or E4M3; rows in one piece.
        own_TX: with blocks, the rows of their tokens.
        tile: instead of the one from the table.
    """
    num_tokens, num_heads, _ = q_THC.shape
    heads = num_heads // layout.num_groups
    rows_per_piece = segments.max_tokens * heads
    tile = tile or split_tile(rows_per_piece, q_THC.dtype)
    assert cache_RX.dtype in (q_THC.dtype, FP8_DTYPE), f"{q_THC.dtype}, cache {cache_RX.dtype}"
    assert q_THC.stride(2) == 1 and cache_RX.stride(1) == 1, "rows lie in one piece"
    assert num_tokens == segments.num_tokens, f"{num_tokens} of {segments.num_tokens} tokens"
    assert (own_TX is None) == (segments.block_tokens == 0), "blocks bring rows of their own"
    num_row_tiles = cdiv(rows_per_piece, tile.rows)
    num_parts = num_row_tiles * layout.num_groups
    target_pieces = max(1, tile.programs_per_processor * NUM_PROCESSORS // num_parts)
    min_piece_tiles = max(1, _MIN_PIECE_POSITIONS // tile.positions)
    longest = cdiv(segments.max_context, tile.positions) + (segments.block_tokens > 0)
    num_pieces = min(
        target_pieces + segments.num_segments,
        segments.num_segments * cdiv(longest, min_piece_tiles),
    )
    scratch = make_scratch(q_THC, num_pieces, rows_per_piece, segments, layout)
    o_THV = q_THC.new_empty(num_tokens, num_heads, layout.value_width)
    own = q_THC if own_TX is None else own_TX
    q_pe = q_THC if q_pe_THP is None else q_pe_THP
    assert q_pe.stride(2) == 1 and own.stride(-1) == 1, "rows lie in one piece"
    has_descriptors = tile.has_descriptors and fits_descriptors(
        segments, layout, tile, cache_RX.element_size()
    )
    attend_pieces_kernel[(num_pieces * num_row_tiles, layout.num_groups)](
        q_THC,
        q_pe,
        cache_RX,
        *(_descriptors(cache_RX, layout, tile) if has_descriptors else (None, None)),
        own,
        o_THV,
        *scratch,
        segments.lengths,
        segments.starts_S,
        segments.first_pages_S,
        segments.pages_P,
        scale * 1.4426950408889634,  # log2(e)
        segments.num_segments,
        num_row_tiles,
        target_pieces,
        rows_per_piece,
        q_THC.stride(0),
        q_THC.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        cache_RX.stride(0),
        own.stride(0),
        NUM_HEADS=heads,
        KEY_WIDTH=layout.key_width,
        SECOND_WIDTH=layout.second_width,
        VALUE_WIDTH=layout.value_width,
        VALUE_START=-1 if layout.value_start is None else layout.value_start,
        BLOCK_TOKENS=segments.block_tokens,
        IS_CAUSAL=segments.is_causal,
        PAGE_SIZE=segments.page_size,
        MIN_PIECE_TILES=min_piece_tiles,
        SEGMENTS=next_power_of_2(segments.num_segments),
        TILE_M=tile.rows,
        TILE_N=tile.positions,
        TILE_C=max(16, next_power_of_2(layout.key_width)),
        TILE_P=max(16, next_power_of_2(layout.second_width)),
        TILE_V=value_tile(layout),
        TILE_OWN=max(16, next_power_of_2(segments.block_tokens)),
        HAS_DESCRIPTORS=has_descriptors,
        NUM_STAGES=tile.num_stages,
        PRECISION=dot_precision(q_THC.dtype),
        num_warps=tile.num_warps,
    )
    sum_pieces(scratch, o_THV, segments, layout)
    return o_THV


def make_scratch(
    q_THC: Tensor, num_pieces: int, rows_per_piece: int, segments: Segments, layout: RowLayout
) -> Scratch:
    """Room for `num_pieces` pieces of `rows_per_piece` query rows a group, beside `q_THC`."""
    shape = (num_pieces, layout.num_groups, rows_per_piece)
    return Scratch(
        q_THC.new_empty((*shape, layout.value_width), dtype=torch.float32),
        q_THC.new_empty(shape, dtype=torch.float32),
        torch.empty(segments.num_segments, 2, dtype=torch.int32, device=q_THC.device),
    )


def sum_pieces(scratch: Scratch, o_THV: Tensor, segments: Segments, layout: RowLayout) -> None:
    """Write the outputs of segments of several pieces; the others have theirs."""
    num_tokens, num_heads, value_width = o_THV.shape
    tile = sum_tile(num_tokens, num_heads, value_width)
    grid = (num_tokens, cdiv(num_heads, tile.heads), cdiv(value_width, tile.values))
    sum_pieces_kernel[grid](
        *scratch,
        segments.token_segments,
        segments.lengths,
        o_THV,
        layout.num_groups,
        scratch.partial_top.shape[2],
        NUM_HEADS=num_heads // layout.num_groups,
        VALUE_WIDTH=value_width,
        BLOCK_TOKENS=segments.block_tokens,
        TILE_PIECES=tile.pieces,
        TILE_H=tile.heads,
        TILE_V=tile.values,
        num_warps=4,
    )


def sum_tile(num_tokens: int, num_heads: int, value_width: int) -> SumTile:
    """The tile of the sum: many pieces where there are few tokens, else few and whole rows."""
    width = max(16, next_power_of_2(value_width))
    if num_tokens * num_heads <= _FEW_ROWS:
        return SumTile(32, 1, min(_SUM_VALUES // 32, width))
    values = min(_SUM_VALUES // 4, width)
    return SumTile(4, min(_SUM_VALUES // 4 // values, next_power_of_2(num_heads)), values)


def fits_descriptors(
    segments: Segments, layout: RowLayout, tile: SplitTile, value_bytes: int
) -> bool:
    """Whether a tile is one box of rows: within a page, and as wide as a power of two.

    Narrower boxes than those of small bfloat16 rows, in bytes too, were never run on a GPU.
    """
    return (
        segments.page_size % tile.positions == 0
        and not layout.has_own_values
        and layout.key_width == next_power_of_2(layout.key_width) >= max(64, 128 // value_bytes)
        and layout.second_width
        == next_power_of_2(layout.second_width)
        >= max(16, 32 // value_bytes)
    )


def _descriptors(
    cache_RX: Tensor, layout: RowLayout, tile: SplitTile
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The rows' two parts as the copy engine takes them."""
    return (
        TensorDescriptor.from_tensor(cache_RX, [tile.positions, layout.key_width]),
        TensorDescriptor.from_tensor(cache_RX, [tile.positions, layout.second_width]),
    )


def value_tile(layout: RowLayout) -> int:
    """Columns of a value tile; where values are a key's first columns, those of the key."""
    if layout.value_start is None:
        assert layout.value_width == layout.key_width, "values are the keys' first part"
    return max(16, next_power_of_2(layout.value_width))


def dot_precision(dtype: torch.dtype) -> str:
    """How a product of matrices is computed; float32 in three passes of tf32, 1e-6 exact."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
