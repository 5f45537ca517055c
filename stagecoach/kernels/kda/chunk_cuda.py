"""The chunked form of KDA on a device: checks, scratch memory, and how its kernels are launched.

Owns the choice of tiles. What is computed stands in `reference.py`; what the kernels leave each
other, in `chunk_products_kernel.py`.

Dimensions: T tokens, B segments, H heads, K key and V value channels, S slots, N rows of a
record, X values of a recorded row or of a tile, J chunk numbers.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stagecoach.kernels.chunk_layout import CHUNK_SIZE
from stagecoach.kernels.kda.chunk_products_kernel import chunk_products_kernel
from stagecoach.kernels.kda.chunk_scan_kernel import chunk_saves_kernel, chunk_scan_kernel
from stagecoach.kernels.ragged import PackedGroup, PackedSaves

_NUM_LEVELS = CHUNK_SIZE.bit_length() - 1
_NUM_MULTIPROCESSORS = 132  # of an H200
_NARROW_V = 32
# Triton 3.6 has wgmma read a transposed operand of fewer columns beyond its end.
_LEAST_TURNED_COLUMNS = 64


class ChunkTiles(NamedTuple):
    """How the kernels are cut: which is best depends on how many heads and segments there are."""

    products_warps: int
    scan_block_v: int  # value channels of one program
    scan_warps: int
    scan_stages: int
    saves_block_v: int = _LEAST_TURNED_COLUMNS  # the same, of one that leads a saved state on


def chunk_tiles(
    group: PackedGroup, num_heads: int, num_values: int, dtype: torch.dtype
) -> ChunkTiles:
    """Tiles for a step of this size; measured on an H200 at head dim 128.

    A scan takes one program a multiprocessor. Wide blocks of value channels read the tiles less
    often; narrow ones are better where even they do not fill the device.
    """
    if dtype == torch.float32:
        return ChunkTiles(
            products_warps=8, scan_block_v=16, scan_warps=4, scan_stages=1, saves_block_v=16
        )
    num_narrow = num_heads * group.num_segments * (num_values // _NARROW_V)
    block_v = _NARROW_V if num_narrow <= _NUM_MULTIPROCESSORS else 2 * _NARROW_V
    return ChunkTiles(products_warps=4, scan_block_v=block_v, scan_warps=4, scan_stages=3)


def kda_chunked_packed(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    decay_THK: Tensor,
    beta_TH: Tensor,
    a_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
    state_SHVK: Tensor,
    record_SNHX: Tensor,
    group: PackedGroup,
    tiles: ChunkTiles | None = None,
) -> Tensor:
    """`reference.kda_chunked` with gate and rates from their logits, on packed segments.

    Differences of summed log-decays stand for products of decays. No positive one is ever
    raised, so nothing overflows at any gate. States and sums are float32; the operands of
    matrix products have the type of the activations.

    Args:
        q_THK: [T, H, K] normalised and scaled queries, bfloat16 or float32, contiguous.
        k_THK: [T, H, K] normalised keys, of the same type, contiguous.
        v_THV: [T, H, V] of the same type, contiguous.
        decay_THK: [T, H, K] gate logits; tokens may lie apart.
        beta_TH: [T, H] logits of the rates; tokens may lie apart.
        a_log_H, dt_bias_HK, lower_bound: as in `reference.kda_gate`.
        state_SHVK: [S, H, V, K] pool, float32, updated in place.
        record_SNHX: [S, N, H, 2K + V] pool, float32, only read: exp(g), k and u of each row.
        group: the segments; none has drafts. Saves are of 1 token or more.
        tiles: how to cut the kernels instead of `chunk_tiles`.

    Returns:
        [T, H, V] in the type of q; undefined for tokens that are nobody's.
    """
    num_tokens, num_heads, num_keys = q_THK.shape
    num_values = v_THV.shape[2]
    dtype = q_THK.dtype
    assert dtype in (torch.bfloat16, torch.float32), f"activations in {dtype}"
    assert k_THK.dtype == v_THV.dtype == dtype, f"{dtype}, {k_THK.dtype}, {v_THV.dtype}"
    for x in (q_THK, k_THK, v_THV, dt_bias_HK, state_SHVK, record_SNHX):
        assert x.is_contiguous(), f"strides {x.stride()} of {tuple(x.shape)}"
    assert decay_THK.stride()[1:] == (num_keys, 1), f"gate logits of strides {decay_THK.stride()}"
    assert num_heads == 1 or beta_TH.stride(1) == 1, f"rates of strides {beta_TH.stride()}"
    assert state_SHVK.dtype == record_SNHX.dtype == torch.float32
    for size in (num_keys, num_values):
        assert size >= 16 and size & (size - 1) == 0, f"head dim {size}"
    assert num_tokens == group.num_tokens and not group.max_drafts, f"{num_tokens}: {group}"
    assert not group.max_replay or record_SNHX.shape[1], "replay without a record"

    tiles = tiles or chunk_tiles(group, num_heads, num_values, dtype)
    num_segments = group.num_segments
    num_chunks = num_tokens // CHUNK_SIZE + num_segments
    tile_size = CHUNK_SIZE * (3 * num_keys + num_values + CHUNK_SIZE)
    tiles_JHX = q_THK.new_empty(num_chunks, num_heads, tile_size)
    decay_JHK = state_SHVK.new_empty(num_chunks, num_heads, num_keys)
    o_THV = torch.empty_like(v_THV)
    # Only addresses where the group never saves: the kernels do not look at them.
    saves = group.saves or PackedSaves(*(group.offsets_S,) * 3)
    has_saves = group.saves is not None
    common = {
        "H": num_heads,
        "K": num_keys,
        "V": num_values,
        "CHUNK": CHUNK_SIZE,
        "PRECISION": "tf32" if dtype == torch.bfloat16 else "tf32x3",
    }
    fine = torch.float16 if dtype == torch.bfloat16 else torch.float32
    gate = {
        "FINE": tl.float16 if fine == torch.float16 else tl.float32,
        "BOUND": lower_bound or 0.0,
        "BLOCK_B": max(16, triton.next_power_of_2(num_segments)),
    }
    scan_block_v = min(tiles.scan_block_v, num_values)
    num_blocks = num_values // scan_block_v
    chunk_products_kernel[(num_chunks, num_heads)](
        q_THK,
        k_THK,
        v_THV,
        decay_THK,
        beta_TH,
        a_log_H,
        dt_bias_HK,
        _passed_tokens(q_THK.device, fine),
        tiles_JHX,
        decay_JHK,
        group.offsets_S,
        decay_THK.stride(0),
        beta_TH.stride(0),
        num_segments,
        NUM_LEVELS=_NUM_LEVELS,
        num_warps=tiles.products_warps,
        **common,
        **gate,
    )
    chunk_scan_kernel[(num_blocks, num_heads, num_segments)](
        tiles_JHX,
        decay_JHK,
        o_THV,
        state_SHVK,
        record_SNHX,
        group.offsets_S,
        group.read_slots_B,
        group.write_slots_B,
        group.replay_B,
        *saves,
        record_SNHX.shape[1],
        BLOCK_V=scan_block_v,
        HAS_REPLAY=group.max_replay > 0,
        HAS_SAVES=has_saves,
        NUM_STAGES=tiles.scan_stages,
        num_warps=tiles.scan_warps,
        **common,
    )
    if has_saves:
        saves_block_v = min(tiles.saves_block_v, num_values)
        # Two warps use no wgmma.
        is_narrow = saves_block_v < _LEAST_TURNED_COLUMNS
        chunk_saves_kernel[(num_values // saves_block_v, num_heads, saves.slots_E.shape[0])](
            k_THK,
            decay_THK,
            a_log_H,
            dt_bias_HK,
            tiles_JHX,
            state_SHVK,
            group.offsets_S,
            *saves,
            decay_THK.stride(0),
            num_segments,
            BLOCK_V=saves_block_v,
            num_warps=2 if is_narrow and dtype == torch.bfloat16 else 4,
            **common,
            **gate,
        )
    return o_THV


@cache
def _passed_tokens(device: torch.device, dtype: torch.dtype) -> Tensor:
    """1 for what lies between a token (row) and the middle of its block of each level.

    Of level l the blocks have 2^(l + 1) tokens. Above the middle that is the tokens from there to
    itself, below it those behind itself and before the middle.

    Returns:
        [levels, C, C] of `dtype`, kept for all calls.
    """
    row_C1 = torch.arange(CHUNK_SIZE).unsqueeze(1)
    column_C = torch.arange(CHUNK_SIZE)
    levels = []
    for level in range(_NUM_LEVELS):
        half = 1 << level
        middle_C1 = row_C1 // (2 * half) * (2 * half) + half
        above_CC = (column_C >= middle_C1) & (column_C <= row_C1)
        below_CC = (column_C > row_C1) & (column_C < middle_C1)
        levels.append(torch.where(row_C1 >= middle_C1, above_CC, below_CC))
    return torch.stack(levels).to(device, dtype)
