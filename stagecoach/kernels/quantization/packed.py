"""Weights that stay quantised in memory, as the operators take them.

Owns what the parts of such a weight are and mean. How they are decoded is in `reference.py`;
who makes them is not known here.

Dimensions: ... any leading dims (experts, projections), O output rows, I input columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MXFP4_GROUP_SIZE = 32
FP8_DTYPE = torch.float8_e4m3fn
FP8_LARGEST = 448.0


class Mxfp4Weight(NamedTuple):
    """FP4 codes with a power of two for every 32 columns (OCP Microscaling v1.0).

    The low nibble of a byte is the element at the lower column; both tensors lie in one piece,
    row by row, on every device.
    """

    packed: Tensor  # uint8 [..., O, I / 2], two E2M1 codes a byte
    scale: Tensor  # uint8 [..., O, I / 32], E8M0: exponent plus 127

    @property
    def shape(self) -> torch.Size:
        """That of the dense weight, [..., O, I]."""
        *rows, num_bytes = self.packed.shape
        return torch.Size((*rows, 2 * num_bytes))

    @property
    def is_cuda(self) -> bool:
        return self.packed.is_cuda

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes

    def part(self, index: int | slice) -> "Mxfp4Weight":
        """A view along the first dim."""
        return Mxfp4Weight(self.packed[index], self.scale[index])


class Fp8Weight(NamedTuple):
    """E4M3 values with a factor for every output row: W = weight * scale[..., None]."""

    weight: Tensor  # float8_e4m3fn [..., O, I], rows in one piece
    scale: Tensor  # float32 [..., O]

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def is_cuda(self) -> bool:
        return self.weight.is_cuda

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes

    def part(self, index: int | slice) -> "Fp8Weight":
        """A view along the first dim."""
        return Fp8Weight(self.weight[index], self.scale[index])


LinearWeight = Tensor | Fp8Weight
ExpertWeight = Tensor | Mxfp4Weight
