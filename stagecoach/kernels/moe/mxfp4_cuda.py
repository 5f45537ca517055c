"""Launches the experts' products from packed MXFP4 weights on a GPU.

For few pairs an expert `mxfp4.cu` streams the weights through registers, in bfloat16, for more
`mxfp4_many.cu` does where it can; all else, and float32, is Triton's. Every launch depends on
sizes only.

Dimensions: T tokens, E experts, K experts a token, P = T * K pairs, L latent width,
I intermediate width.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from triton import cdiv

from stagecoach.kernels import nvrtc
from stagecoach.kernels.dependent_launch import launch_options
from stagecoach.kernels.moe.mxfp4_kernel import SEGMENT, product_mxfp4_kernel
from stagecoach.kernels.moe.mxfp4_many_cuda import by_many, fits_many
from stagecoach.kernels.moe.mxfp4_tiles import (
    CHUNK,
    FEW_PAIRS,
    FewTiles,
    Mxfp4SortedTiles,
    few_tiles,
    many_tiles,
    mxfp4_sorted_tiles,
)
from stagecoach.kernels.moe.packed_experts import PackedExperts
from stagecoach.kernels.moe.sorted_pairs import SortedPairs, combine, sort_pairs
from stagecoach.kernels.quantization import Mxfp4Weight

_SOURCE = Path(__file__).with_name("mxfp4.cu")
_MOST_SHARED_BYTES = 227 * 1024  # that a block may have
_MOST_TILES = 65_535  # bound of the grid's second axis


class FewArguments(ctypes.Structure):
    """`Arguments` in `mxfp4.cu`, field by field."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("x", "packed", "scale", "out", "pairs", "offsets", "tile_experts"),
                *("tile_rows", "num_tiles", "expert_ids"),
            )
        ),
        ("x_stride", ctypes.c_longlong),
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


def routed_experts(
    x_TL: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: PackedExperts
) -> Tensor:
    """The weighted sum of the experts' outputs, [T, L] in `x_TL.dtype`."""
    num_pairs = ids_TK.numel()
    if not num_pairs:
        return torch.empty_like(x_TL)
    has_many = fits_many(x_TL, experts)
    few = few_tiles(num_pairs, experts.num_experts, has_many=has_many)
    if few is not None and fits_few(x_TL, experts, few):
        return by_few(x_TL, weights_TK, ids_TK, experts, few)
    if has_many:
        many = many_tiles(num_pairs, experts.num_experts)
        return by_many(x_TL, weights_TK, ids_TK, experts, many)
    is_float32 = x_TL.dtype == torch.float32
    tiles = mxfp4_sorted_tiles(num_pairs, experts.num_experts, is_float32=is_float32)
    return by_tiles(x_TL, weights_TK, ids_TK, experts, tiles)


def by_tiles(
    x_TL: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    experts: PackedExperts,
    tiles: Mxfp4SortedTiles,
) -> Tensor:
    """`routed_experts` by Triton's kernels."""
    experts.check(x_TL)
    order = sort_pairs(ids_TK, experts.num_experts, tiles.block_m)
    product_PI = gate_up(x_TL, ids_TK.shape[1], order, experts, tiles)
    out_PL = down(product_PI, order, experts, tiles)
    return combine(out_PL, weights_TK, ids_TK, None)


def gate_up(
    x_TL: Tensor,
    num_chosen: int,
    order: SortedPairs,
    experts: PackedExperts,
    tiles: Mxfp4SortedTiles,
) -> Tensor:
    """activation(gate x, up x) in sorted order, columns in operand order: [P, at least I]."""
    # Halves whose segments are whole come out as the second product takes them.
    is_whole = experts.width % SEGMENT.value == 0 == tiles.gate_up.block_n % SEGMENT.value
    both_P2I = product(
        in_operand_order(x_TL),
        num_chosen,
        order,
        experts.gate_up_E2IL,
        tiles,
        is_first=True,
        orders_outputs=is_whole,
    )
    gate_PI, up_PI = both_P2I.split(experts.width, dim=1)
    product_PI = experts.activation(gate_PI, up_PI)
    return product_PI if is_whole else in_operand_order(product_PI)


