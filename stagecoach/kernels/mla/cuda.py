"""Launches latent attention on a GPU: checks, grids and tiles.

Nothing here waits for the device. Windows can be captured; chunks allocate by the contexts' sum.

Dimensions: as in `reference.py`; K inputs and O outputs of a head's matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from triton import cdiv, next_power_of_2

from stagecoach.kernels.mla.heads_kernel import head_product_kernel
from stagecoach.kernels.mla.prefill_kernel import prefill_kernel
from stagecoach.kernels.mla.rows_kernel import gather_rows_kernel, write_rows_kernel
from stagecoach.kernels.mla.split_cuda import (
    Segments,
    SplitTile,
    attend_split,
    dot_precision,
)
from stagecoach.kernels.mla.window_cuda import attend_windows, fits, is_faster, query_tile
from stagecoach.kernels.quantization import FP8_DTYPE
from stagecoach.kernels.ragged import PackedGroup, RowLayout

# Up to so many tokens the own kernel multiplies by head matrices, then the library: 3.9 against
# 4.0 us at one token and 32 heads (H200), 5.9 against 4.4 at 64, where the gate comes on top.
_FEW_TOKENS, _FEW_GATED_TOKENS = 16, 64
_HEAD_TILE_VALUES = 8192  # of a head's matrix that a program reads at a time
# Keys and values of contexts take no more at a time; heads are taken in turn.
_MAX_EXPANDED_BYTES = 2**30
_GATHER_ROWS = 8
_FEW_SEGMENTS = 16  # up to so many, one form of a kernel serves any number


def write_rows(
    cache_RD: Tensor,
    latent_TC: Tensor,
    k_pe_TP: Tensor,
    norm_weight_C: Tensor,
    eps: float,
    cache_rows_T: Tensor,
) -> None:
    """`reference.write_rows`, where a row of -1 is nobody's: nothing is written for it."""
    assert latent_TC.stride(1) == 1 and k_pe_TP.stride(1) == 1 and cache_RD.stride(1) == 1
    latent_width, pe_width = latent_TC.shape[1], k_pe_TP.shape[1]
    write_rows_kernel[(len(latent_TC),)](
        latent_TC,
        k_pe_TP,
        norm_weight_C,
        cache_rows_T,
        cache_RD,
        eps,
        latent_TC.stride(0),
        k_pe_TP.stride(0),
        cache_RD.stride(0),
        LATENT_WIDTH=latent_width,
        PE_WIDTH=pe_width,
        TILE_C=next_power_of_2(latent_width),
        TILE_P=next_power_of_2(pe_width),
        num_warps=2,
    )


def head_product(x_THK: Tensor, weight_HKO: Tensor, gate_THO: Tensor | None) -> Tensor:
    """`reference.head_product`: [T, H, O] in `x_THK.dtype`; sums in float32."""
    if len(x_THK) <= (_FEW_TOKENS if gate_THO is None else _FEW_GATED_TOKENS):
        return head_product_few(x_THK, weight_HKO, gate_THO)
    y_THO = torch.bmm(x_THK.transpose(0, 1), weight_HKO).transpose(0, 1)
    return y_THO if gate_THO is None else y_THO * gate_THO.sigmoid()


