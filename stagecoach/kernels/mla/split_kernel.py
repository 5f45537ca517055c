"""Attention over paged contexts that many programs share out, and the sum of their pieces.

A context is cut into tiles of positions; neighbouring tiles make a piece, and a program attends
from one tile of query rows to one piece. Owns how pieces are found on the device from the
segments' true lengths, the online softmax, and what is hidden. Knows no layer.

Segments end in a window (their last tokens are the queries, their rows are in the cache) or
carry a block (the queries' rows are at hand and never cached).

Dimensions: M query rows (tokens x heads of a key group), N positions of a tile, C key width, P
width of a second part of keys, V value width, S segments.
"""

import triton
import triton.language as tl


@triton.jit
def find_segment(index, counts_S):
    """Of `counts_S` things a segment, laid end to end: the segment of one, and its number there.

    The segment is the length of `counts_S` where there is no such thing.
    """
    ends_S = tl.cumsum(counts_S, 0)
    segment = tl.sum((ends_S <= index).to(tl.int32), 0)
    first = tl.sum(tl.where(ends_S <= index, counts_S, 0), 0)
    return segment, index - first


@triton.jit
def _finite(x):
    """`x`, and zeros for what is not finite there."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _largest(x_MC):
    """The largest magnitude of each row, float32 [M]."""
    return tl.max(tl.abs(x_MC.to(tl.float32)), 1)


@triton.jit
def _powers(largest_M):
    """A power of two that brings each below 2^15, and its inverse; both are finite."""
    bits_M = tl.minimum(254 + 14 - (largest_M.to(tl.int32, bitcast=True) >> 23), 253)
    power_M = (bits_M << 23).to(tl.float32, bitcast=True)
    return power_M, ((254 - bits_M) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_rows(
    key_ptr,
    value_ptr,
    at_N,
    is_there_N,
    KEY_WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_V: tl.constexpr,
    SHARES_ROWS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Both parts of the keys, and the values, of the rows that begin at `at_N`, in `DTYPE`.

    Unless masked all rows are there.
    """
    columns_C = tl.arange(0, TILE_C)
    columns_P = tl.arange(0, TILE_P)
    columns_V = tl.arange(0, TILE_V)
    key_ptr_NC = key_ptr + at_N[:, None] + columns_C[None, :]
    if IS_MASKED or KEY_WIDTH != TILE_C:
        is_key_NC = is_there_N[:, None] & (columns_C < KEY_WIDTH)[None, :]
        k_NC = tl.load(key_ptr_NC, mask=is_key_NC, other=0.0)
    else:
        k_NC = tl.load(key_ptr_NC)
    k_NC = k_NC.to(DTYPE)
    k_NP = k_NC
    if SECOND_WIDTH > 0:
        key_ptr_NP = key_ptr + at_N[:, None] + (KEY_WIDTH + columns_P)[None, :]
        if IS_MASKED or SECOND_WIDTH != TILE_P:
            is_key_NP = is_there_N[:, None] & (columns_P < SECOND_WIDTH)[None, :]
            k_NP = tl.load(key_ptr_NP, mask=is_key_NP, other=0.0)
        else:
            k_NP = tl.load(key_ptr_NP)
        k_NP = k_NP.to(DTYPE)
    v_NV = k_NC
    if not SHARES_ROWS:
        is_value_NV = is_there_N[:, None] & (columns_V < VALUE_WIDTH)[None, :]
        v_NV = tl.load(value_ptr + at_N[:, None] + columns_V[None, :], mask=is_value_NV, other=0.0)
        v_NV = v_NV.to(DTYPE)
    return k_NC, k_NP, v_NV


