"""The mixture of attention residuals in plain PyTorch: specification and CPU implementation.

Dimensions: T tokens, B finished blocks, H hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.norm.reference import rms_norm
from stagecoach.kernels.precision import accumulate_dtype


class Mixed(NamedTuple):
    """What a sublayer needs of the residual stream."""

    sum_TH: Tensor  # the running sum of the open block, with the addend
    mixed_TH: Tensor | None  # the sublayer's input before its norm; None where nobody asked for it
    normed_TH: Tensor


def mix(bank_TBH: Tensor, partial_TH: Tensor, key_weight_H: Tensor, eps: float) -> Tensor:
    """Softmax mixture of the finished block sums and the running sum of the open block.

    Candidates V are the bank's rows, then the partial sum. The score of one is
    Σ_h V_h · key_weight_h / sqrt(mean(V²) + eps); the raw candidates are mixed.
    Formula: Attention Residuals (arXiv 2603.15031); fla `naive_attnres`.

    Args:
        bank_TBH: [T, B, H] finished blocks, B may be 0.
        partial_TH: [T, H] running sum, same type.
        key_weight_H: [H], norm weight times projection weight.
        eps: of the key norm.

    Returns:
        [T, H] in `partial_TH.dtype`; `partial_TH` itself when B = 0.
    """
    if bank_TBH.shape[1] == 0:
        return partial_TH
    dtype = accumulate_dtype(partial_TH.dtype)
    values_TNH = torch.cat((bank_TBH, partial_TH.unsqueeze(1)), dim=1).to(dtype)
    inverse_rms_TN = values_TNH.square().mean(-1).add_(eps).rsqrt_()
    scores_TN = (values_TNH @ key_weight_H.to(dtype)).mul_(inverse_rms_TN)
    shares_T1N = scores_TN.softmax(-1).unsqueeze(1)
    return torch.bmm(shares_T1N, values_TNH).squeeze(1).to(partial_TH.dtype)


def mix_rms_norm(
    bank_TBH: Tensor,
    partial_TH: Tensor,
    addend_TH: Tensor | None,
    key_weight_H: Tensor,
    norm_weight_H: Tensor,
    eps: float,
) -> Mixed:
    """A sublayer's output added to the open block, the mixture of all blocks, and its norm.

    Args:
        bank_TBH: [T, B, H] finished blocks, B may be 0.
        partial_TH: [T, H] running sum, same type.
        addend_TH: [T, H], same type; None where nothing is left to add.
        key_weight_H: [H], as in `mix`.
        norm_weight_H: [H] of the sublayer's norm.
        eps: of the key norm and of the sublayer's.

    Returns:
        [T, H] each in `partial_TH.dtype`. Each is rounded before the next is made of it.
    """
    sum_TH = partial_TH if addend_TH is None else partial_TH + addend_TH
    mixed_TH = mix(bank_TBH, sum_TH, key_weight_H, eps)
    return Mixed(sum_TH, mixed_TH, rms_norm(mixed_TH, norm_weight_H, eps))
