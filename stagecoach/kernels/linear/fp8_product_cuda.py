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
_TILE_INPUTS = 128
_NUM_PROCESSORS = 132
_BARRIER_BYTES = 16  # of a stage
_OTHER_BYTES = 64  # with the 32 of codes and rows that the source always has
_BYTES_BEHIND_ROW = 112  # what the matrix units read behind one row
_STAGE_ROOM = {1: 192 * 1024, 2: 98 * 1024, 3: 73 * 1024}  # by how many blocks share a processor
_LARGEST_CLUSTER = 8


class Fp8ProductTiles(NamedTuple):
    """How a product is cut."""

    rows: int  # of a tile: 8, 32, 64 or 128
    groups: int  # of 64 outputs of a tile, 1 or 2
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


def choose_product_tiles(num_rows: int, num_outputs: int, num_inputs: int) -> Fp8ProductTiles:
    """The cut for some rows: as many blocks as run at once; alike for all that a tile holds."""
    if num_rows > 64:
        num_tiles = cdiv(num_outputs, 128) * cdiv(num_rows, 128)
        return Fp8ProductTiles(128, 2, _cluster(num_tiles, num_inputs, _NUM_PROCESSORS))
    rows = next(rows for rows in (8, 32, 64) if num_rows <= rows)
    cluster = _cluster(cdiv(num_outputs, 64), num_inputs, 3 * _NUM_PROCESSORS)
    return Fp8ProductTiles(rows, 1, cluster)


def _cluster(num_tiles: int, num_inputs: int, num_blocks: int) -> int:
    """Up to so many blocks of all tiles, each with two tiles of inputs at least."""
    cluster = 1
    while (
        cluster < _LARGEST_CLUSTER
        and num_tiles * cluster * 2 <= num_blocks
        and num_inputs >= cluster * 4 * _TILE_INPUTS
    ):
        cluster *= 2
    return cluster


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
    _launch(arguments, out_1O, weight, Fp8ProductTiles(8, 1, cluster), quantizes=True)
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
    arguments.weights = swizzled_boxes(weight.weight, 64 * tiles.groups)
    arguments.weight_factors = weight.scale.data_ptr()
    arguments.out = out_TO.data_ptr()
    arguments.num_rows = num_rows
    arguments.num_outputs = num_outputs
    arguments.num_inputs = num_inputs
    definitions = product_definitions(tiles, quantizes=quantizes)
    shared_bytes = definitions["SHARED_BYTES"]
    if quantizes:
        share = cdiv(cdiv(num_inputs, _TILE_INPUTS), tiles.cluster) * _TILE_INPUTS
        shared_bytes += share + _BYTES_BEHIND_ROW
    kernel = nvrtc.load_kernel(_SOURCE, "multiply_fp8", out_TO.device, tuple(definitions.items()))
    num_tiles = cdiv(num_rows, tiles.rows) * cdiv(num_outputs, 64 * tiles.groups)
    kernel.launch(
        (num_tiles * tiles.cluster, 1, 1),
        num_threads(tiles),
        arguments,
        shared_bytes,
        cluster=tiles.cluster,
        is_dependent=dependent_launch.launch_options(out_TO)["IS_DEPENDENT"],
    )


def num_threads(tiles: Fp8ProductTiles) -> int:
    """Of a block: those that multiply, and a warp that brings tiles."""
    return 128 * tiles.groups + 32


def product_definitions(tiles: Fp8ProductTiles, *, quantizes: bool) -> dict[str, int]:
    """What `fp8_product.cu` is compiled with; a share of a row to quantise takes room beside."""
    stage_bytes = (64 * tiles.groups + (0 if quantizes else tiles.rows)) * _TILE_INPUTS
    blocks_per_processor = 3 if tiles.groups == 1 else 1 if tiles.rows == 128 else 2
    # Less for the share of a row.
    num_stages = _STAGE_ROOM[blocks_per_processor] // stage_bytes - quantizes
    sum_bytes = tiles.rows * (64 * tiles.groups + 4) * 4
    return {
        "ROWS": tiles.rows,
        "GROUPS": tiles.groups,
        "QUANTIZES": int(quantizes),
        "NUM_STAGES": num_stages,
        "SHARED_BYTES": max(num_stages * stage_bytes, sum_bytes)
        + num_stages * _BARRIER_BYTES
        + tiles.rows * 4
        + _OTHER_BYTES,
    }


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
