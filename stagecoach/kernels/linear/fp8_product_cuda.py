"""Launches `fp8_product.cu`: products of E4M3 rows with an E4M3 matrix on Hopper GPUs.

Owns which products it takes and how they are cut. Rows come quantised.

Dimensions: T rows, I inputs, O outputs.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from stagecoach.kernels import dependent_launch, nvrtc
from stagecoach.kernels.quantization import Fp8Weight
from stagecoach.kernels.tensor_map import TensorMap, swizzled_boxes

_SOURCE = Path(__file__).with_name("fp8_product.cu")
_TILE_OUTPUTS, _TILE_INPUTS = 64, 128
_TILE_ROWS = (8, 32, 64)
_NUM_THREADS = 160  # of a block: 128 that multiply, and a warp that brings tiles
_STAGE_ROOM = 73 * 1024  # so that three blocks share a processor
_STAGE_BARRIER_BYTES = 16
_OTHER_BYTES = 64  # with the 32 of codes and rows that the source always has
_BYTES_BEHIND_ROW = 112  # what the matrix units read behind one row
_NUM_PROCESSORS = 132
_MOST_BLOCKS = 3 * _NUM_PROCESSORS  # that run at once
# Blocks among which few inputs are shared: of up to 8 rows, whose sums are soon added up, and more.
_FEW_BLOCKS, _FEWER_BLOCKS = 240, 160
_LARGEST_CLUSTER = 8
# Values of a matrix that many tiles of rows read again; a larger one leaves the L2 cache meanwhile.
_MOST_SHARED_VALUES = 2**25


class Fp8ProductTiles(NamedTuple):
    """How a product is cut."""

    rows: int  # of a tile: 8, 32 or 64
    cluster: int  # blocks among which the inputs of a tile are shared


class Fp8Arguments(ctypes.Structure):
    """`Arguments` in `fp8_product.cu`, field by field."""

    _fields_ = [
        ("weights", TensorMap),
        ("rows", TensorMap),
        *((name, ctypes.c_void_p) for name in ("row_factors", "weight_factors", "x", "out")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_inputs")),
        # The source's struct ends at a multiple of 64 bytes, as the maps in it ask for.
        ("padding", ctypes.c_ubyte * 20),
    ]


def fits(dtype: torch.dtype, weight: Fp8Weight) -> bool:
    """Whether products of rows of a type with a matrix are taken."""
    num_outputs, num_inputs = weight.shape
    return (
        weight.weight.is_cuda
        and dtype == torch.bfloat16
        and num_inputs % 16 == 0
        and num_outputs % 8 == 0
        and weight.weight.data_ptr() % 16 == weight.scale.data_ptr() % 16 == 0
        and _is_hopper(weight.weight.device)
        and nvrtc.is_available()
    )


def is_faster(num_rows: int, weight: Fp8Weight) -> bool:
    """Whether products of so many rows were measured faster here than with torch on an H200.

    They read rows and weights again for every tile, and so they are while one wave of blocks has
    all of it.
    """
    num_outputs, num_inputs = weight.shape
    num_row_tiles = cdiv(num_rows, _TILE_ROWS[-1])
    return num_row_tiles <= 1 or (
        num_row_tiles * cdiv(num_outputs, _TILE_OUTPUTS) <= _MOST_BLOCKS
        and num_outputs * num_inputs <= _MOST_SHARED_VALUES
    )


def choose_product_tiles(num_rows: int, num_outputs: int, num_inputs: int) -> Fp8ProductTiles:
    """The cut that was fastest on an H200: a block a processor, more where it has much to read."""
    rows = next((rows for rows in _TILE_ROWS if num_rows <= rows), _TILE_ROWS[-1])
    num_tiles = cdiv(num_rows, rows) * cdiv(num_outputs, _TILE_OUTPUTS)
    num_input_tiles = cdiv(num_inputs, _TILE_INPUTS)
    few_blocks, fewest_of_block = (_FEW_BLOCKS, 3) if rows == _TILE_ROWS[0] else (_FEWER_BLOCKS, 8)
    cluster = 1
    while cluster < _LARGEST_CLUSTER:
        num_blocks, of_block = num_tiles * cluster * 2, num_input_tiles // (cluster * 2)
        is_good = num_blocks <= few_blocks and of_block >= fewest_of_block
        if not is_good and not (num_blocks <= _MOST_BLOCKS and of_block >= 16):
            break
        cluster *= 2
    return Fp8ProductTiles(rows, cluster)


def multiply_fp8(
    values_TI: Tensor, factors_T: Tensor, weight: Fp8Weight, tiles: Fp8ProductTiles
) -> Tensor:
    """Rows times a matrix that `fits` says yes to.

    Args:
        values_TI: E4M3, rows in one piece.
        factors_T: float32.
        weight: with its factors.
        tiles: the cut.

    Returns:
        bfloat16 [T, O].
    """
    num_rows = len(values_TI)
    out_TO = values_TI.new_empty((num_rows, weight.shape[0]), dtype=torch.bfloat16)
    if num_rows:
        arguments = Fp8Arguments(
            rows=swizzled_boxes(values_TI, tiles.rows), row_factors=factors_T.data_ptr()
        )
        _launch(arguments, out_TO, weight, tiles, quantizes=False)
    return out_TO


def multiply_one_row(x_1I: Tensor, weight: Fp8Weight, cluster: int) -> Tensor:
    """One row, quantised on the way, times a matrix that `fits` says yes to.

    Args:
        x_1I: bfloat16, in one piece, at a multiple of 16 bytes.
        weight: with its factors.
        cluster: as in `Fp8ProductTiles`.

    Returns:
        bfloat16 [1, O].
    """
    out_1O = x_1I.new_empty((1, weight.shape[0]))
    arguments = Fp8Arguments(x=x_1I.data_ptr())
    _launch(arguments, out_1O, weight, Fp8ProductTiles(_TILE_ROWS[0], cluster), quantizes=True)
    return out_1O


def _launch(
    arguments: Fp8Arguments,
    out_TO: Tensor,
    weight: Fp8Weight,
    tiles: Fp8ProductTiles,
    *,
    quantizes: bool,
) -> None:
    """With what rows are in `arguments`."""
    num_rows, num_outputs = out_TO.shape
    num_inputs = weight.shape[1]
    arguments.weights = swizzled_boxes(weight.weight, _TILE_OUTPUTS)
    arguments.weight_factors = weight.scale.data_ptr()
    arguments.out = out_TO.data_ptr()
    arguments.num_rows = num_rows
    arguments.num_outputs = num_outputs
    arguments.num_inputs = num_inputs
    definitions = product_definitions(tiles.rows, quantizes=quantizes)
    shared_bytes = definitions["SHARED_BYTES"]
    if quantizes:
        share = cdiv(cdiv(num_inputs, _TILE_INPUTS), tiles.cluster) * _TILE_INPUTS
        shared_bytes += share + _BYTES_BEHIND_ROW
    kernel = nvrtc.load_kernel(_SOURCE, "multiply_fp8", out_TO.device, tuple(definitions.items()))
    num_tiles = cdiv(num_rows, tiles.rows) * cdiv(num_outputs, _TILE_OUTPUTS)
    kernel.launch(
        (num_tiles * tiles.cluster, 1, 1),
        _NUM_THREADS,
        arguments,
        shared_bytes,
        cluster=tiles.cluster,
        is_dependent=dependent_launch.launch_options(out_TO)["IS_DEPENDENT"],
    )


def product_definitions(rows: int, *, quantizes: bool) -> dict[str, int]:
    """What `fp8_product.cu` is compiled with; a share of a row to quantise takes room beside."""
    stage_bytes = (_TILE_OUTPUTS + (0 if quantizes else rows)) * _TILE_INPUTS
    num_stages = _STAGE_ROOM // stage_bytes - quantizes  # less for the share of a row
    return {
        "ROWS": rows,
        "QUANTIZES": int(quantizes),
        "NUM_STAGES": num_stages,
        "SHARED_BYTES": num_stages * (stage_bytes + _STAGE_BARRIER_BYTES) + rows * 4 + _OTHER_BYTES,
    }


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
