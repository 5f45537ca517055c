"""RMS norms in plain PyTorch: the specification and the CPU implementation.

Dimensions: T tokens, H heads, V channels of a head; of `add_rms_norm`, H is the hidden size.
"""

import torch.nn.functional as F
from torch import Tensor

from stagecoach.kernels.precision import accumulate_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dim.

    Args:
        x: [..., D], any floating type.
        weight: [D], any floating type; multiplied before the only rounding to `x.dtype`.
        eps: added to the mean square.

    Returns:
        [..., D] in `x.dtype`.
    """
    dtype = accumulate_dtype(x.dtype)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)


def grouped_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` whose weight differs from group to group.

    Args:
        x: [..., D], any floating type.
        weight: [..., D], broadcast against `x`.
        eps: added to the mean square.

    Returns:
        [..., D] in `x.dtype`, rounded once.
    """
    dtype = accumulate_dtype(x.dtype)
    return F.rms_norm(x.to(dtype), x.shape[-1:], eps=eps).mul_(weight.to(dtype)).to(x.dtype)


def gated_rms_norm(x_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """RMS norm over a head's channels times sigmoid(gate): the output norm of a KDA layer.

    Formula: Kimi Linear (arXiv 2510.26692), §4; fla `FusedRMSNormGated` with sigmoid.

    Args:
        x_THV: [T, H, V], any floating type.
        gate_THV: [T, H, V] logits, any floating type.
        weight_V: [V].
        eps: added to the mean square.

    Returns:
        [T, H, V] in `gate_THV.dtype`, rounded once.
    """
    dtype = accumulate_dtype(x_THV.dtype)
    normed_THV = F.rms_norm(x_THV.to(dtype), weight_V.shape, weight_V.to(dtype), eps)
    return normed_THV.mul_(gate_THV.to(dtype).sigmoid()).to(gate_THV.dtype)


def add_rms_norm(
    partial_TH: Tensor, addend_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """A sublayer's output added to the residual stream, and the norm that the next one reads.

    Args:
        partial_TH: [T, H], any floating type.
        addend_TH: [T, H], the same type.
        weight_H: [H], any floating type.
        eps: added to the mean square.

    Returns:
        The sum, and `rms_norm` of the rounded sum; both [T, H] in `partial_TH.dtype`.
    """
    sum_TH = partial_TH + addend_TH
    return sum_TH, rms_norm(sum_TH, weight_H, eps)
