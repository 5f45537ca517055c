"""The states of segments from chunk to chunk, and what tokens read from them.

Takes what `chunk_products_kernel` left; knows slots and recorded rows, no gate. One program a
segment, head and block of value channels; states stay in registers from read slot to write slot.

Dimensions: S slots, C tokens of a chunk, H heads, K key and V value channels, N rows of a
record, X = 2K + V values of a recorded row, J chunk numbers, B segments, E saves.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from stagecoach.kernels.kda.chunk_gate_kernel import decays_over, log2_decays


@triton.jit
def _pass_chunks(
    state_KV,
    start,
    stop,
    tiles_JHX,
    decay_JHK,
    o_THV,
    segment,
    begin,
    length,
    head,
    values_V,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state from before chunk `start` of a segment to before chunk `stop`; stores outputs."""
    rows_C = tl.arange(0, CHUNK)
    keys_K = tl.arange(0, K)
    places_CK = rows_C[:, None] * K + keys_K[None, :]
    places_KC = rows_C[None, :] * K + keys_K[:, None]
    places_CV = rows_C[:, None] * V + values_V[None, :]
    places_CC = rows_C[:, None] * CHUNK + rows_C[None, :]
    first = begin // CHUNK + segment
    for index in tl.range(start, stop, num_stages=NUM_STAGES):
        place = tl.cast(first + index, tl.int64) * H + head
        tile = tiles_JHX + place * (CHUNK * (3 * K + V + CHUNK))
        w_CK = tl.load(tile + places_CK)
        to_end_KC = tl.load(tile + CHUNK * K + places_KC)
        q_CK = tl.load(tile + 2 * CHUNK * K + places_CK)
        u_CV = tl.load(tile + 3 * CHUNK * K + places_CV)
        pairs_CC = tl.load(tile + CHUNK * (3 * K + V) + places_CC)
        decay_K = tl.load(decay_JHK + place * K + keys_K)
        rounded_KV = state_KV.to(w_CK.dtype)
        u_CV = u_CV - tl.dot(w_CK, rounded_KV, input_precision=PRECISION)
        u_CV = u_CV.to(w_CK.dtype)
        o_CV = tl.dot(q_CK, rounded_KV, input_precision=PRECISION)
        o_CV = tl.dot(pairs_CC, u_CV, acc=o_CV, input_precision=PRECISION)
        state_KV = tl.dot(
            to_end_KC, u_CV, acc=state_KV * decay_K[:, None], input_precision=PRECISION
        )
        places_C = index * CHUNK + rows_C
        tokens_C = (begin + places_C).to(tl.int64)
        o_places_CV = (tokens_C[:, None] * H + head) * V + values_V[None, :]
        tl.store(o_THV + o_places_CV, o_CV.to(w_CK.dtype), mask=places_C[:, None] < length)
    return state_KV


