"""MXFP4 packed weights: what their bytes mean, both ways.

Owns the format of `weight_packed` and `weight_scale` (compressed-tensors
"mxfp4-pack-quantized"; OCP Microscaling v1.0, FP4 E2M1 elements with E8M0 scales). Knows no
checkpoint and no layer.

Dimensions: N output rows, C input columns, G = C / 32 groups.
"""

from itertools import pairwise

import torch
from torch import Tensor

GROUP_SIZE = 32

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODE_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
# Byte -> the two values it holds; the low nibble is the element at the lower column.
_PAIRS = torch.tensor(
    [[_CODE_VALUES[byte & 15], _CODE_VALUES[byte >> 4]] for byte in range(256)],
    dtype=torch.float32,
)
_SCALE_BIAS = 127
# E8M0 has no sign and no mantissa; its last code is NaN.
_SCALES = torch.tensor(
    [2.0 ** (code - _SCALE_BIAS) for code in range(255)] + [float("nan")], dtype=torch.float32
)
# Half-way points between neighbouring magnitudes.
_BOUNDARIES = torch.tensor(
    [(low + high) / 2 for low, high in pairwise(_MAGNITUDES)],
    dtype=torch.float32,
)


def unpack_mxfp4(packed_NC: Tensor, scale_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode packed weights; exact in bfloat16 and wider for ordinary exponents.

    Args:
        packed_NC: uint8 [N, C / 2], two elements a byte.
        scale_NG: uint8 [N, C / 32], exponent plus 127 of each group.

    Returns:
        [N, C] of `dtype`.
    """
    num_rows, num_groups = scale_NG.shape
    assert packed_NC.shape == (num_rows, num_groups * GROUP_SIZE // 2), "scales and codes disagree"
    values_NGW = _PAIRS[packed_NC.int()].view(num_rows, num_groups, GROUP_SIZE)
    return (values_NGW * _SCALES[scale_NG.int()][..., None]).view(num_rows, -1).to(dtype)


def pack_mxfp4(weight_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Encode weights, each group with the power of two that gives the least squared error.

    Args:
        weight_NC: floating [N, C], C divisible by 32, finite.

    Returns:
        uint8 [N, C / 2] codes and uint8 [N, C / 32] scales, as `unpack_mxfp4` reads them.
    """
    num_rows, num_columns = weight_NC.shape
    if num_columns % GROUP_SIZE:
        raise ValueError(f"MXFP4 needs columns in groups of {GROUP_SIZE}, not {num_columns}")
    groups_NGW = weight_NC.float().view(num_rows, -1, GROUP_SIZE)
    largest_NG = groups_NGW.abs().amax(-1)
    # Largest magnitude 6 is 1.5 * 2^2: with this exponent the largest element lies in [4, 8).
    low_NG = torch.frexp(largest_NG).exponent - 3
    low_NG = torch.where(largest_NG > 0, low_NG, 0)
    codes, errors = [], []
    for exponent_NG in (low_NG, low_NG + 1):
        scale_NG1 = _SCALES[(exponent_NG + _SCALE_BIAS).clamp(0, 254)][..., None]
        code_NGW = _nearest_codes(groups_NGW / scale_NG1)
        values_NGW = torch.tensor(_CODE_VALUES)[code_NGW] * scale_NG1
        codes.append(code_NGW)
        errors.append((values_NGW - groups_NGW).square().sum(-1))
    takes_high_NG = errors[1] < errors[0]
    code_NGW = torch.where(takes_high_NG[..., None], codes[1], codes[0])
    scale_NG = (low_NG + takes_high_NG.int() + _SCALE_BIAS).clamp(0, 254).to(torch.uint8)
    code_NC = code_NGW.view(num_rows, num_columns)
    packed_NC = (code_NC[:, 0::2] | (code_NC[:, 1::2] << 4)).to(torch.uint8)
    return packed_NC, scale_NG


def _nearest_codes(scaled: Tensor) -> Tensor:
    """Code of the nearest FP4 value, beyond the largest the largest; int64."""
    magnitude = torch.bucketize(scaled.abs(), _BOUNDARIES)
    return magnitude + 8 * (scaled < 0).long()
