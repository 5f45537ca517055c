"""Launches the experts' products from packed MXFP4 weights for many pairs an expert on Hopper GPUs.

`mxfp4_many.cu` decodes weights in registers on their way to the matrix units, in bfloat16, where
the intermediate width is whole chunks of 128 and the latent one of 256. Every launch depends on
sizes only.

Dimensions: T tokens, K experts a token, P = T * K pairs, L latent width, I intermediate width,
R rows, C columns.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from stagecoach.kernels import nvrtc
from stagecoach.kernels.dependent_launch import launch_options
from stagecoach.kernels.moe.mxfp4_kernel import order_columns_kernel
from stagecoach.kernels.moe.mxfp4_tiles import CHUNK, MOST_ROWS, ManyTiles
from stagecoach.kernels.moe.packed_experts import PackedExperts
from stagecoach.kernels.moe.sorted_pairs import SortedPairs, combine, sort_pairs
from stagecoach.kernels.quantization import Mxfp4Weight

_SOURCE = Path(__file__).with_name("mxfp4_many.cu")
_WARPGROUP = 128


class ManyArguments(ctypes.Structure):
    """`Arguments` in `mxfp4_many.cu`, field by field."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("x", "packed", "scale", "out", "pairs", "offsets", "tile_experts"),
                *("tile_rows", "num_tiles"),
            )
        ),
        ("x_row_bytes", ctypes.c_uint32),
        *(
            (name, ctypes.c_int)
            for name in (
                *("num_inputs", "num_outputs", "num_chosen", "blocks_of_rows"),
                *("is_situ", "is_bound"),
            )
        ),
        ("beta", ctypes.c_float),
        ("linear_beta", ctypes.c_float),
    ]


def fits_many(x_TL: Tensor, experts: PackedExperts) -> bool:
    """Whether `mxfp4_many.cu` can take a call."""
    return (
        x_TL.is_cuda
        and x_TL.dtype == torch.bfloat16
        and x_TL.shape[1] % MOST_ROWS == 0 == experts.width % CHUNK
        and nvrtc.is_available()
        and torch.cuda.get_device_capability(x_TL.device)[0] == 9
    )


def by_many(
    x_TL: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: PackedExperts, tiles: ManyTiles
) -> Tensor:
    """`routed_experts` by `mxfp4_many.cu`."""
    experts.check(x_TL)
    order = sort_pairs(ids_TK, experts.num_experts, tiles.pairs)
    product_PI = many_gate_up(x_TL, ids_TK.shape[1], order, experts, tiles)
    out_PL = many_down(product_PI, order, experts, tiles)
    return combine(out_PL, weights_TK, ids_TK, None)


def many_gate_up(
    x_TL: Tensor, num_chosen: int, order: SortedPairs, experts: PackedExperts, tiles: ManyTiles
) -> Tensor:
    """activation(gate x, up x) in sorted order, columns in operand order: [P, I]."""
    product_PI = x_TL.new_empty((len(order.pairs_P), experts.width))
    kind, beta, linear_beta = experts.activation
    _launch(
        in_chunk_order(x_TL),
        experts.gate_up_E2IL,
        product_PI,
        num_chosen,
        order,
        tiles,
        is_gated=True,
        is_situ=kind == "situ",
        is_bound=linear_beta is not None,
        beta=beta,
        linear_beta=1.0 if linear_beta is None else linear_beta,
    )
    return product_PI


def many_down(
    product_PI: Tensor, order: SortedPairs, experts: PackedExperts, tiles: ManyTiles
) -> Tensor:
    """The experts' outputs, [P, L] by pair, of what `many_gate_up` made."""
    out_PL = product_PI.new_empty((len(product_PI), experts.down_ELI.shape[1]))
    _launch(product_PI, experts.down_ELI, out_PL, 1, order, tiles, is_gated=False)
    return out_PL


def in_chunk_order(x_RC: Tensor) -> Tensor:
    """Columns of each chunk of 128 in `mxfp4_many.cu`'s operand order.

    Column 32 t + 8 w + 4 p + 2 i + h goes to 32 w + 16 i + 8 h + 2 t + p.
    """
    num_rows, num_columns = x_RC.shape
    out_RC = x_RC.new_empty((num_rows, num_columns))
    block = 8
    order_columns_kernel[(-(-num_rows // block), num_columns // CHUNK)](
        x_RC,
        out_RC,
        num_rows,
        num_columns,
        x_RC.stride(0),
        BLOCK_R=block,
        num_warps=4,
        **launch_options(x_RC),
    )
    return out_RC


def _launch(
    x: Tensor,
    weight: Mxfp4Weight,
    out: Tensor,
    num_chosen: int,
    order: SortedPairs,
    tiles: ManyTiles,
    *,
    is_gated: bool,
    **activation: float,
) -> None:
    num_inputs, num_outputs = weight.shape[2], out.shape[1]
    assert len(x) * x.stride(0) * x.element_size() < 2**32, f"{len(x)} rows of {x.stride(0)}"
    num_tiles = len(order.tile_rows_M)
    num_processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    cut = tiles.cut(num_inputs, num_outputs, num_tiles, num_processors, is_gated=is_gated)
    arguments = ManyArguments(
        x=x.data_ptr(),
        packed=weight.packed.data_ptr(),
        scale=weight.scale.data_ptr(),
        out=out.data_ptr(),
        pairs=order.pairs_P.data_ptr(),
        offsets=order.offsets_E1.data_ptr(),
        tile_experts=order.tile_experts_M.data_ptr(),
        tile_rows=order.tile_rows_M.data_ptr(),
        num_tiles=order.num_tiles_1.data_ptr(),
        x_row_bytes=x.stride(0) * x.element_size(),
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        num_chosen=num_chosen,
        blocks_of_rows=cut.blocks_of_rows,
        **activation,
    )
    definitions = many_definitions(tiles, is_gated=is_gated)
    kernel = nvrtc.load_kernel(_SOURCE, "multiply_many", x.device, tuple(definitions.items()))
    num_threads = _WARPGROUP * (tiles.warpgroups + 1)
    kernel.launch((cut.num_blocks, 1, 1), num_threads, arguments, tiles.shared_bytes)


def many_definitions(tiles: ManyTiles, *, is_gated: bool) -> dict[str, int]:
    """What `mxfp4_many.cu` is compiled with."""
    return {
        "IS_GATED": int(is_gated),
        "PAIRS": tiles.pairs,
        "FEW_PAIRS": tiles.few_pairs,
        "MORE_PAIRS": tiles.more_pairs,
        "STAGES": tiles.num_stages,
        "WARPGROUPS": tiles.warpgroups,
        "SHARED_BYTES": tiles.shared_bytes,
    }