@triton.jit(do_not_specialize=["num_recorded"])
def chunk_scan_kernel(
    tiles_JHX,
    decay_JHK,
    o_THV,
    state_SHVK,
    record_SNHX,
    offsets_S,
    read_slots_B,
    write_slots_B,
    replay_B,
    first_S,
    num_tokens_E,
    slots_E,
    num_recorded,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_REPLAY: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Folds the replayed rows, goes chunk after chunk, and files states at chunks' starts.

    A save inside a chunk gets the state at its start here; `chunk_saves_kernel` leads it on.
    """
    values_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    segment = tl.program_id(2)
    begin = tl.load(offsets_S + segment)
    length = tl.load(offsets_S + segment + 1) - begin
    if length <= 0:
        return
    keys_K = tl.arange(0, K)
    state_places_KV = head * (V * K) + values_V[None, :] * K + keys_K[:, None]
    read_slot = tl.load(read_slots_B + segment).to(tl.int64)
    state_KV = tl.load(state_SHVK + read_slot * (H * V * K) + state_places_KV)
    if HAS_REPLAY:
        for row in range(tl.load(replay_B + segment)):
            recorded_X = record_SNHX + ((read_slot * num_recorded + row) * H + head) * (2 * K + V)
            state_KV *= tl.load(recorded_X + keys_K)[:, None]
            k_K = tl.load(recorded_X + K + keys_K)
            state_KV += k_K[:, None] * tl.load(recorded_X + 2 * K + values_V)[None, :]

    start = begin * 0
    num_chunks = tl.cdiv(length, CHUNK)
    if HAS_SAVES:
        for save in range(tl.load(first_S + segment), tl.load(first_S + segment + 1)):
            held = tl.load(num_tokens_E + save)
            stop = tl.where(held == length, num_chunks, held // CHUNK)
            state_KV = _pass_chunks(
                state_KV, start, stop, tiles_JHX, decay_JHK, o_THV, segment, begin, length, head,
                values_V, H, K, V, CHUNK, NUM_STAGES, PRECISION,
            )  # fmt: skip
            start = stop
            slot = tl.load(slots_E + save).to(tl.int64)
            tl.store(state_SHVK + slot * (H * V * K) + state_places_KV, state_KV)
    state_KV = _pass_chunks(
        state_KV, start, num_chunks, tiles_JHX, decay_JHK, o_THV, segment, begin, length, head,
        values_V, H, K, V, CHUNK, NUM_STAGES, PRECISION,
    )  # fmt: skip
    write_slot = tl.load(write_slots_B + segment).to(tl.int64)
    if write_slot > 0:
        tl.store(state_SHVK + write_slot * (H * V * K) + state_places_KV, state_KV)


@triton.jit(do_not_specialize=["num_segments"])
def chunk_saves_kernel(
    k_TK,
    decay_TK,
    a_log_H,
    dt_bias_HK,
    tiles_JHX,
    state_SHVK,
    offsets_S,
    first_S,
    num_tokens_E,
    slots_E,
    decay_stride,
    num_segments,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BOUND: tl.constexpr,
    FINE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One saved state, from the start of its chunk to the place inside it that it is for.

    Formula: the note on saves of `reference.kda_chunked`.
    """
    values_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    save = tl.program_id(2)
    if save >= tl.load(first_S + num_segments):
        return
    segments_B = tl.arange(0, BLOCK_B)
    is_segment_B = segments_B < num_segments
    last_B = tl.load(first_S + 1 + segments_B, mask=is_segment_B, other=0)
    segment = tl.sum(tl.where(is_segment_B & (last_B <= save), 1, 0), 0)
    begin = tl.load(offsets_S + segment)
    length = tl.load(offsets_S + segment + 1) - begin
    held = tl.load(num_tokens_E + save)
    index = held // CHUNK
    num_tokens = held - index * CHUNK
    # At a border, and at the segment's end, the state was there already.
    if (num_tokens == 0) | (held == length):
        return

    rows_C = tl.arange(0, CHUNK)
    keys_K = tl.arange(0, K)
    is_held_C = rows_C < num_tokens
    is_held_C1 = is_held_C[:, None]
    tokens_C = (begin + index * CHUNK + rows_C).to(tl.int64)
    k_places_CK = (tokens_C[:, None] * H + head) * K + keys_K[None, :]
    k_CK = tl.load(k_TK + k_places_CK, mask=is_held_C1, other=0)
    g_CK = log2_decays(
        decay_TK + head * K,
        a_log_H + head,
        dt_bias_HK + head * K,
        tokens_C,
        is_held_C,
        decay_stride,
        keys_K,
        BOUND,
    )
    is_behind_CC = rows_C[None, :] > rows_C[:, None]
    k_CK = k_CK * decays_over(is_behind_CC.to(FINE), g_CK.to(FINE), PRECISION)
    state_places_KV = head * (V * K) + values_V[None, :] * K + keys_K[:, None]
    state_places_KV += tl.load(slots_E + save).to(tl.int64) * (H * V * K)
    state_KV = tl.load(state_SHVK + state_places_KV)
    place = tl.cast(begin // CHUNK + segment + index, tl.int64) * H + head
    tile = tiles_JHX + place * (CHUNK * (3 * K + V + CHUNK))
    w_CK = tl.load(tile + rows_C[:, None] * K + keys_K[None, :])
    u_CV = tl.load(tile + 3 * CHUNK * K + rows_C[:, None] * V + values_V[None, :])
    u_CV = u_CV - tl.dot(w_CK, state_KV.to(w_CK.dtype), input_precision=PRECISION)
    u_CV = tl.where(is_held_C1, u_CV, 0.0).to(w_CK.dtype)
    state_KV *= tl.exp2(tl.sum(g_CK, 0))[:, None]
    k_KC = tl.trans(k_CK.to(w_CK.dtype))
    state_KV = tl.dot(k_KC, u_CV, acc=state_KV, input_precision=PRECISION)
    tl.store(state_SHVK + state_places_KV, state_KV)
