"""Weights that stay quantised in memory, and what they mean."""

from stagecoach.kernels.quantization.packed import (
    FP8_DTYPE,
    FP8_LARGEST,
    MXFP4_GROUP_SIZE,
    ExpertWeight,
    Fp8Weight,
    LinearWeight,
    Mxfp4Weight,
)
from stagecoach.kernels.quantization.reference import (
    dequantize_fp8,
    fp8_linear,
    gathered,
    movable,
    narrowed,
    quantize_fp8,
    unpack_mxfp4,
)

__all__ = [
    "FP8_DTYPE",
    "FP8_LARGEST",
    "MXFP4_GROUP_SIZE",
    "ExpertWeight",
    "Fp8Weight",
    "LinearWeight",
    "Mxfp4Weight",
    "dequantize_fp8",
    "fp8_linear",
    "gathered",
    "movable",
    "narrowed",
    "quantize_fp8",
    "unpack_mxfp4",
]
