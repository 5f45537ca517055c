"""The mixture of attention residuals in Triton: one program a token, one pass over the bank.

The second look at a token's rows, for the weighted sum, finds them in the cache of the
multiprocessor that has just read them.

Dimensions: B blocks of the bank, H hidden size.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def mix_kernel(
    bank_ptr,
    partial_ptr,
    addend_ptr,
    key_weight_ptr,
    norm_weight_ptr,
    sum_ptr,
    mixed_ptr,
    normed_ptr,
    num_blocks,
    stride_bank_t,
    stride_bank_b,
    stride_partial,
    stride_addend,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    KEEPS_MIXED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """sum = partial + addend; mixed = softmax(scores) · [bank, sum]; normed = norm(mixed)."""
    dtype: tl.constexpr = partial_ptr.dtype.element_ty
    token = tl.cast(tl.program_id(0), tl.int64)
    h_H = tl.arange(0, BLOCK_H)
    block_B = tl.arange(0, BLOCK_B)
    mask_H = h_H < H
    is_block_B = block_B < num_blocks
    mask_BH = is_block_B[:, None] & mask_H[None, :]
    bank_ptr_BH = bank_ptr + token * stride_bank_t + block_B[:, None] * stride_bank_b + h_H[None, :]

    bank_BH = tl.load(bank_ptr_BH, mask=mask_BH, other=0.0)
    open_H = tl.load(partial_ptr + token * stride_partial + h_H, mask=mask_H, other=0.0)
    key_H = tl.load(key_weight_ptr + h_H, mask=mask_H, other=0.0)
    open_H = open_H.to(tl.float32)
    if HAS_ADDEND:
        addend_H = tl.load(addend_ptr + token * stride_addend + h_H, mask=mask_H, other=0.0)
        sum_H = (open_H + addend_H.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + token * H + h_H, sum_H, mask=mask_H)
        open_H = sum_H.to(tl.float32)

    values_BH = bank_BH.to(tl.float32)
    square_B = tl.sum(values_BH * values_BH, axis=1)
    score_B = tl.sum(values_BH * key_H[None, :], axis=1) / tl.sqrt(square_B / H + eps)
    score_B = tl.where(is_block_B, score_B, float("-inf"))
    open_square = tl.sum(open_H * open_H, axis=0)
    open_score = tl.sum(open_H * key_H, axis=0) / tl.sqrt(open_square / H + eps)
    highest = tl.maximum(tl.max(score_B, axis=0), open_score)
    share_B = tl.exp(score_B - highest)
    open_share = tl.exp(open_score - highest)
    total = tl.sum(share_B, axis=0) + open_share

    mixed_H = open_H * (open_share / total)
    bank_BH = tl.load(bank_ptr_BH, mask=mask_BH, other=0.0)
    mixed_H += tl.sum(bank_BH.to(tl.float32) * (share_B / total)[:, None], axis=0)
    mixed_H = mixed_H.to(dtype)
    if KEEPS_MIXED:
        tl.store(mixed_ptr + token * H + h_H, mixed_H, mask=mask_H)
    if HAS_NORM:
        norm_weight_H = tl.load(norm_weight_ptr + h_H, mask=mask_H, other=0.0).to(tl.float32)
        mixed_H = mixed_H.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(mixed_H * mixed_H, axis=0) / H + eps)
        tl.store(
            normed_ptr + token * H + h_H, (mixed_H * scale * norm_weight_H).to(dtype), mask=mask_H
        )
