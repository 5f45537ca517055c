"""The packed MXFP4 weights of all experts, as the kernels of their products take them.

Dimensions: E experts, T tokens, L latent width, I intermediate width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.activation import Activation
from stagecoach.kernels.quantization import MXFP4_GROUP_SIZE, Mxfp4Weight


class PackedExperts(NamedTuple):
    """Packed weights of all experts, and what stands between the products."""

    gate_up_E2IL: Mxfp4Weight
    down_ELI: Mxfp4Weight
    activation: Activation

    @property
    def num_experts(self) -> int:
        return self.down_ELI.shape[0]

    @property
    def width(self) -> int:
        return self.down_ELI.shape[2]

    def check(self, x_TL: Tensor) -> None:
        for weight in (self.gate_up_E2IL, self.down_ELI):
            assert weight.packed.is_contiguous() and weight.scale.is_contiguous()
            assert weight.packed.dtype == weight.scale.dtype == torch.uint8
            assert weight.shape[2] % MXFP4_GROUP_SIZE == 0, weight.shape
            assert weight.shape[0] * weight.shape[1] < 2**31, weight.shape
        assert x_TL.dtype in (torch.bfloat16, torch.float32), x_TL.dtype
        assert x_TL.stride(1) == 1, "tokens lie in one piece"
        assert x_TL.shape[1] == self.gate_up_E2IL.shape[2], x_TL.shape
