"""Linear layers in plain PyTorch: the specification and the CPU implementation."""

import torch
from torch import Tensor
from torch.nn import functional

from stagecoach.kernels.quantization import Fp8Weight, LinearWeight, fp8_linear


def linear(x_TI: Tensor, weight_OI: LinearWeight) -> Tensor:
    """[..., I] and [O, I] of one floating type -> x @ weight.T, [..., O] in that type.

    With an Fp8Weight the activations are quantised too: `quantization.fp8_linear`.
    """
    if isinstance(weight_OI, Fp8Weight):
        return fp8_linear(x_TI, weight_OI)
    return functional.linear(x_TI, weight_OI)


def grouped_linear(x_TGI: Tensor, weight_GOI: LinearWeight) -> Tensor:
    """[T, G, I] and [G, O, I] of one floating type -> [G, T, O], a product for each of G."""
    weights = (
        map(weight_GOI.part, range(weight_GOI.shape[0]))
        if isinstance(weight_GOI, Fp8Weight)
        else weight_GOI
    )
    return torch.stack(
        [linear(x_TI, weight_OI) for x_TI, weight_OI in zip(x_TGI.unbind(1), weights, strict=True)]
    )
