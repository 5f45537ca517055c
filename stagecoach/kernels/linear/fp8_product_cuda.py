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
# Of a block where three share a processor, and where one has it alone.
_FEW_ROWS_BYTES, _MANY_ROWS_BYTES = 73 * 1024, 192 * 1024
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
        *((name, ctypes.c_void_p) for name in ("row_factors", "weight_factors", "out")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_inputs")),
        # The source's struct ends at a multiple of 64 bytes, as the maps in it ask for.
        ("padding", ctypes.c_ubyte * 28),
    ]


def fits(dtype: torch.dtype, weight: Fp8Weight) -> bool:
    """Whether products of rows of a type with a matrix are taken."""
    num_outputs, num_inputs = weight.shape
    return (
        weight.weight.is_cuda
        and dtype == torch.bfloat16
        and num_inputs % 16 == 0
        and num_outputs % 8 == 0
        and weight.weight.data_ptr() % 16 == 0
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
    num_rows, num_inputs = values_TI.shape
    num_outputs = weight.shape[0]
    out_TO = values_TI.new_empty((num_rows, num_outputs), dtype=torch.bfloat16)
    if not num_rows:
        return out_TO
    definitions = product_definitions(tiles)
    arguments = Fp8Arguments(
        weights=swizzled_boxes(weight.weight, 64 * tiles.groups),
        rows=swizzled_boxes(values_TI, tiles.rows),
        row_factors=factors_T.data_ptr(),
        weight_factors=weight.scale.data_ptr(),
        out=out_TO.data_ptr(),
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
    )
    kernel = nvrtc.load_kernel(
        _SOURCE, "multiply_fp8", values_TI.device, tuple(definitions.items())
    )
    num_tiles = cdiv(num_rows, tiles.rows) * cdiv(num_outputs, 64 * tiles.groups)
    kernel.launch(
        (num_tiles * tiles.cluster, 1, 1),
        num_threads(tiles),
        arguments,
        definitions["SHARED_BYTES"],
        cluster=tiles.cluster,
        is_dependent=dependent_launch.launch_options(values_TI)["IS_DEPENDENT"],
    )
    return out_TO


def num_threads(tiles: Fp8ProductTiles) -> int:
    """Of a block: those that multiply, and a warp that brings tiles."""
    return 128 * tiles.groups + 32


def product_definitions(tiles: Fp8ProductTiles) -> dict[str, int]:
    """What `fp8_product.cu` is compiled with."""
    stage_bytes = (64 * tiles.groups + tiles.rows) * _TILE_INPUTS
    room = _FEW_ROWS_BYTES if tiles.groups == 1 else _MANY_ROWS_BYTES
    num_stages = room // stage_bytes
    sum_bytes = tiles.rows * (64 * tiles.groups + 4) * 4
    return {
        "ROWS": tiles.rows,
        "GROUPS": tiles.groups,
        "NUM_STAGES": num_stages,
        "SHARED_BYTES": max(num_stages * stage_bytes, sum_bytes) + num_stages * _BARRIER_BYTES,
    }


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