def down(
    product_PI: Tensor, order: SortedPairs, experts: PackedExperts, tiles: Mxfp4SortedTiles
) -> Tensor:
    """The experts' outputs, [P, L] by pair, of what `gate_up` made."""
    weight_ELI = experts.down_ELI
    return product(product_PI, 1, order, weight_ELI, tiles, is_first=False, orders_outputs=False)


def product(
    x: Tensor,
    num_chosen: int,
    order: SortedPairs,
    weight_EOI: Mxfp4Weight,
    tiles: Mxfp4SortedTiles,
    *,
    is_first: bool,
    orders_outputs: bool,
) -> Tensor:
    """[P, O] of each pair with its expert: from tokens to sorted order, or from there to pairs.

    Rows of places that no pair has hold anything.

    Args:
        x: columns in operand order.
        orders_outputs: whether columns of the result are, too.
    """
    _, num_outputs, num_inputs = weight_EOI.shape
    cut = tiles.gate_up if is_first else tiles.down
    assert x.shape[1] % SEGMENT.value == 0 == cut.block_k % SEGMENT.value, "whole segments"
    out_PO = x.new_empty((len(order.pairs_P), num_outputs))
    product_mxfp4_kernel[(len(order.tile_rows_M) * cdiv(num_outputs, cut.block_n),)](
        x,
        *weight_EOI,
        out_PO,
        *order,
        num_outputs,
        num_inputs,
        x.stride(0),
        NUM_CHOSEN=num_chosen,
        IS_FIRST=is_first,
        ORDERS_OUTPUTS=orders_outputs,
        IS_EVEN=num_inputs % cut.block_k == 0,
        IS_FLOAT32=x.dtype == torch.float32,
        BLOCK_M=tiles.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        NUM_STAGES=cut.num_stages,
        num_warps=cut.num_warps,
    )
    return out_PO


def in_operand_order(x_RK: Tensor) -> Tensor:
    """Columns of each segment as `product_mxfp4_kernel` takes them, zeros behind the last one.

    Column 16 t + 4 s + 2 h + p of 64 goes to 16 s + 8 h + 2 t + p.
    """
    if missing := -x_RK.shape[1] % SEGMENT.value:
        x_RK = functional.pad(x_RK, (0, missing))
    parts = x_RK.unflatten(1, (-1, 4, 4, 2, 2))
    return parts.permute(0, 1, 3, 4, 2, 5).reshape(len(x_RK), -1)


def fits_few(x_TL: Tensor, experts: PackedExperts, tiles: FewTiles) -> bool:
    """Whether `mxfp4.cu` can take a call."""
    _, latent = x_TL.shape
    return (
        x_TL.is_cuda
        and x_TL.dtype == torch.bfloat16
        and x_TL.stride(0) % 8 == 0
        and x_TL.data_ptr() % 16 == 0
        and shared_bytes(max(latent, experts.width), FEW_PAIRS, tiles.num_warps)
        <= _MOST_SHARED_BYTES
        and nvrtc.is_available()
        and torch.cuda.get_device_capability(x_TL.device) >= (8, 0)
    )


def by_few(
    x_TL: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: PackedExperts, tiles: FewTiles
) -> Tensor:
    """`routed_experts` by `mxfp4.cu`."""
    experts.check(x_TL)
    order = sort_pairs(ids_TK, experts.num_experts, FEW_PAIRS) if tiles.is_sorted else None
    product_PI = few_gate_up(x_TL, ids_TK, order, experts, tiles)
    out_PL = few_down(product_PI, ids_TK, order, experts, tiles)
    return combine(out_PL, weights_TK, ids_TK, None)


