"""The short convolution of KDA in Triton: taps, SiLU, cut into heads, q and k normalised.

The channels of a head are one program's, for the first tokens of one segment or for a block of
later tokens. A segment's first program alone touches the slots: it reads the history, and only
then writes what it leaves, so that both may be the same slot.
"""

import triton
import triton.language as tl


@triton.jit
def _past_rows(
    x, rows, place_N, row_of_0, first, x_stride, row_stride, channel_D, is_real_N, is_channel_D
):
    """[N, D] rows at places of a segment; those before its start are in the slot.

    `rows` is the slot's; its row `row_of_0` would hold place 0.
    """
    mask_ND = is_real_N[:, None] & is_channel_D[None, :]
    is_new_N1 = place_N[:, None] >= 0
    new_ND = tl.load(
        x + (first + place_N[:, None]) * x_stride + channel_D[None, :],
        mask=mask_ND & is_new_N1,
        other=0.0,
    )
    old_ND = tl.load(
        rows + (row_of_0 + place_N[:, None]) * row_stride + channel_D[None, :],
        mask=mask_ND & (place_N[:, None] < 0),
        other=0.0,
    )
    return tl.where(is_new_N1, new_ND, old_ND)


@triton.jit
def _activate(sums_LD, part, HEAD_DIM: tl.constexpr):
    """SiLU; then q · rsqrt(Σq² + 1e-6) · D^−½ and k · rsqrt(Σk² + 1e-6)."""
    y_LD = sums_LD * tl.sigmoid(sums_LD)
    if part < 2:
        scale_L = tl.rsqrt(tl.sum(y_LD * y_LD, 1) + 1e-6)
        if part == 0:
            scale_L *= HEAD_DIM**-0.5
        y_LD *= scale_L[:, None]
    return y_LD


@triton.jit
def _begin_segment(
    x, weight, rows, out, segment, part, head, in_x_D, channel_D, is_channel_D,
    offsets, read_slots, write_slots, replays, num_drafts, first_save, save_tokens, save_slots,
    x_stride, slot_stride, row_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, FIRST: tl.constexpr, KEPT: tl.constexpr, HAS_SAVES: tl.constexpr,
):  # fmt: skip
    """The first tokens of a segment, and all that it does to slots."""
    HISTORY: tl.constexpr = TAPS - 1
    first = tl.load(offsets + segment).to(tl.int64)
    length = (tl.load(offsets + segment + 1) - first).to(tl.int32)
    read_slot = tl.load(read_slots + segment).to(tl.int64)
    write_slot = tl.load(write_slots + segment).to(tl.int64)
    certain = length - tl.load(num_drafts + segment)
    history = rows + read_slot * slot_stride
    row_of_0 = tl.load(replays + segment) + HISTORY
    place_L = tl.arange(0, FIRST)
    is_real_L = place_L < length
    sums_LD = tl.zeros((FIRST, BLOCK_D), tl.float32)
    for tap in tl.static_range(TAPS):
        x_LD = _past_rows(
            x, history, place_L + (tap - HISTORY), row_of_0, first,
            x_stride, row_stride, in_x_D, is_real_L, is_channel_D,
        )  # fmt: skip
        weight_D = tl.load(weight + in_x_D * TAPS + tap, mask=is_channel_D, other=0.0)
        sums_LD += x_LD.to(tl.float32) * weight_D[None, :].to(tl.float32)
    y_LD = _activate(sums_LD, part, HEAD_DIM)
    target_LD = (first + place_L[:, None]) * (NUM_HEADS * HEAD_DIM) + (
        head * HEAD_DIM + channel_D[None, :]
    )
    mask_LD = is_real_L[:, None] & is_channel_D[None, :]
    tl.store(out + target_LD, y_LD.to(out.dtype.element_ty), mask=mask_LD)
    if HAS_SAVES:
        place_R = tl.arange(0, BLOCK_TAPS)
        is_history_R = place_R < HISTORY
        for index in range(tl.load(first_save + segment), tl.load(first_save + segment + 1)):
            # The rows before the position; before the replayed ones, they are in the slot too.
            saved_RD = _past_rows(
                x, history, place_R + (tl.load(save_tokens + index) - HISTORY), row_of_0, first,
                x_stride, row_stride, in_x_D, is_history_R, is_channel_D,
            )  # fmt: skip
            saved = rows + tl.load(save_slots + index).to(tl.int64) * slot_stride
            tl.store(
                saved + place_R[:, None] * row_stride + in_x_D[None, :],
                saved_RD,
                mask=is_history_R[:, None] & is_channel_D[None, :],
            )
    if write_slot != 0:
        # The rows before the certain end, and those of the drafts behind it.
        place_N = tl.arange(0, KEPT)
        is_kept_N = place_N < HISTORY + length - certain
        kept_ND = _past_rows(
            x, history, place_N + (certain - HISTORY), row_of_0, first,
            x_stride, row_stride, in_x_D, is_kept_N, is_channel_D,
        )  # fmt: skip
        # Other threads of this program have read the slot.
        tl.debug_barrier()
        tl.store(
            rows + write_slot * slot_stride + place_N[:, None] * row_stride + in_x_D[None, :],
            kept_ND,
            mask=is_kept_N[:, None] & is_channel_D[None, :],
        )


