"""The mixture of attention residuals: the reference on CPU, Triton on a GPU.

Formulas, shapes and types are those of `reference.py`. On a GPU the sum and the mixture are
rounded as the reference rounds them, whether they are kept or not; what lies between is float32.
"""

from torch import Tensor

from stagecoach.kernels.attn_res import reference
from stagecoach.kernels.attn_res.reference import Mixed


def mix(bank_TBH: Tensor, partial_TH: Tensor, key_weight_H: Tensor, eps: float) -> Tensor:
    """`reference.mix`: [T, H], `partial_TH` itself without blocks."""
    if partial_TH.is_cuda and bank_TBH.shape[1]:
        from stagecoach.kernels.attn_res import cuda

        return cuda.mix(bank_TBH, partial_TH, key_weight_H, eps)
    return reference.mix(bank_TBH, partial_TH, key_weight_H, eps)


def mix_rms_norm(
    bank_TBH: Tensor,
    partial_TH: Tensor,
    addend_TH: Tensor | None,
    key_weight_H: Tensor,
    norm_weight_H: Tensor,
    eps: float,
    *,
    keeps_mixed: bool = False,
) -> Mixed:
    """`reference.mix_rms_norm`; `mixed_TH` is None on a GPU unless `keeps_mixed`."""
    if partial_TH.is_cuda:
        from stagecoach.kernels.attn_res import cuda

        return cuda.mix_rms_norm(
            bank_TBH,
            partial_TH,
            addend_TH,
            key_weight_H,
            norm_weight_H,
            eps,
            keeps_mixed=keeps_mixed,
        )
    return reference.mix_rms_norm(bank_TBH, partial_TH, addend_TH, key_weight_H, norm_weight_H, eps)