def few_gate_up(
    x_TL: Tensor,
    ids_TK: Tensor,
    order: SortedPairs | None,
    experts: PackedExperts,
    tiles: FewTiles,
) -> Tensor:
    """activation(gate x, up x), [P, I] in sorted order, or without one by pair."""
    product_PI = x_TL.new_empty((ids_TK.numel(), experts.width))
    kind, beta, linear_beta = experts.activation
    _launch_few(
        x_TL,
        experts.gate_up_E2IL,
        product_PI,
        ids_TK,
        order,
        tiles,
        is_gated=True,
        is_situ=kind == "situ",
        is_bound=linear_beta is not None,
        beta=beta,
        linear_beta=1.0 if linear_beta is None else linear_beta,
    )
    return product_PI


def few_down(
    product_PI: Tensor,
    ids_TK: Tensor,
    order: SortedPairs | None,
    experts: PackedExperts,
    tiles: FewTiles,
) -> Tensor:
    """The experts' outputs, [P, L] by pair."""
    out_PL = product_PI.new_empty((len(product_PI), experts.down_ELI.shape[1]))
    _launch_few(product_PI, experts.down_ELI, out_PL, ids_TK, order, tiles, is_gated=False)
    return out_PL


def _launch_few(
    x: Tensor,
    weight: Mxfp4Weight,
    out: Tensor,
    ids_TK: Tensor,
    order: SortedPairs | None,
    tiles: FewTiles,
    *,
    is_gated: bool,
    **activation: float,
) -> None:
    num_inputs, num_outputs = weight.shape[2], out.shape[1]
    num_tiles = ids_TK.numel() if order is None else len(order.tile_rows_M)
    assert num_tiles <= _MOST_TILES, f"{num_tiles} tiles"
    cut = tiles.cut(num_inputs, num_outputs, num_tiles, is_gated=is_gated)
    pointers = {}
    if order is not None:
        pointers = {
            "pairs": order.pairs_P.data_ptr(),
            "offsets": order.offsets_E1.data_ptr(),
            "tile_experts": order.tile_experts_M.data_ptr(),
            "tile_rows": order.tile_rows_M.data_ptr(),
            "num_tiles": order.num_tiles_1.data_ptr(),
        }
    arguments = FewArguments(
        x=x.data_ptr(),
        packed=weight.packed.data_ptr(),
        scale=weight.scale.data_ptr(),
        out=out.data_ptr(),
        expert_ids=ids_TK.data_ptr(),
        x_stride=x.stride(0),
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        num_chosen=ids_TK.shape[1],
        blocks_of_rows=cut.blocks_of_rows,
        **pointers,
        **activation,
    )
    definitions = few_definitions(tiles, cut.k_warps, is_gated=is_gated)
    kernel = nvrtc.load_kernel(_SOURCE, "multiply_few", x.device, tuple(definitions.items()))
    rows = cut.blocks_of_rows * cut.rows
    grid = (cdiv(num_outputs, rows), num_tiles, 1)
    most_pairs = 1 if order is None else FEW_PAIRS
    num_bytes = shared_bytes(num_inputs, most_pairs, tiles.num_warps)
    is_dependent = launch_options(x)["IS_DEPENDENT"]
    kernel.launch(grid, 32 * tiles.num_warps, arguments, num_bytes, is_dependent=is_dependent)


def few_definitions(tiles: FewTiles, k_warps: int, *, is_gated: bool) -> dict[str, int]:
    """What `mxfp4.cu` is compiled with."""
    return {
        "IS_GATED": int(is_gated),
        "NUM_WARPS": tiles.num_warps,
        "K_WARPS": k_warps,
        "STAGES": tiles.num_stages,
        "NUM_BLOCKS": tiles.num_blocks,
    }


def shared_bytes(num_inputs: int, most_pairs: int, num_warps: int) -> int:
    """Of a block: chunks of its tile's inputs, 64 bytes that part the rows, and the warps' sums."""
    inputs = most_pairs * (cdiv(num_inputs, CHUNK) * CHUNK * 2 + 64)
    return inputs + num_warps * 32 * (FEW_PAIRS + 1) * 4
