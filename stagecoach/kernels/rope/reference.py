"""Rotary positions in plain PyTorch: the specification and the CPU implementation.

Dimensions: P values of a vector, in P / 2 pairs.
"""

import torch
from torch import Tensor


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, has_neighbour_pairs: bool) -> Tensor:
    """Rotate each pair of a vector (RoFormer, arXiv 2104.09864).

    Args:
        x: [..., heads, P], any floating type.
        cos, sin: [..., P / 2], of each position.
        has_neighbour_pairs: pairs are (0, 1), (2, 3), ...; otherwise (0, P / 2), ...

    Returns:
        [..., heads, P] in `x.dtype`: the first part of every pair, then the second.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x_wide = x.to(cos.dtype)
    if has_neighbour_pairs:
        first, second = x_wide[..., 0::2], x_wide[..., 1::2]
    else:
        first, second = x_wide.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
