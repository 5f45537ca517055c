"""Launches the quantisation of activations on a GPU.

Dimensions: T rows, I columns.
"""

import torch
from torch import Tensor
from triton import next_power_of_2

from stagecoach.kernels.dependent_launch import launch_options
from stagecoach.kernels.quantization.packed import FP8_DTYPE
from stagecoach.kernels.quantization.quantize_kernel import quantize_rows_kernel

_MOST_COLUMNS = 8192  # that a program holds


def quantize_rows(x_TI: Tensor, dtype: torch.dtype = FP8_DTYPE) -> tuple[Tensor, Tensor]:
    """`reference.quantize_fp8` of rows.

    Args:
        x_TI: bfloat16 or float32, rows in one piece.
        dtype: of the values, which are those of E4M3.

    Returns:
        values [T, I] and factors float32 [T].
    """
    num_rows, num_columns = x_TI.shape
    assert x_TI.dtype in (torch.bfloat16, torch.float32), x_TI.dtype
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    values_TI = x_TI.new_empty((num_rows, num_columns), dtype=dtype)
    factors_T = x_TI.new_empty((num_rows,), dtype=torch.float32)
    if num_rows:
        block = min(_MOST_COLUMNS, next_power_of_2(num_columns))
        quantize_rows_kernel[(num_rows,)](
            x_TI,
            values_TI,
            factors_T,
            num_columns,
            x_TI.stride(0),
            BLOCK_I=block,
            IS_WHOLE=num_columns <= block,
            num_warps=max(1, min(8, block // 512)),
            **launch_options(x_TI),
        )
    return values_TI, factors_T
