"""Pairs of a token and an expert in order of their experts, and the sum of what comes of them.

Launches what all forms of the experts' products over sorted pairs share. Knows no weights.

Dimensions: T tokens, E experts, K experts a token, P = T * K pairs, L latent width.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stagecoach.kernels.activation import Activation
from stagecoach.kernels.dependent_launch import launch_options
from stagecoach.kernels.moe.sort_kernel import count_pairs_kernel, sort_pairs_kernel
from stagecoach.kernels.moe.tile_kernel import combine_kernel
from stagecoach.kernels.moe.tiles import most_tiles

_MOST_TOKENS = 65_535  # bound of the grid's second axis
# To this many pairs each program counts all experts' pairs by itself.
_MOST_COUNTED_PAIRS = 4096
_COMBINE_BLOCK = 1024


class SortedPairs(NamedTuple):
    """Pairs in order of their experts, and their tiles; what is past an end holds anything."""

    pairs_P: Tensor  # int32, t * K + k
    offsets_E1: Tensor  # int32 [E + 1], where each expert's pairs begin
    tile_experts_M: Tensor  # int32
    tile_rows_M: Tensor  # int32, first place of each tile in `pairs_P`
    num_tiles_1: Tensor  # int32


def sort_pairs(ids_TK: Tensor, num_experts: int, block_m: int) -> SortedPairs:
    """Sort pairs by expert, leaving out those with id -1."""
    num_pairs = ids_TK.numel()

    def empty(size: int) -> Tensor:
        return ids_TK.new_empty(size, dtype=torch.int32)

    num_tiles = most_tiles(num_pairs, num_experts, block_m)
    sorted_pairs = SortedPairs(
        empty(num_pairs), empty(num_experts + 1), empty(num_tiles), empty(num_tiles), empty(1)
    )
    counts_E = None
    if num_pairs > _MOST_COUNTED_PAIRS:
        counts_E = empty(num_experts)
        count_pairs_kernel[(num_experts,)](ids_TK, counts_E, num_pairs, BLOCK_P=8192, num_warps=16)
    sort_pairs_kernel[(num_experts,)](
        ids_TK,
        counts_E,
        *sorted_pairs,
        num_pairs,
        num_experts,
        block_m,
        HAS_COUNTS=counts_E is not None,
        BLOCK_P=min(8192, max(64, triton.next_power_of_2(num_pairs))),
        BLOCK_E=max(64, triton.next_power_of_2(num_experts + 1)),
        num_warps=4 if counts_E is None else 16,
        **launch_options(ids_TK),
    )
    return sorted_pairs


def combine(out_PL: Tensor, weights_TK: Tensor, ids_TK: Tensor, addend_TL: Tensor | None) -> Tensor:
    """The weighted sum over K plus the addend, [T, L]; zeros for tokens without experts."""
    num_tokens, num_chosen = ids_TK.shape
    assert num_tokens <= _MOST_TOKENS, f"{num_tokens} tokens"
    num_outputs = out_PL.shape[1]
    out_TL = out_PL.new_empty((num_tokens, num_outputs))
    combine_kernel[(-(-num_outputs // _COMBINE_BLOCK), num_tokens)](
        out_PL,
        weights_TK,
        ids_TK,
        addend_TL,
        out_TL,
        num_outputs,
        0 if addend_TL is None else addend_TL.stride(0),
        NUM_CHOSEN=num_chosen,
        HAS_ADDEND=addend_TL is not None,
        BLOCK=_COMBINE_BLOCK,
        num_warps=4,
        **launch_options(out_PL),
    )
    return out_TL


def activation_arguments(activation: Activation) -> dict[str, Any]:
    """What `gated` in a kernel is told of the activation."""
    kind, beta, linear_beta = activation
    return {
        "beta": beta,
        "linear_beta": 1.0 if linear_beta is None else linear_beta,
        "IS_SITU": kind == "situ",
        "IS_BOUND": linear_beta is not None,
    }
