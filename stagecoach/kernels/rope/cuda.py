"""Launches the rotation of pairs on a GPU."""

import math

import torch
from torch import Tensor
from triton import next_power_of_2

from stagecoach.kernels.rope.rope_kernel import rotate_pairs_kernel


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, has_neighbour_pairs: bool) -> Tensor:
    """`reference.rotate_pairs` of bfloat16 or float32, contiguous.

    Args:
        x: its dims before the heads are one dim by their strides, as those of a view of some
            columns of a matrix are.
    """
    *positions, num_heads, width = x.shape
    assert cos.shape == sin.shape == (*positions, width // 2), (x.shape, cos.shape)
    assert cos.dtype == sin.dtype == torch.float32, f"angles of {cos.dtype}"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_positions = math.prod(positions)
    if not x.numel():
        return out
    x_MHP = x.view(num_positions, num_heads, width)
    assert x_MHP.stride(2) == 1, "vectors in one piece"
    block_heads, block_pairs = next_power_of_2(num_heads), next_power_of_2(width // 2)
    rotate_pairs_kernel[(num_positions,)](
        x_MHP,
        cos.contiguous(),
        sin.contiguous(),
        out,
        num_heads,
        width // 2,
        x_MHP.stride(0),
        x_MHP.stride(1),
        HAS_NEIGHBOUR_PAIRS=has_neighbour_pairs,
        BLOCK_H=block_heads,
        BLOCK_P=block_pairs,
        num_warps=min(8, max(1, block_heads * block_pairs // 256)),
    )
    return out
