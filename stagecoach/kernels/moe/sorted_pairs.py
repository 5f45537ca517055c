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
from stagecoach.kernels.moe.sort_kernel import (
    count_pairs_kernel,
    place_experts_kernel,
    place_pairs_kernel,
    sort_pairs_kernel,
)
from stagecoach.kernels.moe.tile_kernel import combine_kernel
from stagecoach.kernels.moe.tiles import most_tiles

_MOST_TOKENS = 65_535  # bound of the grid's second axis
# Pairs that a program sorts: it compares all of them, some at a time. Of very many pairs more, for
# one program goes through the counts of all blocks.
_SORT_BLOCK, _SORT_COMPARED = 256, 32
_MANY_PAIRS, _MANY_SORT_BLOCK = 16_384, 512
_COMBINE_BLOCK = 1024


class SortedPairs(NamedTuple):
    """Pairs in order of their experts, and their tiles; what is past an end holds anything."""

    pairs_P: Tensor  # int32, t * K + k
    offsets_E1: Tensor  # int32 [E + 1], where each expert's pairs begin
    tile_experts_M: Tensor  # int32
    tile_rows_M: Tensor  # int32, first place of each tile in `pairs_P`
    num_tiles_1: Tensor  # int32


def sort_pairs(ids_TK: Tensor, num_experts: int, block_m: int) -> SortedPairs:
    """Sort pairs by expert, leaving out those with id -1; an expert's keep their order."""
    num_pairs = ids_TK.numel()

    def empty(size: int) -> Tensor:
        return ids_TK.new_empty(size, dtype=torch.int32)

    num_tiles = most_tiles(num_pairs, num_experts, block_m)
    sorted_pairs = SortedPairs(
        empty(num_pairs), empty(num_experts + 1), empty(num_tiles), empty(num_tiles), empty(1)
    )
    pairs_P, *of_experts = sorted_pairs
    most_block = _SORT_BLOCK if num_pairs <= _MANY_PAIRS else _MANY_SORT_BLOCK
    block_p = min(most_block, max(64, triton.next_power_of_2(num_pairs)))
    block_e = max(64, triton.next_power_of_2(num_experts + 1))
    num_blocks = max(1, -(-num_pairs // block_p))
    counts_BE = empty(num_blocks * num_experts)
    options = launch_options(ids_TK)
    if num_blocks == 1:
        sort_pairs_kernel[(1,)](
            ids_TK,
            counts_BE,
            *sorted_pairs,
            num_pairs,
            num_experts,
            block_m,
            BLOCK_P=block_p,
            BLOCK_Q=_SORT_COMPARED,
            BLOCK_E=block_e,
            num_warps=8,
            **options,
        )
        return sorted_pairs
    count_pairs_kernel[(num_blocks,)](
        ids_TK,
        counts_BE,
        num_pairs,
        num_experts,
        BLOCK_P=block_p,
        BLOCK_E=block_e,
        num_warps=4,
        **options,
    )
    place_experts_kernel[(1,)](
        counts_BE,
        *of_experts,
        num_blocks,
        num_experts,
        block_m,
        BLOCK_B=8 if num_blocks <= 8 else 16,
        BLOCK_E=block_e,
        num_warps=16,
        **options,
    )
    place_pairs_kernel[(num_blocks,)](
        ids_TK,
        counts_BE,
        pairs_P,
        num_pairs,
        num_experts,
        BLOCK_P=block_p,
        BLOCK_Q=_SORT_COMPARED,
        num_warps=block_p // 32,
        **options,
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
