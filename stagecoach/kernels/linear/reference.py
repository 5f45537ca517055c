"""Linear layers in plain PyTorch: the specification and the CPU implementation."""

import torch
from torch import Tensor
from torch.nn import functional


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """[..., I] and [O, I] of one floating type -> x @ weight.T, [..., O] in that type."""
    return functional.linear(x_TI, weight_OI)


def grouped_linear(x_TGI: Tensor, weight_GOI: Tensor) -> Tensor:
    """[T, G, I] and [G, O, I] of one floating type -> [G, T, O], a product for each of G."""
    return torch.stack(
        [
            linear(x_TI, weight_OI)
            for x_TI, weight_OI in zip(x_TGI.unbind(1), weight_GOI, strict=True)
        ]
    )