@triton.jit
def _attend_tile(
    q_MC,
    q_MP,
    k_NC,
    k_NP,
    v_NV,
    is_hidden_MN,
    top_M,
    sum_M,
    o_MV,
    scale,
    HAS_SECOND_PART: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax (base 2)."""
    scores_MN = tl.dot(q_MC, tl.trans(k_NC), input_precision=PRECISION)
    if HAS_SECOND_PART:
        scores_MN = tl.dot(q_MP, tl.trans(k_NP), scores_MN, input_precision=PRECISION)
    scores_MN = scores_MN * scale
    if IS_MASKED:
        scores_MN = tl.where(is_hidden_MN, float("-inf"), scores_MN)
    new_top_M = tl.maximum(top_M, tl.max(scores_MN, 1))
    # All hidden so far: any finite value will do.
    base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
    shares_MN = tl.exp2(scores_MN - base_M[:, None])
    decay_M = tl.exp2(top_M - base_M)
    sum_M = sum_M * decay_M + tl.sum(shares_MN, 1)
    o_MV = o_MV * decay_M[:, None]
    o_MV = tl.dot(shares_MN.to(v_NV.dtype), v_NV, o_MV, input_precision=PRECISION)
    return new_top_M, sum_M, o_MV


@triton.jit(
    do_not_specialize=["num_segments", "num_row_tiles", "target_pieces", "rows_per_piece"],
    do_not_specialize_on_alignment=["lengths_ptr", "starts_ptr", "first_pages_ptr", "pages_ptr"],
)
def attend_pieces_kernel(
    q_ptr,
    q_pe_ptr,
    cache_ptr,
    rows_descriptor,
    second_descriptor,
    own_ptr,
    o_ptr,
    partial_o_ptr,
    partial_top_ptr,
    pieces_ptr,
    lengths_ptr,
    starts_ptr,
    first_pages_ptr,
    pages_ptr,
    scale,
    num_segments,
    num_row_tiles,
    target_pieces,
    rows_per_piece,
    q_token_stride,
    q_head_stride,
    q_pe_token_stride,
    q_pe_head_stride,
    cache_stride,
    own_stride,
    NUM_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_START: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MIN_PIECE_TILES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_OWN: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Piece by piece: outputs [piece, group, row, V] and the base-2 logarithms of their weights.

    Programs: (pieces x tiles of rows, key groups). `lengths_ptr` holds offsets of the segments'
    tokens [S + 1] with windows, is_real [S] with blocks of BLOCK_TOKENS. NUM_HEADS query heads
    share a key head. With descriptors, of the cache in tiles of TILE_N rows, whole tiles come by
    the copy engine. VALUE_START < 0: values are the first columns of the keys. `pieces_ptr`
    gets [S, 2]: the first piece of a segment and how many there are. What is one piece needs no
    sum: it goes to `o_ptr`, [T, H, V].
    """
    HAS_BLOCK: tl.constexpr = BLOCK_TOKENS > 0
    HAS_SECOND_PART: tl.constexpr = SECOND_WIDTH > 0
    SHARES_ROWS: tl.constexpr = VALUE_START < 0
    # E4M3 is exact in float16, and made faster than bfloat16; else products are of the queries'.
    # Not with many rows: 354 instead of 260 us for 8 x 8,192 positions, 256 rows each (H200).
    IS_SCALED: tl.constexpr = (
        TILE_M <= 32
        and cache_ptr.dtype.element_ty == tl.float8e4nv
        and q_ptr.dtype.element_ty == tl.bfloat16
    )
    DTYPE: tl.constexpr = tl.float16 if IS_SCALED else q_ptr.dtype.element_ty
    row_tile = tl.program_id(0) % num_row_tiles
    piece = tl.program_id(0) // num_row_tiles
    group = tl.program_id(1)

    # How many tiles each segment has, how many pieces that makes, and which of them is ours.
    segments_S = tl.arange(0, SEGMENTS)
    is_segment_S = segments_S < num_segments
    starts_S = tl.load(starts_ptr + segments_S, mask=is_segment_S, other=0)
    if HAS_BLOCK:
        is_real_S = tl.load(lengths_ptr + segments_S, mask=is_segment_S, other=0) > 0
        tiles_S = tl.where(is_real_S, tl.cdiv(starts_S, TILE_N) + 1, 0)
    else:
        offsets_S = tl.load(lengths_ptr + segments_S, mask=is_segment_S, other=0)
        lengths_S = tl.load(lengths_ptr + segments_S + 1, mask=is_segment_S, other=0) - offsets_S
        tiles_S = tl.where(lengths_S > 0, tl.cdiv(starts_S + lengths_S, TILE_N), 0)
    piece_tiles = tl.maximum(tl.cdiv(tl.sum(tiles_S, 0), target_pieces), MIN_PIECE_TILES)
    if num_segments * 2 <= target_pieces:
        # A few pieces too many would run alone, after all others: rather longer ones.
        for _ in tl.static_range(4):
            is_too_many = tl.sum(tl.cdiv(tiles_S, piece_tiles), 0) > target_pieces
            piece_tiles += tl.where(is_too_many, tl.cdiv(piece_tiles, 4), 0)
    counts_S = tl.cdiv(tiles_S, piece_tiles)
    segment, number = find_segment(piece, counts_S)
    if segment >= num_segments:
        return
    is_ours_S = segments_S == segment
    num_pieces = tl.sum(tl.where(is_ours_S, counts_S, 0), 0)
    num_tiles = tl.sum(tl.where(is_ours_S, tiles_S, 0), 0)
    start = tl.sum(tl.where(is_ours_S, starts_S, 0), 0)
    if HAS_BLOCK:
        first_token = segment * BLOCK_TOKENS
        num_rows = BLOCK_TOKENS * NUM_HEADS
        context = start
        num_full_tiles = start // TILE_N
    else:
        first_token = tl.sum(tl.where(is_ours_S, offsets_S, 0), 0)
        length = tl.sum(tl.where(is_ours_S, lengths_S, 0), 0)
        num_rows = length * NUM_HEADS
        context = start + length
        # Positions up to the anchor's: every token of the window sees them.
        num_full_tiles = (start + 1) // TILE_N
    if row_tile * TILE_M >= num_rows:
        return
    if (number == 0) & (row_tile == 0) & (group == 0):
        tl.store(pieces_ptr + segment * 2, piece)
        tl.store(pieces_ptr + segment * 2 + 1, num_pieces)
    first_tile = (number * num_tiles) // num_pieces
    end_tile = ((number + 1) * num_tiles) // num_pieces

    # The queries of our rows; row r is head r % NUM_HEADS of token r // NUM_HEADS.
    rows_M = row_tile * TILE_M + tl.arange(0, TILE_M)
    is_row_M = rows_M < num_rows
    tokens_M = rows_M // NUM_HEADS
    heads_M = group * NUM_HEADS + rows_M % NUM_HEADS
    q_tokens_M = (first_token + tokens_M).to(tl.int64)
    columns_C = tl.arange(0, TILE_C)
    is_column_C = columns_C < KEY_WIDTH
    is_column_MC = is_row_M[:, None] & is_column_C[None, :]
    q_at_M = q_tokens_M * q_token_stride + heads_M * q_head_stride
    q_ptrs_MC = q_ptr + q_at_M[:, None] + columns_C[None, :]
    q_MC = tl.load(q_ptrs_MC, mask=is_column_MC, other=0.0)
    columns_P = tl.arange(0, TILE_P)
    is_column_MP = is_row_M[:, None] & (columns_P < SECOND_WIDTH)[None, :]
    q_pe_at_M = q_tokens_M * q_pe_token_stride + heads_M * q_pe_head_stride
    q_ptrs_MP = q_pe_ptr + q_pe_at_M[:, None] + columns_P[None, :]
    q_MP = q_MC
    if HAS_SECOND_PART:
        q_MP = tl.load(q_ptrs_MP, mask=is_column_MP, other=0.0)
    row_scale = scale
    if IS_SCALED:
        power_M, inverse_M = _powers(tl.maximum(_largest(q_MC), _largest(q_MP)))
        q_MC = (q_MC.to(tl.float32) * power_M[:, None]).to(DTYPE)
        q_MP = (q_MP.to(tl.float32) * power_M[:, None]).to(DTYPE) if HAS_SECOND_PART else q_MC
        row_scale = scale * inverse_M[:, None]
    places_N = tl.arange(0, TILE_N)
    key_ptr = cache_ptr + group * KEY_WIDTH
    value_ptr = cache_ptr + VALUE_START + group * VALUE_WIDTH
    page_ptr = pages_ptr + tl.load(first_pages_ptr + segment)
    top_M = tl.full((TILE_M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((TILE_M,), tl.float32)
    o_MV = tl.zeros((TILE_M, TILE_V), tl.float32)

    # Where a whole tile lies in one page, the page of the next one is read ahead: rows that wait
    # for it would come late.
    end_full_tile = tl.minimum(end_tile, num_full_tiles)
    last_position = tl.maximum(end_full_tile - 1, 0) * TILE_N
    page = tl.load(
        page_ptr + first_tile * TILE_N // PAGE_SIZE, mask=first_tile < end_full_tile, other=0
    )
    nothing_MN = is_row_M[:, None] & (places_N < 0)[None, :]
    for tile in tl.range(first_tile, end_full_tile, num_stages=NUM_STAGES):
        position = tl.cast(tile, tl.int32) * TILE_N
        if PAGE_SIZE % TILE_N == 0:
            row = page * PAGE_SIZE + position % PAGE_SIZE
            at_N = (row.to(tl.int64) + places_N) * cache_stride
            page = tl.load(page_ptr + tl.minimum(position + TILE_N, last_position) // PAGE_SIZE)
        else:
            pages_N = tl.load(page_ptr + (position + places_N) // PAGE_SIZE).to(tl.int64)
            at_N = (pages_N * PAGE_SIZE + (position + places_N) % PAGE_SIZE) * cache_stride
        if HAS_DESCRIPTORS:
            k_NC = rows_descriptor.load([row, 0]).to(DTYPE)
            k_NP = k_NC
            if HAS_SECOND_PART:
                k_NP = second_descriptor.load([row, KEY_WIDTH]).to(DTYPE)
            v_NV = k_NC
        else:
            k_NC, k_NP, v_NV = _load_rows(
                key_ptr, value_ptr, at_N, places_N >= 0, KEY_WIDTH, SECOND_WIDTH, VALUE_WIDTH,
                TILE_C, TILE_P, TILE_V, SHARES_ROWS, IS_MASKED=False, DTYPE=DTYPE,
            )  # fmt: skip
        top_M, sum_M, o_MV = _attend_tile(
            q_MC,
            q_MP,
            k_NC,
            k_NP,
            v_NV,
            nothing_MN,
            top_M,
            sum_M,
            o_MV,
            row_scale,
            HAS_SECOND_PART,
            IS_MASKED=False,
            PRECISION=PRECISION,
        )

    end_context_tile = end_tile
    if HAS_BLOCK:
        end_context_tile = tl.minimum(end_tile, num_tiles - 1)
    for tile in tl.range(tl.maximum(first_tile, num_full_tiles), end_context_tile, num_stages=1):
        positions_N = tl.cast(tile, tl.int32) * TILE_N + places_N
        is_there_N = positions_N < context
        pages_N = tl.load(page_ptr + positions_N // PAGE_SIZE, mask=is_there_N, other=0)
        at_N = (pages_N.to(tl.int64) * PAGE_SIZE + positions_N % PAGE_SIZE) * cache_stride
        is_hidden_MN = is_row_M[:, None] & (positions_N >= context)[None, :]
        if not HAS_BLOCK:
            is_hidden_MN = is_hidden_MN | (positions_N[None, :] > start + tokens_M[:, None])
        k_NC, k_NP, v_NV = _load_rows(
            key_ptr, value_ptr, at_N, is_there_N, KEY_WIDTH, SECOND_WIDTH, VALUE_WIDTH, TILE_C,
            TILE_P, TILE_V, SHARES_ROWS, IS_MASKED=True, DTYPE=DTYPE,
        )  # fmt: skip
        if not HAS_BLOCK:
            # A share of 0 times NaN is NaN: a draft must not reach the tokens before it.
            v_NV = _finite(v_NV)
        top_M, sum_M, o_MV = _attend_tile(
            q_MC,
            q_MP,
            k_NC,
            k_NP,
            v_NV,
            is_hidden_MN,
            top_M,
            sum_M,
            o_MV,
            row_scale,
            HAS_SECOND_PART,
            IS_MASKED=True,
            PRECISION=PRECISION,
        )

    if HAS_BLOCK:  # noqa: SIM102 (one is known when compiled, the other is not)
        if end_tile == num_tiles:
            own_q_MC, own_q_MP = q_MC, q_MP
            if IS_SCALED:  # own rows are not of E4M3
                own_q_MC = tl.load(q_ptrs_MC, mask=is_column_MC, other=0.0)
                own_q_MP = own_q_MC
                if HAS_SECOND_PART:
                    own_q_MP = tl.load(q_ptrs_MP, mask=is_column_MP, other=0.0)
            own_N = tl.arange(0, TILE_OWN)
            is_own_N = own_N < BLOCK_TOKENS
            at_N = (segment * BLOCK_TOKENS + own_N).to(tl.int64) * own_stride
            is_hidden_MN = is_row_M[:, None] & (own_N >= BLOCK_TOKENS)[None, :]
            if IS_CAUSAL:
                is_hidden_MN = is_hidden_MN | (own_N[None, :] > tokens_M[:, None])
            k_NC, k_NP, v_NV = _load_rows(
                own_ptr + group * KEY_WIDTH, own_ptr + VALUE_START + group * VALUE_WIDTH, at_N,
                is_own_N, KEY_WIDTH, SECOND_WIDTH, VALUE_WIDTH, TILE_C, TILE_P, TILE_V,
                SHARES_ROWS, IS_MASKED=True, DTYPE=q_ptr.dtype.element_ty,
            )  # fmt: skip
            top_M, sum_M, o_MV = _attend_tile(
                own_q_MC,
                own_q_MP,
                k_NC,
                k_NP,
                v_NV,
                is_hidden_MN,
                top_M,
                sum_M,
                o_MV,
                scale,
                HAS_SECOND_PART,
                IS_MASKED=True,
                PRECISION=PRECISION,
            )

    # A piece of which a row sees nothing weighs nothing.
    divisor_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    weight_M = tl.where(sum_M == 0.0, float("-inf"), top_M + tl.log2(divisor_M))
    columns_V = tl.arange(0, TILE_V)
    is_value_MV = is_row_M[:, None] & (columns_V < VALUE_WIDTH)[None, :]
    num_groups = tl.num_programs(1)
    o_MV = o_MV / divisor_M[:, None]
    if num_pieces == 1:
        at_M = (q_tokens_M * (num_groups * NUM_HEADS) + heads_M) * VALUE_WIDTH
        tl.store(
            o_ptr + at_M[:, None] + columns_V[None, :],
            o_MV.to(o_ptr.dtype.element_ty),
            mask=is_value_MV,
        )
    else:
        at_M = (piece * num_groups + group).to(tl.int64) * rows_per_piece + rows_M
        tl.store(partial_top_ptr + at_M, weight_M, mask=is_row_M)
        tl.store(
            partial_o_ptr + (at_M * VALUE_WIDTH)[:, None] + columns_V[None, :],
            o_MV,
            mask=is_value_MV,
        )


@triton.jit(
    do_not_specialize=["rows_per_piece"],
    do_not_specialize_on_alignment=["segments_ptr", "offsets_ptr"],
)
def sum_pieces_kernel(
    partial_o_ptr,
    partial_top_ptr,
    pieces_ptr,
    segments_ptr,
    offsets_ptr,
    o_ptr,
    num_groups,
    rows_per_piece,
    NUM_HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_PIECES: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_V: tl.constexpr,
):
    """The pieces of each token and head, weighted, where there are several: [T, H, V].

    Programs: (tokens, tiles of heads, parts of V). `segments_ptr` holds the segment of each token
    or -1 with windows; is_real of each block with blocks.
    """
    token = tl.program_id(0)
    if BLOCK_TOKENS > 0:
        segment = token // BLOCK_TOKENS
        if tl.load(segments_ptr + segment) == 0:
            return
        token_in_segment = token % BLOCK_TOKENS
    else:
        segment = tl.load(segments_ptr + token)
        if segment < 0:
            return
        token_in_segment = token - tl.load(offsets_ptr + segment)
    num_pieces = tl.load(pieces_ptr + segment * 2 + 1)
    if num_pieces == 1:
        return
    first_piece = tl.load(pieces_ptr + segment * 2)
    num_heads = num_groups * NUM_HEADS
    heads_H = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    is_head_H = heads_H < num_heads
    rows_H = token_in_segment * NUM_HEADS + heads_H % NUM_HEADS
    columns_V = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    is_value_HV = is_head_H[:, None] & (columns_V < VALUE_WIDTH)[None, :]
    top_H = tl.full((TILE_H,), float("-inf"), tl.float32)
    total_H = tl.zeros((TILE_H,), tl.float32)
    o_HV = tl.zeros((TILE_H, TILE_V), tl.float32)
    for first in range(0, num_pieces, TILE_PIECES):
        numbers_E = tl.cast(first, tl.int32) + tl.arange(0, TILE_PIECES)
        is_piece_E = numbers_E < num_pieces
        groups_EH = (first_piece + numbers_E)[:, None] * num_groups + heads_H[None, :] // NUM_HEADS
        at_EH = groups_EH.to(tl.int64) * rows_per_piece + rows_H[None, :]
        tops_EH = tl.load(
            partial_top_ptr + at_EH,
            mask=is_piece_E[:, None] & is_head_H[None, :],
            other=float("-inf"),
        )
        o_EHV = tl.load(
            partial_o_ptr + (at_EH * VALUE_WIDTH)[:, :, None] + columns_V[None, None, :],
            mask=is_piece_E[:, None, None] & is_value_HV[None, :, :],
            other=0.0,
        )
        new_top_H = tl.maximum(top_H, tl.max(tops_EH, 0))
        base_H = tl.where(new_top_H == float("-inf"), 0.0, new_top_H)
        weights_EH = tl.exp2(tops_EH - base_H[None, :])
        decay_H = tl.exp2(top_H - base_H)
        total_H = total_H * decay_H + tl.sum(weights_EH, 0)
        o_HV = o_HV * decay_H[:, None] + tl.sum(weights_EH[:, :, None] * o_EHV, 0)
        top_H = new_top_H
    at_H = (token.to(tl.int64) * num_heads + heads_H) * VALUE_WIDTH
    tl.store(
        o_ptr + at_H[:, None] + columns_V[None, :],
        (o_HV / total_H[:, None]).to(o_ptr.dtype.element_ty),
        mask=is_value_HV,
    )
