"""Launches the drafter's block attention on a GPU: the split contexts of `kernels/mla`.

Nothing waits for the device; a launch can be captured.

Dimensions: as in `reference.py`.
"""

from torch import Tensor

from stagecoach.kernels.mla.split_cuda import Segments, SplitTile, attend_split
from stagecoach.kernels.ragged import PackedBlocks, RowLayout


def attend_blocks(
    q_NKHD: Tensor,
    cache_RX: Tensor,
    own_NKX: Tensor,
    blocks: PackedBlocks,
    layout: RowLayout,
    scale: float,
    tile: SplitTile | None = None,
) -> Tensor:
    """`reference.attend_blocks`: [N, K, H, V]; undefined for blocks that are not real."""
    num_blocks, num_tokens = q_NKHD.shape[:2]
    assert num_blocks == blocks.num_blocks, f"{num_blocks} of {blocks.num_blocks} blocks"
    segments = Segments(
        num_segments=num_blocks,
        num_tokens=num_blocks * num_tokens,
        max_tokens=num_tokens,
        max_context=blocks.max_context,
        lengths=blocks.is_real_N,
        token_segments=blocks.is_real_N,
        starts_S=blocks.starts_N,
        first_pages_S=blocks.first_pages_N,
        pages_P=blocks.pages_P,
        page_size=blocks.block_size,
        block_tokens=num_tokens,
        is_causal=blocks.is_causal,
    )
    q_THC, q_pe_THP = q_NKHD.flatten(0, 1).tensor_split((layout.key_width,), dim=-1)
    o_THV = attend_split(
        q_THC,
        q_pe_THP if layout.second_width else None,
        cache_RX,
        own_NKX.flatten(0, 1),
        segments,
        layout,
        scale,
        tile,
    )
    return o_THV.unflatten(0, (num_blocks, num_tokens))
