"""Makes quantised weights: MXFP4 codes of small checkpoints, E4M3 of what is loaded.

Owns the search for a group's scale and the way of a tensor into an Fp8Weight. What the bytes mean
is in `kernels/quantization`; knows no checkpoint and no layer.

Dimensions: N output rows, C input columns, G = C / 32 groups.
"""

from itertools import pairwise

import torch
from torch import Tensor

from stagecoach.kernels.quantization import (
    MXFP4_GROUP_SIZE,
    Fp8Weight,
    Mxfp4Weight,
    quantize_fp8,
)
from stagecoach.kernels.quantization.reference import (
    MXFP4_MAGNITUDES,
    MXFP4_SCALE_BIAS,
    MXFP4_SCALES,
    MXFP4_VALUES,
)

# Half-way points between neighbouring magnitudes.
_BOUNDARIES = torch.tensor(
    [(low + high) / 2 for low, high in pairwise(MXFP4_MAGNITUDES)],
    dtype=torch.float32,
)
# Values that are quantised at once: they are held as float32 beside the result.
_PIECE_VALUES = 2**24


def pack_mxfp4(weight_NC: Tensor) -> Mxfp4Weight:
    """Encode weights, each group with the power of two that gives the least squared error.

    Args:
        weight_NC: floating [N, C], C divisible by 32, finite.

    Returns:
        uint8 [N, C / 2] codes and uint8 [N, C / 32] scales.
    """
    num_rows, num_columns = weight_NC.shape
    if num_columns % MXFP4_GROUP_SIZE:
        raise ValueError(f"MXFP4 needs columns in groups of {MXFP4_GROUP_SIZE}, not {num_columns}")
    groups_NGW = weight_NC.float().view(num_rows, -1, MXFP4_GROUP_SIZE)
    largest_NG = groups_NGW.abs().amax(-1)
    # Largest magnitude 6 is 1.5 * 2^2: with this exponent the largest element lies in [4, 8).
    low_NG = torch.frexp(largest_NG).exponent - 3
    low_NG = torch.where(largest_NG > 0, low_NG, 0)
    codes, errors = [], []
    for exponent_NG in (low_NG, low_NG + 1):
        scale_NG1 = MXFP4_SCALES[(exponent_NG + MXFP4_SCALE_BIAS).clamp(0, 254)][..., None]
        code_NGW = _nearest_codes(groups_NGW / scale_NG1)
        values_NGW = torch.tensor(MXFP4_VALUES)[code_NGW] * scale_NG1
        codes.append(code_NGW)
        errors.append((values_NGW - groups_NGW).square().sum(-1))
    takes_high_NG = errors[1] < errors[0]
    code_NGW = torch.where(takes_high_NG[..., None], codes[1], codes[0])
    scale_NG = (low_NG + takes_high_NG.int() + MXFP4_SCALE_BIAS).clamp(0, 254).to(torch.uint8)
    code_NC = code_NGW.view(num_rows, num_columns)
    packed_NC = (code_NC[:, 0::2] | (code_NC[:, 1::2] << 4)).to(torch.uint8)
    return Mxfp4Weight(packed_NC, scale_NG)


def store_fp8(target: Fp8Weight, weight_NC: Tensor) -> None:
    """Quantise a matrix into its place, output row by output row, where the target lies.

    Args:
        weight_NC: floating [N, C] of the target's shape, on any device; rows travel in pieces.
    """
    assert tuple(target.shape) == tuple(weight_NC.shape), (target.shape, weight_NC.shape)
    num_rows, num_columns = weight_NC.shape
    step = max(1, _PIECE_VALUES // max(1, num_columns))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        piece = quantize_fp8(weight_NC[rows].to(target.weight.device))
        target.weight[rows].copy_(piece.weight)
        target.scale[rows].copy_(piece.scale)


def _nearest_codes(scaled: Tensor) -> Tensor:
    """Code of the nearest FP4 value, beyond the largest the largest; int64."""
    magnitude = torch.bucketize(scaled.abs(), _BOUNDARIES)
    return magnitude + 8 * (scaled < 0).long()
