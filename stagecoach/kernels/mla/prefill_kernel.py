"""Attention of chunks in head space: keys and values up-projected, contexts end to end.

Dimensions: M queries of a tile, N positions of a tile, K nope part of a head, P pe part (one for
all heads), V value width, S segments.
"""

import triton
import triton.language as tl

from stagecoach.kernels.mla.split_kernel import find_segment


@triton.jit
def _attend_tile(
    q_MK,
    q_MP,
    key_ptr,
    pe_ptr,
    value_ptr,
    first_position,
    end_M,
    context,
    top_M,
    sum_M,
    o_MV,
    scale,
    kv_stride,
    pe_stride,
    NOPE_WIDTH: tl.constexpr,
    PE_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_V: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax (base 2); query m sees positions < end_M[m]."""
    positions_N = first_position + tl.arange(0, TILE_N)
    at_N = positions_N.to(tl.int64)
    columns_K = tl.arange(0, TILE_K)
    columns_P = tl.arange(0, TILE_P)
    columns_V = tl.arange(0, TILE_V)
    is_key_NK = (positions_N >= 0)[:, None] & (columns_K < NOPE_WIDTH)[None, :]
    is_pe_NP = (positions_N >= 0)[:, None] & (columns_P < PE_WIDTH)[None, :]
    is_value_NV = (positions_N >= 0)[:, None] & (columns_V < VALUE_WIDTH)[None, :]
    if IS_MASKED:
        is_there_N1 = (positions_N < context)[:, None]
        is_key_NK = is_key_NK & is_there_N1
        is_pe_NP = is_pe_NP & is_there_N1
        is_value_NV = is_value_NV & is_there_N1
    if IS_MASKED or NOPE_WIDTH != TILE_K:
        k_NK = tl.load(
            key_ptr + (at_N * kv_stride)[:, None] + columns_K[None, :], mask=is_key_NK, other=0.0
        )
    else:
        k_NK = tl.load(key_ptr + (at_N * kv_stride)[:, None] + columns_K[None, :])
    if IS_MASKED or PE_WIDTH != TILE_P:
        k_NP = tl.load(
            pe_ptr + (at_N * pe_stride)[:, None] + columns_P[None, :], mask=is_pe_NP, other=0.0
        )
    else:
        k_NP = tl.load(pe_ptr + (at_N * pe_stride)[:, None] + columns_P[None, :])
    if IS_MASKED or VALUE_WIDTH != TILE_V:
        v_NV = tl.load(
            value_ptr + (at_N * kv_stride)[:, None] + columns_V[None, :],
            mask=is_value_NV,
            other=0.0,
        )
    else:
        v_NV = tl.load(value_ptr + (at_N * kv_stride)[:, None] + columns_V[None, :])
    scores_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION)
    scores_MN = tl.dot(q_MP, tl.trans(k_NP), scores_MN, input_precision=PRECISION)
    scores_MN = scores_MN * scale
    if IS_MASKED:
        scores_MN = tl.where(positions_N[None, :] < end_M[:, None], scores_MN, float("-inf"))
    new_top_M = tl.maximum(top_M, tl.max(scores_MN, 1))
    base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
    shares_MN = tl.exp2(scores_MN - base_M[:, None])
    decay_M = tl.exp2(top_M - base_M)
    sum_M = sum_M * decay_M + tl.sum(shares_MN, 1)
    o_MV = o_MV * decay_M[:, None]
    o_MV = tl.dot(shares_MN.to(v_NV.dtype), v_NV, o_MV, input_precision=PRECISION)
    return new_top_M, sum_M, o_MV


@triton.jit(do_not_specialize=["num_segments", "first_head"])
def prefill_kernel(
    q_ptr,
    kv_ptr,
    pe_ptr,
    gate_ptr,
    o_ptr,
    offsets_ptr,
    starts_ptr,
    scale,
    num_segments,
    first_head,
    q_token_stride,
    q_head_stride,
    kv_stride,
    pe_stride,
    gate_token_stride,
    gate_head_stride,
    o_token_stride,
    NOPE_WIDTH: tl.constexpr,
    PE_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_GATE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """softmax(q k) v, token w of a segment over positions < start + w + 1, times the gate.

    Programs: (heads from `first_head` on, tiles of queries). `kv_ptr` holds
    [contexts, heads, K + V] of these heads, `pe_ptr` the pe of each position.
    """
    # The last tiles see most: they go first.
    segments_S = tl.arange(0, SEGMENTS)
    is_segment_S = segments_S < num_segments
    offsets_S = tl.load(offsets_ptr + segments_S, mask=is_segment_S, other=0)
    lengths_S = tl.load(offsets_ptr + segments_S + 1, mask=is_segment_S, other=0) - offsets_S
    starts_S = tl.load(starts_ptr + segments_S, mask=is_segment_S, other=0)
    contexts_S = tl.where(lengths_S > 0, starts_S + lengths_S, 0)
    counts_S = tl.cdiv(lengths_S, TILE_M)
    index = tl.sum(counts_S, 0) - 1 - tl.program_id(1)
    if index < 0:
        return
    segment, tile = find_segment(index, counts_S)
    is_ours_S = segments_S == segment
    first_token = tl.sum(tl.where(is_ours_S, offsets_S, 0), 0)
    length = tl.sum(tl.where(is_ours_S, lengths_S, 0), 0)
    start = tl.sum(tl.where(is_ours_S, starts_S, 0), 0)
    context = start + length
    first_row = tl.sum(tl.where(segments_S < segment, contexts_S, 0), 0).to(tl.int64)
    local_head = tl.program_id(0)
    head = first_head + local_head

    tokens_M = tile * TILE_M + tl.arange(0, TILE_M)
    is_token_M = tokens_M < length
    end_M = start + tl.minimum(tokens_M, length - 1) + 1
    at_M = (first_token + tokens_M).to(tl.int64)
    columns_K = tl.arange(0, TILE_K)
    columns_P = tl.arange(0, TILE_P)
    columns_V = tl.arange(0, TILE_V)
    q_at_M = q_ptr + at_M * q_token_stride + head * q_head_stride
    q_MK = tl.load(
        q_at_M[:, None] + columns_K[None, :],
        mask=is_token_M[:, None] & (columns_K < NOPE_WIDTH)[None, :],
        other=0.0,
    )
    q_MP = tl.load(
        q_at_M[:, None] + (NOPE_WIDTH + columns_P)[None, :],
        mask=is_token_M[:, None] & (columns_P < PE_WIDTH)[None, :],
        other=0.0,
    )
    key_ptr = kv_ptr + first_row * kv_stride + local_head * (NOPE_WIDTH + VALUE_WIDTH)
    value_ptr = key_ptr + NOPE_WIDTH
    row_pe_ptr = pe_ptr + first_row * pe_stride
    top_M = tl.full((TILE_M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((TILE_M,), tl.float32)
    o_MV = tl.zeros((TILE_M, TILE_V), tl.float32)
    # What all queries of the tile see needs no mask.
    num_full_tiles = (start + tile * TILE_M + 1) // TILE_N
    end_tile = tl.cdiv(tl.minimum(start + tile * TILE_M + TILE_M, context), TILE_N)
    for number in tl.range(0, num_full_tiles, num_stages=NUM_STAGES):
        top_M, sum_M, o_MV = _attend_tile(
            q_MK,
            q_MP,
            key_ptr,
            row_pe_ptr,
            value_ptr,
            tl.cast(number, tl.int32) * TILE_N,
            end_M,
            context,
            top_M,
            sum_M,
            o_MV,
            scale,
            kv_stride,
            pe_stride,
            NOPE_WIDTH,
            PE_WIDTH,
            VALUE_WIDTH,
            TILE_N,
            TILE_K,
            TILE_P,
            TILE_V,
            IS_MASKED=False,
            PRECISION=PRECISION,
        )
    for number in tl.range(num_full_tiles, end_tile, num_stages=1):
        top_M, sum_M, o_MV = _attend_tile(
            q_MK,
            q_MP,
            key_ptr,
            row_pe_ptr,
            value_ptr,
            tl.cast(number, tl.int32) * TILE_N,
            end_M,
            context,
            top_M,
            sum_M,
            o_MV,
            scale,
            kv_stride,
            pe_stride,
            NOPE_WIDTH,
            PE_WIDTH,
            VALUE_WIDTH,
            TILE_N,
            TILE_K,
            TILE_P,
            TILE_V,
            IS_MASKED=True,
            PRECISION=PRECISION,
        )
    o_MV = (o_MV / sum_M[:, None]).to(o_ptr.dtype.element_ty)
    is_value_MV = is_token_M[:, None] & (columns_V < VALUE_WIDTH)[None, :]
    if HAS_GATE:
        gate_at_M = gate_ptr + at_M * gate_token_stride + head * gate_head_stride
        gate_MV = tl.load(gate_at_M[:, None] + columns_V[None, :], mask=is_value_MV, other=0.0)
        o_MV = (o_MV.to(tl.float32) * tl.sigmoid(gate_MV.to(tl.float32))).to(o_ptr.dtype.element_ty)
    tl.store(
        o_ptr + (at_M * o_token_stride + head * VALUE_WIDTH)[:, None] + columns_V[None, :],
        o_MV,
        mask=is_value_MV,
    )
