"""Quantised weights and activations in plain PyTorch: what their bytes mean.

Dimensions: ... any leading dims, T rows of activations, O output rows, I input columns, G = I / 32
groups, W = 32 elements of a group.
"""

import torch
from torch import Tensor
from torch.nn import functional

from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.kernels.quantization.packed import (
    FP8_DTYPE,
    FP8_LARGEST,
    MXFP4_GROUP_SIZE,
    Fp8Weight,
    Mxfp4Weight,
)

MXFP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_VALUES = (*MXFP4_MAGNITUDES, *(-value for value in MXFP4_MAGNITUDES))
MXFP4_SCALE_BIAS = 127
# Byte -> the two values it holds; the low nibble is the element at the lower column.
_PAIRS = torch.tensor(
    [[MXFP4_VALUES[byte & 15], MXFP4_VALUES[byte >> 4]] for byte in range(256)],
    dtype=torch.float32,
)
# The same as one number each: a CPU takes them out of the table three times as fast.
_WHOLE_PAIRS = _PAIRS.view(torch.int64).flatten()
# E8M0 has no sign and no mantissa; its last code is NaN.
MXFP4_SCALES = torch.tensor(
    [2.0 ** (code - MXFP4_SCALE_BIAS) for code in range(255)] + [float("nan")], dtype=torch.float32
)
# A row of zeros has a factor too.
_LEAST_LARGEST = 1e-12


def unpack_mxfp4(weight: Mxfp4Weight, dtype: torch.dtype) -> Tensor:
    """Decode packed weights; exact in bfloat16 and wider for ordinary exponents.

    Returns:
        [..., O, I] of `dtype`.
    """
    packed, scale = weight
    *rows, num_groups = scale.shape
    assert packed.shape == (*rows, num_groups * MXFP4_GROUP_SIZE // 2), "scales and codes disagree"
    pairs, scales = _WHOLE_PAIRS.to(packed.device), MXFP4_SCALES.to(packed.device)
    values = pairs.index_select(0, packed.flatten().int()).view(torch.float32)
    values_GW = values.view(*rows, num_groups, MXFP4_GROUP_SIZE)
    values_GW *= scales.index_select(0, scale.flatten().int()).view(*rows, num_groups, 1)
    return values_GW.flatten(-2).to(dtype)


def quantize_fp8(x: Tensor) -> Fp8Weight:
    """Values of E4M3 with a factor for every row: max |row| / 448.

    Rounds to nearest, ties to even. Used for activations token by token and for weights output
    row by output row alike.

    Args:
        x: [..., I], any floating type; divided in its accumulate type.

    Returns:
        float8_e4m3fn [..., I] and float32 [...]; a row of zeros has a tiny factor.
    """
    x = x.to(accumulate_dtype(x.dtype))
    largest = x.abs().amax(-1).clamp(min=_LEAST_LARGEST)
    # Not by a plain number: a GPU would multiply by its rounded inverse.
    scale = (largest / largest.new_full((), FP8_LARGEST)).to(torch.float32)
    return Fp8Weight((x / scale.unsqueeze(-1)).to(FP8_DTYPE), scale)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` for rows of a cache: beyond the largest E4M3 value the largest, NaN stays."""
    if dtype == FP8_DTYPE:
        x = x.clamp(-FP8_LARGEST, FP8_LARGEST)
    return x.to(dtype)


def movable(x: Tensor) -> Tensor:
    """E4M3 as bytes, other types as they are: torch copies no E4M3 by index."""
    return x.view(torch.uint8) if x.dtype == FP8_DTYPE else x


def gathered(cache: Tensor, rows_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a cache by their numbers, [N, ...] of `dtype`."""
    return movable(cache).index_select(0, rows_N).view(cache.dtype).to(dtype)


def dequantize_fp8(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """weight * scale of each row, [..., I] of `dtype`."""
    wide = accumulate_dtype(dtype)
    return (weight.weight.to(wide) * weight.scale.to(wide).unsqueeze(-1)).to(dtype)


def fp8_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """[..., I] and [O, I] -> [..., O] in `x.dtype`: both sides are E4M3.

    y[t, o] = (sum_i qx[t, i] qw[o, i]) * scale_x[t] * scale_w[o], with each row of `x` quantised
    as by `quantize_fp8`. The sum and both factors are in the accumulate type; it is rounded once.
    """
    dtype = accumulate_dtype(x.dtype)
    quantized, scale = quantize_fp8(x)
    product = functional.linear(quantized.to(dtype), _e4m3_values(weight.weight, dtype))
    return (product * scale.to(dtype).unsqueeze(-1) * weight.scale.to(dtype)).to(x.dtype)


def _e4m3_values(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` of finite values; a third of the time on a CPU (torch 2.13, AVX2).

    The bits of a float16 with an exponent that is 8 too low: sign, then exponent and mantissa.
    """
    bits = x.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    half = ((bits & 0x7F) << 7) | (bits & -0x8000)
    return half.view(torch.float16).to(dtype).mul_(2.0**8)
