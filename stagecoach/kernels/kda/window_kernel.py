"""KDA windows in Triton: `reference.kda_recurrent` with gate, rates and the output's gated norm.

One program runs one head of one segment, token after token, and keeps the head's whole state from
the first replayed row to the last token. It alone reads and writes that head's rows of a record,
so that a slot may be read and written in one launch.
"""

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); a large x is its own, and exp of it would overflow."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _save(
    state_VK, states, segment, num_tokens, first_save, save_tokens, save_slots,
    state_stride, tile_VK, mask_VK,
):  # fmt: skip
    """Copy the state to the slots of the saves that are due behind so many tokens."""
    for index in range(tl.load(first_save + segment), tl.load(first_save + segment + 1)):
        if tl.load(save_tokens + index) == num_tokens:
            slot = tl.load(save_slots + index).to(tl.int64)
            tl.store(states + slot * state_stride + tile_VK, state_VK, mask=mask_VK)


@triton.jit(do_not_specialize=["lower_bound", "eps"])
def kda_window_kernel(
    q, k, v, decay, beta, gate, out, a_log, dt_bias, norm, states, records,
    offsets, read_slots, write_slots, replays, first_save, save_tokens, save_slots,
    lower_bound, eps,
    q_stride, k_stride, v_stride, decay_stride, beta_stride, gate_stride, out_stride,
    state_stride, record_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BOUND: tl.constexpr, HAS_SAVES: tl.constexpr,
):  # fmt: skip
    """Grid: heads, segments. K = V = HEAD_DIM channels, padded to BLOCK."""
    head, segment = tl.program_id(0), tl.program_id(1)
    first = tl.load(offsets + segment).to(tl.int64)
    length = (tl.load(offsets + segment + 1) - first).to(tl.int32)
    if length == 0:
        return
    keys = tl.arange(0, BLOCK)
    values = tl.arange(0, BLOCK)
    is_key, is_value = keys < HEAD_DIM, values < HEAD_DIM
    mask_VK = is_value[:, None] & is_key[None, :]
    tile_VK = (head * HEAD_DIM + values[:, None]) * HEAD_DIM + keys[None, :]
    ROW: tl.constexpr = 3 * HEAD_DIM
    read_slot = tl.load(read_slots + segment).to(tl.int64)
    write_slot = tl.load(write_slots + segment).to(tl.int64)
    replay = tl.load(replays + segment)
    rate = tl.exp(tl.load(a_log + head))
    bias_K = tl.load(dt_bias + head * HEAD_DIM + keys, mask=is_key, other=0.0)
    norm_V = tl.load(norm + values, mask=is_value, other=0.0)

    state_VK = tl.load(states + read_slot * state_stride + tile_VK, mask=mask_VK, other=0.0)
    recorded = records + read_slot * record_stride + head * ROW
    for number in range(replay):
        row = recorded + number * NUM_HEADS * ROW
        decay_K = tl.load(row + keys, mask=is_key, other=1.0)
        k_K = tl.load(row + HEAD_DIM + keys, mask=is_key, other=0.0)
        u_V = tl.load(row + 2 * HEAD_DIM + values, mask=is_value, other=0.0)
        state_VK = state_VK * decay_K[None, :] + u_V[:, None] * k_K[None, :]
        if HAS_SAVES:
            _save(
                state_VK, states, segment, number + 1 - replay,
                first_save, save_tokens, save_slots, state_stride, tile_VK, mask_VK,
            )  # fmt: skip
    # Other threads of this program write the rows that these have read.
    tl.debug_barrier()

    written = records + write_slot * record_stride + head * ROW
    for place in range(length):
        token = first + place
        q_K = tl.load(q + token * q_stride + head * HEAD_DIM + keys, mask=is_key, other=0.0)
        k_K = tl.load(k + token * k_stride + head * HEAD_DIM + keys, mask=is_key, other=0.0)
        v_V = tl.load(v + token * v_stride + head * HEAD_DIM + values, mask=is_value, other=0.0)
        raw_K = tl.load(
            decay + token * decay_stride + head * HEAD_DIM + keys, mask=is_key, other=0.0
        )
        gate_V = tl.load(
            gate + token * gate_stride + head * HEAD_DIM + values, mask=is_value, other=0.0
        )
        q_K, k_K, v_V = q_K.to(tl.float32), k_K.to(tl.float32), v_V.to(tl.float32)
        raw_K = raw_K.to(tl.float32) + bias_K
        if HAS_BOUND:
            decay_K = tl.exp(lower_bound * tl.sigmoid(rate * raw_K))
        else:
            decay_K = tl.exp(-rate * _softplus(raw_K))
        beta_of_token = tl.sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32))
        state_VK = state_VK * decay_K[None, :]
        u_V = beta_of_token * (v_V - tl.sum(state_VK * k_K[None, :], 1))
        state_VK += u_V[:, None] * k_K[None, :]
        o_V = tl.sum(state_VK * q_K[None, :], 1)
        o_V *= tl.rsqrt(tl.sum(o_V * o_V, 0) / HEAD_DIM + eps)
        o_V = o_V * norm_V * tl.sigmoid(gate_V.to(tl.float32))
        tl.store(
            out + token * out_stride + head * HEAD_DIM + values,
            o_V.to(out.dtype.element_ty),
            mask=is_value,
        )
        if place == 0:
            if write_slot != 0:
                tl.store(states + write_slot * state_stride + tile_VK, state_VK, mask=mask_VK)
            if HAS_SAVES:
                _save(
                    state_VK, states, segment, 1,
                    first_save, save_tokens, save_slots, state_stride, tile_VK, mask_VK,
                )  # fmt: skip
        elif write_slot != 0:
            row = written + (place - 1) * NUM_HEADS * ROW
            tl.store(row + keys, decay_K, mask=is_key)
            tl.store(row + HEAD_DIM + keys, k_K, mask=is_key)
            tl.store(row + 2 * HEAD_DIM + values, u_V, mask=is_value)
