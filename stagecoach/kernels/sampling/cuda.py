"""Launches the choice of tokens on a GPU: checks, scratch, and how the columns are split.

No result depends on the split.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from stagecoach.kernels.ragged import PackedGroup
from stagecoach.kernels.sampling.reference import Accepted, Choices, SamplingRows
from stagecoach.kernels.sampling.sampling_kernel import (
    count_accepted_kernel,
    draw_kernel,
    reduce_kernel,
    scan_kernel,
)


class ColumnTile(NamedTuple):
    """Columns that one program reads, and with how many warps."""

    columns: int
    part: int  # of them, how many at once where noise is made
    num_warps: int


TILE = ColumnTile(2048, 512, 4)


def choose_tokens(
    logits_TV: Tensor,
    rows: SamplingRows,
    addend_TV: Tensor | None = None,
    out: Choices | None = None,
    tile: ColumnTile = TILE,
) -> Choices:
    """`reference.choose_tokens` of bfloat16 or float32 logits whose rows lie in one piece."""
    num_rows, vocab_size = logits_TV.shape
    assert logits_TV.dtype in (torch.bfloat16, torch.float32), f"logits of {logits_TV.dtype}"
    assert logits_TV.stride(1) == 1 and vocab_size > 0, "rows in one piece"
    assert addend_TV is None or (addend_TV.shape == logits_TV.shape and addend_TV.stride(1) == 1)
    assert rows.sampling_rows_B.dtype == torch.int32 and rows.seeds_N.dtype == torch.int64
    assert rows.seeds_N.stride(0) == rows.positions_T.stride(0) == 1, "numbers in one piece"
    if out is None:
        out = Choices(*(_int32(logits_TV, num_rows) for _ in range(2)))
    if not num_rows:
        return out
    num_blocks = -(-vocab_size // tile.columns)
    most_blocks = next_power_of_2(num_blocks)
    shape = (num_rows, num_blocks)
    block_best, block_drawn = logits_TV.new_empty((2, *shape), dtype=torch.float32)
    block_ids, block_finite = (_int32(logits_TV, *shape) for _ in range(2))
    # A pointer that is never read where there is no such tensor.
    addends = logits_TV if addend_TV is None else addend_TV
    segments = rows.sampling_rows_B if rows.segment_T is None else rows.segment_T
    has_addend, has_segments = addend_TV is not None, rows.segment_T is not None
    scan_kernel[(num_blocks, num_rows)](
        logits_TV,
        addends,
        segments,
        rows.sampling_rows_B,
        block_best,
        block_ids,
        block_finite,
        vocab_size,
        logits_TV.stride(0),
        addends.stride(0),
        num_blocks,
        HAS_ADDEND=has_addend,
        HAS_SEGMENTS=has_segments,
        BLOCK_V=tile.columns,
        num_warps=tile.num_warps,
    )
    draw_kernel[(num_blocks, num_rows)](
        logits_TV,
        addends,
        segments,
        rows.sampling_rows_B,
        rows.positions_T,
        rows.temperatures_N,
        rows.seeds_N,
        block_best,
        block_ids,
        block_drawn,
        vocab_size,
        logits_TV.stride(0),
        addends.stride(0),
        rows.temperatures_N.stride(0),
        rows.position_offset,
        num_blocks,
        HAS_ADDEND=has_addend,
        HAS_SEGMENTS=has_segments,
        BLOCK_V=tile.columns,
        PART_V=tile.part,
        MOST_BLOCKS=most_blocks,
        num_warps=tile.num_warps,
    )
    reduce_kernel[(num_rows,)](
        logits_TV,
        addends,
        segments,
        rows.sampling_rows_B,
        rows.positions_T,
        rows.temperatures_N,
        rows.seeds_N,
        block_best,
        block_ids,
        block_drawn,
        block_finite,
        out.token_ids_T,
        out.is_finite_T,
        vocab_size,
        logits_TV.stride(0),
        addends.stride(0),
        rows.temperatures_N.stride(0),
        out.token_ids_T.stride(0),
        rows.position_offset,
        num_blocks,
        HAS_ADDEND=has_addend,
        HAS_SEGMENTS=has_segments,
        MOST_BLOCKS=most_blocks,
        num_warps=1,
    )
    return out


def count_accepted(
    choices: Choices,
    token_ids_T: Tensor,
    group: PackedGroup,
    sampling_rows_B: Tensor,
    forced_accepts_B: Tensor,
    out: Accepted | None = None,
) -> Accepted:
    """`reference.count_accepted`; all tensors int32 and in one piece."""
    num_segments = group.num_segments
    if out is None:
        out = Accepted(
            _int32(token_ids_T, num_segments),
            _int32(token_ids_T, num_segments),
            _int32(token_ids_T, 2, num_segments),
        )
    for tensor in (*choices, token_ids_T, sampling_rows_B, forced_accepts_B, *out):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), "int32 in one piece"
    if num_segments:
        newest_ids_B, newest_positions_B = out.newest_2B
        count_accepted_kernel[(num_segments,)](
            choices.token_ids_T,
            choices.is_finite_T,
            token_ids_T,
            group.offsets_S,
            group.starts_B,
            group.num_drafts_B,
            sampling_rows_B,
            forced_accepts_B,
            out.num_accepted_B,
            out.is_finite_B,
            newest_ids_B,
            newest_positions_B,
            MOST_TOKENS=next_power_of_2(1 + group.max_drafts),
            num_warps=1,
        )
    return out


def _int32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)
