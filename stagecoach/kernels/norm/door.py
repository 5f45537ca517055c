"""RMS norms wherever the tensors lie: the reference on CPU, Triton on a GPU.

Formulas, shapes and types are those of `reference.py`. On a GPU a sum is rounded as the reference
rounds it; statistics are float32.
"""

from torch import Tensor

from stagecoach.kernels.norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`: [..., D] in `x.dtype`."""
    if x.is_cuda:
        from stagecoach.kernels.norm import cuda

        return cuda.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def grouped_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.grouped_rms_norm`: [..., D] in `x.dtype`."""
    if x.is_cuda:
        from stagecoach.kernels.norm import cuda

        return cuda.rms_norm(x, weight, eps)
    return reference.grouped_rms_norm(x, weight, eps)


def gated_rms_norm(x_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """`reference.gated_rms_norm`: [T, H, V] in `gate_THV.dtype`."""
    if x_THV.is_cuda:
        from stagecoach.kernels.norm import cuda

        return cuda.gated_rms_norm(x_THV, gate_THV, weight_V, eps)
    return reference.gated_rms_norm(x_THV, gate_THV, weight_V, eps)


def add_rms_norm(
    partial_TH: Tensor, addend_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`: the sum and its norm, both [T, H] in `partial_TH.dtype`."""
    if partial_TH.is_cuda:
        from stagecoach.kernels.norm import cuda

        return cuda.add_rms_norm(partial_TH, addend_TH, weight_H, eps)
    return reference.add_rms_norm(partial_TH, addend_TH, weight_H, eps)