@triton.jit
def _continue_segments(
    x, weight, out, block, part, head, in_x_D, channel_D, is_channel_D,
    offsets, segment_of, x_stride, num_tokens,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAPS: tl.constexpr,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of tokens; those among the first of their segment are left out."""
    token_L = block * BLOCK + tl.arange(0, BLOCK)
    segment_L = tl.load(segment_of + token_L, mask=token_L < num_tokens, other=-1)
    first_L = tl.load(offsets + segment_L, mask=segment_L >= 0, other=0)
    is_later_L = (segment_L >= 0) & (token_L - first_L >= FIRST)
    mask_LD = is_later_L[:, None] & is_channel_D[None, :]
    token_L1 = token_L[:, None].to(tl.int64)
    sums_LD = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for tap in tl.static_range(TAPS):
        x_LD = tl.load(
            x + (token_L1 + (tap - (TAPS - 1))) * x_stride + in_x_D[None, :],
            mask=mask_LD,
            other=0.0,
        )
        weight_D = tl.load(weight + in_x_D * TAPS + tap, mask=is_channel_D, other=0.0)
        sums_LD += x_LD.to(tl.float32) * weight_D[None, :].to(tl.float32)
    y_LD = _activate(sums_LD, part, HEAD_DIM)
    target_LD = token_L1 * (NUM_HEADS * HEAD_DIM) + (head * HEAD_DIM + channel_D[None, :])
    tl.store(out + target_LD, y_LD.to(out.dtype.element_ty), mask=mask_LD)


@triton.jit(do_not_specialize=["num_tokens", "num_segments"])
def conv_kernel(
    x, weight, rows, q, k, v, offsets, segment_of, read_slots, write_slots, replays, num_drafts,
    first_save, save_tokens, save_slots,
    x_stride, slot_stride, row_stride, num_tokens, num_segments,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
    HAS_SAVES: tl.constexpr,
):  # fmt: skip
    """Grid: heads of q, k and v, then segments and blocks of BLOCK tokens.

    FIRST tokens of a segment, at least TAPS − 1, are its first program's. KEPT rows are enough
    for what a window leaves. A block has the tokens behind those, of any segments.
    """
    head_of_all = tl.program_id(0)
    part, head = head_of_all // NUM_HEADS, head_of_all % NUM_HEADS
    block = tl.program_id(1)
    channel_D = tl.arange(0, BLOCK_D)
    is_channel_D = channel_D < HEAD_DIM
    in_x_D = head_of_all * HEAD_DIM + channel_D
    out = q
    if part == 1:
        out = k
    elif part == 2:
        out = v
    if block < num_segments:
        if tl.load(offsets + block + 1) > tl.load(offsets + block):
            _begin_segment(
                x, weight, rows, out, block, part, head, in_x_D, channel_D, is_channel_D,
                offsets, read_slots, write_slots, replays, num_drafts,
                first_save, save_tokens, save_slots, x_stride, slot_stride, row_stride,
                NUM_HEADS, HEAD_DIM, BLOCK_D, TAPS, BLOCK_TAPS, FIRST, KEPT, HAS_SAVES,
            )  # fmt: skip
    else:
        _continue_segments(
            x, weight, out, block - num_segments, part, head, in_x_D, channel_D, is_channel_D,
            offsets, segment_of, x_stride, num_tokens,
            NUM_HEADS, HEAD_DIM, BLOCK_D, TAPS, FIRST, BLOCK,
        )  # fmt: skip