def head_product_few(x_THK: Tensor, weight_HKO: Tensor, gate_THO: Tensor | None) -> Tensor:
    """`head_product` by the own kernel, made for few tokens."""
    num_tokens, num_heads, num_inputs = x_THK.shape
    num_outputs = weight_HKO.shape[2]
    assert x_THK.stride(2) == 1, "a head's inputs lie in one piece"
    assert gate_THO is None or gate_THO.stride(2) == 1, "a head's gates lie in one piece"
    gate = x_THK if gate_THO is None else gate_THO
    out_THO = x_THK.new_empty(num_tokens, num_heads, num_outputs)
    tile_T = max(16, next_power_of_2(num_tokens))
    tile_K = min(512 if tile_T == 16 else 128, max(16, next_power_of_2(num_inputs)))
    tile_O = max(16, min(_HEAD_TILE_VALUES // tile_K, next_power_of_2(num_outputs)))
    head_product_kernel[(num_heads, cdiv(num_outputs, tile_O), cdiv(num_tokens, tile_T))](
        x_THK,
        weight_HKO,
        gate,
        out_THO,
        num_tokens,
        x_THK.stride(0),
        x_THK.stride(1),
        *weight_HKO.stride(),
        gate.stride(0),
        gate.stride(1),
        NUM_INPUTS=num_inputs,
        NUM_OUTPUTS=num_outputs,
        HAS_GATE=gate_THO is not None,
        TILE_T=tile_T,
        TILE_K=tile_K,
        TILE_O=tile_O,
        PRECISION=dot_precision(x_THK.dtype),
        num_warps=4,
    )
    return out_THO


def mla_decode(
    q_latent_THC: Tensor,
    q_pe_THP: Tensor,
    cache_RD: Tensor,
    group: PackedGroup,
    scale: float,
    tile: SplitTile | None = None,
    window_rows: int | None = None,
) -> Tensor:
    """`reference.mla_decode`: [T, H, C]; contexts are split over the processors.

    Args:
        tile: the Triton form, with this tile.
        window_rows: the CUDA form, with so many query rows a thread block.
    """
    latent_width, pe_width = q_latent_THC.shape[2], q_pe_THP.shape[2]
    segments = Segments(
        num_segments=group.num_segments,
        num_tokens=group.num_tokens,
        max_tokens=group.max_length,
        max_context=group.max_context,
        lengths=group.offsets_S,
        token_segments=group.segment_T,
        starts_S=group.starts_B,
        first_pages_S=group.first_pages_B,
        pages_P=group.pages_P,
        page_size=group.block_size,
    )
    layout = RowLayout(1, latent_width, pe_width, latent_width, has_own_values=False)
    num_rows = segments.max_tokens * q_latent_THC.shape[1]
    if tile is None and window_rows is None and is_faster(num_rows, cache_RD.dtype):
        window_rows = query_tile(num_rows)
    if window_rows is not None and fits(q_latent_THC, q_pe_THP, cache_RD, segments, layout):
        return attend_windows(
            q_latent_THC, q_pe_THP, cache_RD, segments, layout, scale, window_rows
        )
    return attend_split(q_latent_THC, q_pe_THP, cache_RD, None, segments, layout, scale, tile)


class PrefillTile(NamedTuple):
    """What one program of the chunks' attention holds, and how it is compiled."""

    queries: int
    positions: int
    num_warps: int
    num_stages: int


def prefill_tile(dtype: torch.dtype) -> PrefillTile:
    """The tile for chunks."""
    if dtype == torch.float32:
        return PrefillTile(32, 32, 4, 1)
    return PrefillTile(128, 64, 8, 3)


def mla_prefill(
    q_THD: Tensor,
    cache_RD: Tensor,
    kv_up_OC: Tensor,
    group: PackedGroup,
    scale: float,
    gate_THV: Tensor | None,
    *,
    tile: PrefillTile | None = None,
    max_expanded_bytes: int = _MAX_EXPANDED_BYTES,
) -> Tensor:
    """`reference.mla_prefill`: [T, H, V].

    Contexts are gathered once; keys and values are made for as many heads at a time as fit.
    """
    num_tokens, num_heads, query_width = q_THD.shape
    latent_width = kv_up_OC.shape[1]
    row_width = cache_RD.shape[1]
    pe_width = row_width - latent_width
    nope_width = query_width - pe_width
    head_width = len(kv_up_OC) // num_heads
    value_width = head_width - nope_width
    tile = tile or prefill_tile(q_THD.dtype)
    assert q_THD.stride(2) == 1, "a head's queries lie in one piece"
    assert gate_THV is None or gate_THV.stride(2) == 1, "a head's gates lie in one piece"
    rows_LD = gather_rows(cache_RD, group, q_THD.dtype)
    num_positions = len(rows_LD)
    bytes_per_head = num_positions * head_width * q_THD.itemsize
    heads_at_once = min(num_heads, max(1, max_expanded_bytes // bytes_per_head))
    gate = q_THD if gate_THV is None else gate_THV
    o_THV = q_THD.new_empty(num_tokens, num_heads, value_width)
    num_tiles = cdiv(num_tokens, tile.queries) + group.num_segments
    for first_head in range(0, num_heads, heads_at_once):
        end_head = min(num_heads, first_head + heads_at_once)
        weight_OC = kv_up_OC[first_head * head_width : end_head * head_width]
        kv_LO = functional.linear(rows_LD[:, :latent_width], weight_OC)
        prefill_kernel[(end_head - first_head, num_tiles)](
            q_THD,
            kv_LO,
            rows_LD[:, latent_width:],
            gate,
            o_THV,
            group.offsets_S,
            group.starts_B,
            scale * 1.4426950408889634,  # log2(e)
            group.num_segments,
            first_head,
            q_THD.stride(0),
            q_THD.stride(1),
            kv_LO.stride(0),
            row_width,
            gate.stride(0),
            gate.stride(1),
            num_heads * value_width,
            NOPE_WIDTH=nope_width,
            PE_WIDTH=pe_width,
            VALUE_WIDTH=value_width,
            HAS_GATE=gate_THV is not None,
            SEGMENTS=max(_FEW_SEGMENTS, next_power_of_2(group.num_segments)),
            TILE_M=tile.queries,
            TILE_N=tile.positions,
            TILE_K=max(16, next_power_of_2(nope_width)),
            TILE_P=max(16, next_power_of_2(pe_width)),
            TILE_V=max(16, next_power_of_2(value_width)),
            NUM_STAGES=tile.num_stages,
            PRECISION=dot_precision(q_THD.dtype),
            num_warps=tile.num_warps,
        )
    return o_THV


def gather_rows(cache_RD: Tensor, group: PackedGroup, dtype: torch.dtype | None = None) -> Tensor:
    """Cache rows of the segments' contexts, end to end: [at least their sum, D] in `dtype`.

    Args:
        dtype: that of the cache, unless told; a cache of E4M3 becomes any.
    """
    dtype = dtype or cache_RD.dtype
    assert cache_RD.dtype in (dtype, FP8_DTYPE), f"{cache_RD.dtype} rows to {dtype}"
    num_positions = min(
        group.num_context or group.pages_P.numel() * group.block_size,
        group.num_segments * group.max_context,
    )
    row_width = cache_RD.shape[1]
    rows_LD = cache_RD.new_empty((num_positions, row_width), dtype=dtype)
    gather_rows_kernel[(cdiv(num_positions, _GATHER_ROWS) + group.num_segments,)](
        cache_RD,
        rows_LD,
        group.offsets_S,
        group.starts_B,
        group.first_pages_B,
        group.pages_P,
        group.num_segments,
        cache_RD.stride(0),
        ROW_WIDTH=row_width,
        PAGE_SIZE=group.block_size,
        SEGMENTS=max(_FEW_SEGMENTS, next_power_of_2(group.num_segments)),
        TILE_N=_GATHER_ROWS,
        TILE_D=next_power_of_2(row_width),
        num_warps=4,
    )
    return rows_LD
