"""Linear layers wherever the tensors lie: the reference on CPU, own kernels or cuBLAS on a GPU.

On a GPU weights are read before the kernels in front have ended: whatever wrote them did so long
before, and the device was waited for since.

Dimensions: T rows, I inputs, O outputs, G products of one size, S addends of a sum.
"""

from torch import Tensor

from stagecoach.kernels.linear import reference
from stagecoach.kernels.quantization import LinearWeight


def linear(x_TI: Tensor, weight_OI: LinearWeight) -> Tensor:
    """`reference.linear`: [..., O] in `x_TI.dtype`; on a GPU sums are float32."""
    if x_TI.is_cuda:
        from stagecoach.kernels.linear import cuda

        out_TO = cuda.linear(x_TI.flatten(0, -2), weight_OI)
        return out_TO if x_TI.dim() == 2 else out_TO.unflatten(0, x_TI.shape[:-1])
    return reference.linear(x_TI, weight_OI)


def grouped_linear(x_TGI: Tensor, weight_GOI: LinearWeight) -> Tensor:
    """`reference.grouped_linear`: [G, T, O] in `x_TGI.dtype`; on a GPU sums are float32."""
    if x_TGI.is_cuda:
        from stagecoach.kernels.linear import cuda

        return cuda.grouped_linear(x_TGI, weight_GOI)
    return reference.grouped_linear(x_TGI, weight_GOI)


def float32_sums(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """The product on a GPU without rounding to a narrower type, as addends of its float32 sum.

    Args:
        x_TI: [T, I] bfloat16 or float32 on a GPU.
        weight_OI: [O, I], rows in one piece, of the same type.

    Returns:
        float32 [S, T, O]; the product is the sum over the first dim.
    """
    assert x_TI.is_cuda, "on a CPU a product has one addend"
    from stagecoach.kernels.linear import cuda

    return cuda.float32_sums(x_TI, weight_OI)
