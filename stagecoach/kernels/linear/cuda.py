"""Launches products with a weight matrix on a GPU: own kernels for few rows, cuBLAS for more.

Dimensions: T rows, I inputs, O outputs, G products of one size, S addends of a sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stagecoach.kernels.dependent_launch import launch_options
from stagecoach.kernels.linear.blocks import LONGEST_ROW, whole_blocks
from stagecoach.kernels.linear.fp8_cuda import fp8_grouped_linear, fp8_linear
from stagecoach.kernels.linear.linear_kernel import (
    linear_kernel,
    sum_splits_kernel,
    vector_kernel,
)
from stagecoach.kernels.quantization import Fp8Weight, LinearWeight

MOST_ROWS = 16  # of the own kernels: one tile of tensor cores


class LinearTiles(NamedTuple):
    """How the own kernel of some rows cuts a product."""

    block_outputs: int
    block_inputs: int
    num_splits: int  # of the inputs
    num_warps: int
    num_stages: int


class VectorTiles(NamedTuple):
    """How the own kernel of one row cuts a product: a program reads whole rows of weights."""

    block_outputs: int
    num_warps: int


def choose_tiles(num_outputs: int, num_inputs: int) -> LinearTiles | None:
    """The cut of two rows and more that was fastest on an H200 in bfloat16; None: cuBLAS was."""
    if num_inputs < 512:
        return LinearTiles(64, 128, 1, 4, 4)
    if num_outputs >= 8192 and 2048 <= num_inputs < 4096:
        return LinearTiles(64, 128, 1, 4, 4)
    return None


def choose_vector_tiles(num_inputs: int) -> VectorTiles:
    """The cut of one row that was fastest on an H200 in bfloat16: 16 to 128 bytes a thread."""
    if num_inputs < 512:
        return VectorTiles(8, 1)
    if num_inputs < 2048:
        return VectorTiles(4, 2)
    if num_inputs <= 4096:
        return VectorTiles(2, 4)
    return VectorTiles(1, 4 if num_inputs < 8192 else 8)


def choose_sum_tiles(num_outputs: int, num_inputs: int) -> LinearTiles | None:
    """The same for a product whose addends stay apart, so that splits cost nothing."""
    if num_outputs < 4096 and num_inputs >= 2048:
        return LinearTiles(16, 256, 4, 4, 3)
    return choose_tiles(num_outputs, num_inputs)


def linear(x_TI: Tensor, weight_OI: LinearWeight) -> Tensor:
    """[..., I] -> [..., O] in `x_TI.dtype`."""
    if isinstance(weight_OI, Fp8Weight):
        return fp8_linear(x_TI.flatten(0, -2), weight_OI).unflatten(0, x_TI.shape[:-1])
    num_rows = x_TI.shape[:-1].numel()
    if not 0 < num_rows <= MOST_ROWS or not _is_row_major(weight_OI):
        return functional.linear(x_TI, weight_OI)
    num_outputs, num_inputs = weight_OI.shape
    if num_rows == 1 and num_inputs <= LONGEST_ROW:
        tiles = choose_vector_tiles(num_inputs)
        out_TO = one_row(x_TI.reshape(1, -1), weight_OI, tiles)
    elif cut := choose_tiles(num_outputs, num_inputs):
        out_TO = few_rows(x_TI.reshape(num_rows, -1), weight_OI, cut)
    else:
        return functional.linear(x_TI, weight_OI)
    return out_TO.view(*x_TI.shape[:-1], -1)


def grouped_linear(x_TGI: Tensor, weight_GOI: LinearWeight) -> Tensor:
    """[T, G, I] and [G, O, I] -> [G, T, O] in `x_TGI.dtype`; up to a bound in one launch."""
    if isinstance(weight_GOI, Fp8Weight):
        return fp8_grouped_linear(x_TGI, weight_GOI)
    num_rows, num_groups, num_inputs = x_TGI.shape
    num_outputs = weight_GOI.shape[1]
    if 0 < num_rows <= MOST_ROWS and _is_row_major(weight_GOI[0]):
        if num_rows == 1 and num_inputs <= LONGEST_ROW:
            tiles = choose_vector_tiles(num_inputs)
            return _launch_vector(x_TGI[0], weight_GOI, tiles, x_TGI.dtype)[:, None]
        cut = choose_tiles(num_outputs, num_inputs)
        if cut is not None and cut.num_splits == 1:
            return _launch(x_TGI, weight_GOI, cut, x_TGI.dtype)[:, 0]
    out_GTO = x_TGI.new_empty((num_groups, num_rows, num_outputs))
    for x_TI, weight_OI, out_TO in zip(x_TGI.unbind(1), weight_GOI, out_GTO, strict=True):
        torch.mm(x_TI, weight_OI.t(), out=out_TO)
    return out_GTO


def one_row(
    x_1I: Tensor, weight_OI: Tensor, tiles: VectorTiles, dtype: torch.dtype | None = None
) -> Tensor:
    """[1, I] -> [1, O] by the own kernel, in `dtype` or that of `x_1I`."""
    return _launch_vector(x_1I, weight_OI[None], tiles, dtype or x_1I.dtype)


def _launch_vector(
    x_GI: Tensor, weight_GOI: Tensor, tiles: VectorTiles, dtype: torch.dtype
) -> Tensor:
    """[G, O] in `dtype`."""
    assert x_GI.dtype == weight_GOI.dtype != torch.float64, (x_GI.dtype, weight_GOI.dtype)
    num_groups, num_outputs, num_inputs = weight_GOI.shape
    assert x_GI.shape == (num_groups, num_inputs) and weight_GOI.stride(2) == 1
    if x_GI.stride(1) != 1:
        x_GI = x_GI.contiguous()
    out_GO = x_GI.new_empty((num_groups, num_outputs), dtype=dtype)
    block_inputs, block_rest = whole_blocks(num_inputs)
    vector_kernel[(-(-num_outputs // tiles.block_outputs), num_groups)](
        x_GI,
        weight_GOI,
        out_GO,
        num_outputs,
        num_inputs,
        weight_GOI.stride(1),
        x_GI.stride(0),
        weight_GOI.stride(0),
        num_outputs,
        BLOCK_O=tiles.block_outputs,
        BLOCK_I=block_inputs,
        BLOCK_REST=block_rest,
        num_warps=tiles.num_warps,
        **launch_options(x_GI),
    )
    return out_GO


def few_rows(x_TI: Tensor, weight_OI: Tensor, tiles: LinearTiles) -> Tensor:
    """`linear` by the own kernel of some rows, cut as told."""
    if tiles.num_splits == 1:
        return _launch(x_TI[:, None], weight_OI[None], tiles, x_TI.dtype)[0, 0]
    sums_STO = _launch(x_TI[:, None], weight_OI[None], tiles, torch.float32)[0]
    out_TO = x_TI.new_empty(sums_STO.shape[1:])
    block = 256
    sum_splits_kernel[(-(-out_TO.numel() // block),)](
        sums_STO,
        out_TO,
        out_TO.numel(),
        NUM_SPLITS=len(sums_STO),
        BLOCK=block,
        num_warps=2,
        **launch_options(x_TI),
    )
    return out_TO


def float32_sums(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """float32 [S, T, O] whose sum over S is the product."""
    if 0 < len(x_TI) <= MOST_ROWS and _is_row_major(weight_OI):
        num_outputs, num_inputs = weight_OI.shape
        if len(x_TI) == 1 and num_inputs <= LONGEST_ROW:
            tiles = choose_vector_tiles(num_inputs)
            return one_row(x_TI, weight_OI, tiles, torch.float32)[None]
        cut = choose_sum_tiles(num_outputs, num_inputs)
        if cut is not None:
            return _launch(x_TI[:, None], weight_OI[None], cut, torch.float32)[0]
    if x_TI.dtype == torch.float32:
        return functional.linear(x_TI, weight_OI)[None]
    return torch.mm(x_TI, weight_OI.t(), out_dtype=torch.float32)[None]


def _is_row_major(weight_OI: Tensor) -> bool:
    return weight_OI.stride(1) == 1


def _launch(x_TGI: Tensor, weight_GOI: Tensor, tiles: LinearTiles, dtype: torch.dtype) -> Tensor:
    """[G, S, T, O] addends in `dtype`."""
    assert x_TGI.dtype == weight_GOI.dtype != torch.float64, (x_TGI.dtype, weight_GOI.dtype)
    if x_TGI.stride(2) != 1:
        x_TGI = x_TGI.contiguous()
    num_rows, num_groups, num_inputs = x_TGI.shape
    num_outputs = weight_GOI.shape[1]
    assert num_rows <= MOST_ROWS, num_rows
    out_GSTO = x_TGI.new_empty((num_groups, tiles.num_splits, num_rows, num_outputs), dtype=dtype)
    linear_kernel[(-(-num_outputs // tiles.block_outputs), tiles.num_splits, num_groups)](
        x_TGI,
        weight_GOI,
        out_GSTO,
        num_rows,
        num_outputs,
        num_inputs,
        x_TGI.stride(0),
        weight_GOI.stride(1),
        num_rows * num_outputs,
        num_outputs,
        x_TGI.stride(1),
        weight_GOI.stride(0),
        out_GSTO.stride(0),
        IS_EVEN=num_inputs % tiles.block_inputs == 0,
        BLOCK_T=MOST_ROWS,
        BLOCK_O=tiles.block_outputs,
        BLOCK_I=tiles.block_inputs,
        NUM_SPLITS=tiles.num_splits,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **launch_options(x_TGI),
    )
    return out_GSTO
