"""Launches products with E4M3 matrices on a GPU: who makes them, and the forms in Triton.

Dimensions: T rows, I inputs, O outputs, G products of one size.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from stagecoach.kernels.dependent_launch import launch_options
from stagecoach.kernels.linear import fp8_product_cuda
from stagecoach.kernels.linear.blocks import LONGEST_ROW, whole_blocks
from stagecoach.kernels.linear.fp8_kernel import (
    fp8_linear_kernel,
    fp8_vector_kernel,
    sum_fp8_splits_kernel,
)
from stagecoach.kernels.quantization import FP8_DTYPE, Fp8Weight
from stagecoach.kernels.quantization.cuda import quantize_rows

_MOST_ROWS = 64  # of the Triton form, where torch's takes a product as well
_MOST_VECTOR_OUTPUTS = 4096  # of one row, for which the product for Hopper has too few blocks
_LONGEST_QUANTIZED = 4096  # inputs of one row that each block quantises for itself
_NUM_PROCESSORS = 132
_SUM_BLOCK = 512


class Fp8Tiles(NamedTuple):
    """How the own kernel cuts a product."""

    block_rows: int
    block_outputs: int
    block_inputs: int
    num_splits: int  # of the inputs
    num_warps: int
    num_stages: int


class Fp8VectorTiles(NamedTuple):
    """How the own kernel of one row cuts a product: a program reads whole rows of weights."""

    block_outputs: int
    num_warps: int


def choose_fp8_tiles(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> Fp8Tiles:
    """The cut for some rows: inputs are split where blocks of outputs leave processors idle."""
    if dtype == torch.float32:
        return Fp8Tiles(16, 32, 32, 1, 4, 2)
    block_rows = max(16, min(64, next_power_of_2(num_rows)))
    # As few forms as can be: with more rows than a block there is work enough.
    num_splits = max(1, min(8, _NUM_PROCESSORS * 2 // cdiv(num_outputs, 64), num_inputs // 512))
    if num_rows > block_rows:
        num_splits = 1
    return Fp8Tiles(block_rows, 64, 128, num_splits, 4, 4)


def choose_fp8_vector_tiles(num_inputs: int) -> Fp8VectorTiles:
    """The cut of one row that was fastest on an H200: 8 to 64 bytes of weights a thread."""
    if num_inputs < 1024:
        return Fp8VectorTiles(8, 1)
    if num_inputs <= 4096:
        return Fp8VectorTiles(4, 4)
    return Fp8VectorTiles(8, 8)


def fp8_linear(x_TI: Tensor, weight: Fp8Weight) -> Tensor:
    """`reference.fp8_linear` of [T, I]: [T, O] in `x_TI.dtype`."""
    _check(x_TI, weight)
    num_rows, num_inputs = x_TI.shape
    num_outputs = weight.shape[0]
    has_product = fp8_product_cuda.fits(x_TI.dtype, weight)
    has_few_outputs = num_outputs <= _MOST_VECTOR_OUTPUTS
    if num_rows == 1 and num_inputs <= LONGEST_ROW and (has_few_outputs or not has_product):
        return one_row(x_TI, weight, choose_fp8_vector_tiles(num_inputs))
    has_torch = is_torchs(x_TI, weight)
    if has_product and (fp8_product_cuda.is_faster(num_rows, weight) or not has_torch):
        return by_product(x_TI, weight)
    if has_torch and num_rows > _MOST_ROWS:
        return by_torch(x_TI, weight)
    tiles = choose_fp8_tiles(num_rows, num_outputs, num_inputs, x_TI.dtype)
    return by_blocks(x_TI, weight, tiles)


def fp8_grouped_linear(x_TGI: Tensor, weight_GOI: Fp8Weight) -> Tensor:
    """`reference.grouped_linear`: [G, T, O] in `x_TGI.dtype`."""
    products = [
        fp8_linear(x_TI, weight_GOI.part(group)) for group, x_TI in enumerate(x_TGI.unbind(1))
    ]
    return torch.stack(products)


def _check(x_TI: Tensor, weight: Fp8Weight) -> None:
    assert x_TI.dtype in (torch.bfloat16, torch.float32), f"{x_TI.dtype} activations"
    assert weight.weight.dtype == FP8_DTYPE and weight.scale.dtype == torch.float32
    assert weight.weight.is_contiguous() and weight.scale.is_contiguous(), "rows in one piece"
    assert x_TI.shape[1] == weight.shape[1], (x_TI.shape, weight.shape)


def by_product(x_TI: Tensor, weight: Fp8Weight) -> Tensor:
    """`fp8_linear` by the product for Hopper, of a matrix that it takes."""
    num_rows, num_inputs = x_TI.shape
    tiles = fp8_product_cuda.choose_product_tiles(num_rows, weight.shape[0], num_inputs)
    if num_rows == 1 and num_inputs <= _LONGEST_QUANTIZED and x_TI.data_ptr() % 16 == 0:
        x_1I = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        return fp8_product_cuda.multiply_one_row(x_1I, weight, tiles.cluster)
    return fp8_product_cuda.multiply_fp8(*quantize_rows(x_TI), weight, tiles)


def one_row(x_1I: Tensor, weight: Fp8Weight, tiles: Fp8VectorTiles) -> Tensor:
    """`fp8_linear` of one row by the own kernel."""
    num_outputs, num_inputs = weight.shape
    if x_1I.stride(1) != 1:
        x_1I = x_1I.contiguous()
    out_1O = x_1I.new_empty((1, num_outputs))
    block_inputs, block_rest = whole_blocks(num_inputs)
    fp8_vector_kernel[(cdiv(num_outputs, tiles.block_outputs),)](
        x_1I,
        weight.weight,
        weight.scale,
        out_1O,
        num_outputs,
        num_inputs,
        BLOCK_O=tiles.block_outputs,
        BLOCK_I=block_inputs,
        BLOCK_REST=block_rest,
        num_warps=tiles.num_warps,
        **launch_options(x_1I),
    )
    return out_1O


def by_blocks(x_TI: Tensor, weight: Fp8Weight, tiles: Fp8Tiles) -> Tensor:
    """`fp8_linear` by the own kernel, cut as told."""
    num_rows, num_inputs = x_TI.shape
    num_outputs = weight.shape[0]
    out_TO = x_TI.new_empty((num_rows, num_outputs))
    if not num_rows:
        return out_TO
    is_float32 = x_TI.dtype == torch.float32
    values_TI, factors_T = quantize_rows(x_TI, torch.float32 if is_float32 else torch.float16)
    sums = out_TO
    if tiles.num_splits > 1:
        shape = (tiles.num_splits, num_rows, num_outputs)
        sums = x_TI.new_empty(shape, dtype=torch.float32)
    grid = (
        cdiv(num_outputs, tiles.block_outputs),
        tiles.num_splits,
        cdiv(num_rows, tiles.block_rows),
    )
    fp8_linear_kernel[grid](
        values_TI,
        factors_T,
        weight.weight,
        weight.scale,
        sums,
        num_rows,
        num_outputs,
        num_inputs,
        IS_EVEN=num_inputs % tiles.block_inputs == 0,
        BLOCK_T=tiles.block_rows,
        BLOCK_O=tiles.block_outputs,
        BLOCK_I=tiles.block_inputs,
        NUM_SPLITS=tiles.num_splits,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **launch_options(x_TI),
    )
    if tiles.num_splits > 1:
        sum_fp8_splits_kernel[(cdiv(num_outputs, _SUM_BLOCK), num_rows)](
            sums,
            factors_T,
            weight.scale,
            out_TO,
            num_rows,
            num_outputs,
            NUM_SPLITS=tiles.num_splits,
            BLOCK_O=_SUM_BLOCK,
            num_warps=4,
            **launch_options(x_TI),
        )
    return out_TO


def is_torchs(x_TI: Tensor, weight: Fp8Weight) -> bool:
    """Whether torch's scaled product takes such operands: on Hopper, rows of whole 16 bytes."""
    num_outputs, num_inputs = weight.shape
    return (
        x_TI.is_cuda
        and x_TI.dtype == torch.bfloat16
        and num_inputs % 16 == 0
        and num_outputs % 16 == 0
        and torch.cuda.get_device_capability(x_TI.device)[0] >= 9
    )


def by_torch(x_TI: Tensor, weight: Fp8Weight) -> Tensor:
    """`fp8_linear` by torch's product with a factor for every row and column.

    Sums go to float32 every few products: the fast way keeps too few bits.
    """
    values_TI, factors_T = quantize_rows(x_TI)
    return torch._scaled_mm(
        values_TI,
        weight.weight.t(),
        scale_a=factors_T[:, None],
        scale_b=weight.scale[None, :],
        out_dtype=x_TI.dtype,
        use_fast_accum=False,
    )
