"""Launches the mixture of attention residuals on a GPU: checks, and which form runs.

The form in CUDA C++ takes few tokens in bfloat16 of even widths, the one in Triton everything else.
"""

import torch
from torch import Tensor
from triton import next_power_of_2

from stagecoach.kernels.attn_res import cluster_cuda
from stagecoach.kernels.attn_res.mix_kernel import mix_kernel
from stagecoach.kernels.attn_res.reference import Mixed
from stagecoach.kernels.norm.cuda import add_rms_norm, rms_norm

# Beyond, tokens alone fill the chip, and a program for each of them is done sooner than a cluster.
_MOST_CLUSTERED = 64
# One program holds a token's rows of the bank in its registers.
_MOST_VALUES = 131_072


def mix(
    bank_TBH: Tensor,
    partial_TH: Tensor,
    key_weight_H: Tensor,
    eps: float,
    num_warps: int | None = None,
) -> Tensor:
    """The mixture of a bank of at least one block and the running sum: [T, H] contiguous."""
    mixed_TH = torch.empty_like(partial_TH, memory_format=torch.contiguous_format)
    _launch(bank_TBH, partial_TH, None, key_weight_H, None, eps, None, mixed_TH, None, num_warps)
    return mixed_TH


def mix_rms_norm(
    bank_TBH: Tensor,
    partial_TH: Tensor,
    addend_TH: Tensor | None,
    key_weight_H: Tensor,
    norm_weight_H: Tensor,
    eps: float,
    *,
    keeps_mixed: bool = False,
    num_warps: int | None = None,
) -> Mixed:
    """Addition, mixture and norm in one kernel; without blocks there is nothing to mix.

    Args:
        bank_TBH: [T, B, H] with any strides but rows in one piece; B may be 0.
        keeps_mixed: whether the mixture is written too.
        num_warps: of one program in Triton; None leaves form and size to the tensors.
    """
    if bank_TBH.shape[1] == 0:
        if addend_TH is None:
            return Mixed(partial_TH, partial_TH, rms_norm(partial_TH, norm_weight_H, eps))
        sum_TH, normed_TH = add_rms_norm(partial_TH, addend_TH, norm_weight_H, eps)
        return Mixed(sum_TH, sum_TH, normed_TH)
    sum_TH = partial_TH
    if addend_TH is not None:
        sum_TH = torch.empty_like(partial_TH, memory_format=torch.contiguous_format)
    mixed_TH = None
    if keeps_mixed:
        mixed_TH = torch.empty_like(partial_TH, memory_format=torch.contiguous_format)
    normed_TH = torch.empty_like(partial_TH, memory_format=torch.contiguous_format)
    _launch(
        bank_TBH,
        partial_TH,
        addend_TH,
        key_weight_H,
        norm_weight_H,
        eps,
        sum_TH,
        mixed_TH,
        normed_TH,
        num_warps,
    )
    return Mixed(sum_TH, mixed_TH, normed_TH)


def warps_for(num_blocks: int, hidden_size: int) -> int:
    """Warps of one program: up to 32 values of each row a thread, within what registers hold."""
    values_of_thread = 32 if num_blocks <= 8 else 16
    return min(32, max(1, next_power_of_2(hidden_size) // (32 * values_of_thread)))


def _launch(
    bank_TBH: Tensor,
    partial_TH: Tensor,
    addend_TH: Tensor | None,
    key_weight_H: Tensor,
    norm_weight_H: Tensor | None,
    eps: float,
    sum_TH: Tensor | None,
    mixed_TH: Tensor | None,
    normed_TH: Tensor | None,
    num_warps: int | None,
) -> None:
    num_tokens, num_blocks, width = bank_TBH.shape
    block_b, block_h = next_power_of_2(num_blocks), next_power_of_2(width)
    assert block_b * block_h <= _MOST_VALUES, f"{num_blocks} blocks of {width} values"
    assert partial_TH.shape == (num_tokens, width) and partial_TH.dtype == bank_TBH.dtype
    assert bank_TBH.dtype != torch.float64, "no device mixture in float64"
    assert key_weight_H.is_contiguous() and key_weight_H.shape == (width,)
    rows = [bank_TBH, partial_TH]
    if addend_TH is not None:
        assert addend_TH.shape == partial_TH.shape and addend_TH.dtype == partial_TH.dtype
        rows.append(addend_TH)
    assert all(tensor.stride(-1) == 1 for tensor in rows), "rows in one piece"
    if not num_tokens:
        return
    weights = [x for x in (key_weight_H, norm_weight_H) if x is not None]
    is_half = norm_weight_H is None or norm_weight_H.dtype == bank_TBH.dtype
    is_small = num_tokens <= _MOST_CLUSTERED and num_warps is None
    if is_small and is_half and cluster_cuda.is_taken(*rows, *weights):
        cluster_cuda.mix(
            bank_TBH,
            partial_TH,
            addend_TH,
            key_weight_H,
            norm_weight_H,
            eps,
            sum_TH,
            mixed_TH,
            normed_TH,
        )
        return
    mix_kernel[(num_tokens,)](
        bank_TBH,
        partial_TH,
        partial_TH if addend_TH is None else addend_TH,
        key_weight_H,
        key_weight_H if norm_weight_H is None else norm_weight_H,
        partial_TH if sum_TH is None else sum_TH,
        partial_TH if mixed_TH is None else mixed_TH,
        partial_TH if normed_TH is None else normed_TH,
        num_blocks,
        bank_TBH.stride(0),
        bank_TBH.stride(1),
        partial_TH.stride(0),
        0 if addend_TH is None else addend_TH.stride(0),
        eps,
        H=width,
        BLOCK_H=block_h,
        BLOCK_B=block_b,
        HAS_ADDEND=addend_TH is not None,
        KEEPS_MIXED=mixed_TH is not None,
        HAS_NORM=normed_TH is not None,
        num_warps=num_warps or warps_for(num_blocks, width),
    )
