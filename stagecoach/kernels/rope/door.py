"""Rotary positions wherever the tensors lie: the reference on CPU, Triton on a GPU."""

from torch import Tensor

from stagecoach.kernels.rope import reference


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, has_neighbour_pairs: bool) -> Tensor:
    """`reference.rotate_pairs`: [..., heads, P] in `x.dtype`."""
    if x.is_cuda:
        from stagecoach.kernels.rope import cuda

        return cuda.rotate_pairs(x, cos, sin, has_neighbour_pairs=has_neighbour_pairs)
    return reference.rotate_pairs(x, cos, sin, has_neighbour_pairs=has_neighbour_pairs)
