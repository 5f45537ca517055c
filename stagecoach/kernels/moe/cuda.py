"""Launches the choice of experts and their products on a GPU.

Every launch depends on sizes only, so that it can be captured and replayed with other tokens.

Dimensions: T tokens, H hidden size, E experts, K experts a token, P = T * K pairs,
L latent width, I intermediate width.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stagecoach.kernels.activation import Activation
from stagecoach.kernels.dependent_launch import launch_options
from stagecoach.kernels.linear import cuda as linear
from stagecoach.kernels.linear.blocks import whole_blocks
from stagecoach.kernels.moe.mxfp4_cuda import routed_experts as packed_experts
from stagecoach.kernels.moe.packed_experts import PackedExperts
from stagecoach.kernels.moe.pair_kernel import (
    pair_down_kernel,
    pair_down_whole_kernel,
    pair_gate_up_kernel,
)
from stagecoach.kernels.moe.route_kernel import route_kernel
from stagecoach.kernels.moe.routing import Router, Routing
from stagecoach.kernels.moe.shared import SharedExpert
from stagecoach.kernels.moe.sorted_pairs import (
    SortedPairs,
    activation_arguments,
    combine,
    sort_pairs,
)
from stagecoach.kernels.moe.tile_kernel import down_kernel, gate_up_kernel
from stagecoach.kernels.moe.tiles import (
    MOST_FEW_PAIRS,
    MOST_PAIR_INPUTS,
    PairCut,
    PairTiles,
    ProductTiles,
    SortedTiles,
    WholeCut,
    pair_tiles,
    sorted_tiles,
)
from stagecoach.kernels.quantization import ExpertWeight, Mxfp4Weight

_MOST_EXPERTS = 2048  # keys of the choice have so much room for an expert's number


def choose_experts(
    x_TH: Tensor, router: Router, routing: Routing, num_real_1: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights float32 [T, K] and ids int32 [T, K]; id -1 for tokens that are nobody's."""
    num_experts = len(router.weight_EH)
    if x_TH.dtype == torch.float32:
        sums_STQ = linear.float32_sums(x_TH, router.weight_EH)
    else:
        assert router.parts_QH is not None, "a router for bfloat16 needs its parts"
        sums_STQ = linear.float32_sums(x_TH, router.parts_QH)
    return route(sums_STQ, num_experts, router.bias_E, routing, num_real_1)


def route(
    logits_STQ: Tensor,
    num_experts: int,
    bias_E: Tensor | None,
    routing: Routing,
    num_real_1: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`reference.route` of logits that are sums over S and over the equal parts of Q.

    Args:
        logits_STQ: float32 [S, T, Q], contiguous, Q a multiple of E.
    """
    assert logits_STQ.dtype == torch.float32 and logits_STQ.is_contiguous()
    assert num_experts <= _MOST_EXPERTS, f"{num_experts} experts"
    assert routing.score_function in ("sigmoid", "softmax"), routing
    num_splits, num_tokens, num_logits = logits_STQ.shape
    num_chosen = routing.num_experts_per_token
    weights_TK = logits_STQ.new_empty((num_tokens, num_chosen))
    ids_TK = torch.empty_like(weights_TK, dtype=torch.int32)
    num_groups = routing.num_expert_groups
    has_groups = routing.topk_group < num_groups
    if not has_groups:
        num_groups = 1
    group_size = num_experts // num_groups
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits_STQ,
            bias_E,
            num_real_1,
            weights_TK,
            ids_TK,
            num_splits,
            logits_STQ.stride(0),
            num_logits,
            num_experts,
            group_size,
            num_groups,
            routing.topk_group,
            routing.scaling,
            NUM_CHOSEN=num_chosen,
            NUM_PARTS=num_logits // num_experts,
            IS_SIGMOID=routing.score_function == "sigmoid",
            HAS_BIAS=bias_E is not None,
            HAS_REAL=num_real_1 is not None,
            HAS_GROUPS=has_groups,
            RENORMALIZE=routing.renormalize,
            BLOCK_G=triton.next_power_of_2(num_groups),
            BLOCK_M=triton.next_power_of_2(group_size),
            BLOCK_K=triton.next_power_of_2(num_chosen),
            num_warps=1 if num_experts <= 512 else 2,
            **launch_options(logits_STQ),
        )
    return weights_TK, ids_TK


def routed_experts(
    x_TL: Tensor,
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    gate_up_E2IL: ExpertWeight,
    down_ELI: ExpertWeight,
    activation: Activation,
    shared: SharedExpert | None = None,
) -> Tensor:
    """The weighted sum of the experts' outputs plus the shared one's, [T, L] in `x_TL.dtype`."""
    if isinstance(gate_up_E2IL, Mxfp4Weight) and isinstance(down_ELI, Mxfp4Weight):
        assert shared is None, "packed experts run by themselves"
        packed = PackedExperts(gate_up_E2IL, down_ELI, activation)
        return packed_experts(x_TL, weights_TK, expert_ids_TK, packed)
    assert isinstance(gate_up_E2IL, Tensor) and isinstance(down_ELI, Tensor), "both are packed"
    experts = Experts(gate_up_E2IL, down_ELI, activation)
    num_pairs = expert_ids_TK.numel()
    if not num_pairs:
        return torch.empty_like(x_TL)
    latent = x_TL.shape[1]
    is_like_others = shared is None or shared.width == experts.width
    if num_pairs <= MOST_FEW_PAIRS and is_like_others and latent <= MOST_PAIR_INPUTS:
        num_tokens, num_chosen = expert_ids_TK.shape
        tiles = pair_tiles(num_tokens, num_chosen, latent, experts.width)
        return by_pairs(x_TL, weights_TK, expert_ids_TK, experts, shared, tiles)
    addend_TL = None if shared is None else shared(x_TL, activation)
    cut = sorted_tiles(num_pairs, len(down_ELI), is_float32=x_TL.dtype == torch.float32)
    return by_tiles(x_TL, weights_TK, expert_ids_TK, experts, addend_TL, cut)


class Experts(NamedTuple):
    """Weights of all experts, rows in one piece, and what stands between the products."""

    gate_up_E2IL: Tensor
    down_ELI: Tensor
    activation: Activation

    @property
    def width(self) -> int:
        return self.down_ELI.shape[2]

    def check(self, x_TL: Tensor) -> None:
        assert self.gate_up_E2IL.is_contiguous() and self.down_ELI.is_contiguous()
        assert x_TL.dtype == self.gate_up_E2IL.dtype == self.down_ELI.dtype != torch.float64
        assert x_TL.stride(1) == 1, "tokens lie in one piece"
        assert self.gate_up_E2IL.shape[1] * len(self.gate_up_E2IL) < 2**31

    @property
    def activation_arguments(self) -> dict[str, Any]:
        return activation_arguments(self.activation)


def by_pairs(
    x_TL: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    experts: Experts,
    shared: SharedExpert | None,
    tiles: PairTiles,
) -> Tensor:
    """`routed_experts` with a read of its expert for each pair."""
    experts.check(x_TL)
    if shared is not None:
        assert shared.width == experts.width, (shared.width, experts.width)
        for weight in shared:
            assert isinstance(weight, Tensor) and weight.is_contiguous(), "plain rows in one piece"
    product_PI = pair_gate_up(x_TL, ids_TK, experts, shared, tiles.gate_up)
    return pair_down(product_PI, weights_TK, ids_TK, experts, shared, tiles.down)


def pair_gate_up(
    x_TL: Tensor, ids_TK: Tensor, experts: Experts, shared: SharedExpert | None, cut: WholeCut
) -> Tensor:
    """activation(gate x, up x) by token and choice, the shared expert last: [T * (K + 1), I]."""
    num_tokens, num_chosen = ids_TK.shape
    num_inputs, width = x_TL.shape[1], experts.width
    num_shared = 0 if shared is None else 1
    product_PI = x_TL.new_empty((num_tokens * (num_chosen + num_shared), width))
    block_inputs, block_rest = whole_blocks(num_inputs)
    pair_gate_up_kernel[(len(product_PI), -(-width // cut.block_outputs))](
        x_TL,
        experts.gate_up_E2IL,
        None if shared is None else shared.gate_up_2JL,
        ids_TK,
        product_PI,
        width,
        num_inputs,
        x_TL.stride(0),
        NUM_CHOSEN=num_chosen,
        NUM_SHARED=num_shared,
        BLOCK_I=cut.block_outputs,
        BLOCK_L=block_inputs,
        BLOCK_REST=block_rest,
        num_warps=cut.num_warps,
        **launch_options(x_TL),
        **experts.activation_arguments,
    )
    return product_PI


def pair_down(
    product_PI: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    experts: Experts,
    shared: SharedExpert | None,
    cut: PairCut | WholeCut,
) -> Tensor:
    """The weighted sum of the experts' outputs, [T, L]; launched right behind `pair_gate_up`."""
    num_tokens, num_chosen = ids_TK.shape
    num_outputs, width = experts.down_ELI.shape[1:]
    out_TL = product_PI.new_empty((num_tokens, num_outputs))
    if isinstance(cut, WholeCut):
        assert cut.block_outputs == 1, cut
        pair_down_whole_kernel[(num_tokens, num_outputs)](
            product_PI,
            experts.down_ELI,
            None if shared is None else shared.down_LJ,
            weights_TK,
            ids_TK,
            out_TL,
            num_outputs,
            width,
            NUM_CHOSEN=num_chosen,
            NUM_SHARED=0 if shared is None else 1,
            BLOCK_C=triton.next_power_of_2(num_chosen),
            BLOCK_I=triton.next_power_of_2(width),
            num_warps=cut.num_warps,
            **launch_options(product_PI),
        )
        return out_TL
    pair_down_kernel[(num_tokens, -(-num_outputs // cut.block_outputs))](
        product_PI,
        experts.down_ELI,
        None if shared is None else shared.down_LJ,
        weights_TK,
        ids_TK,
        out_TL,
        num_outputs,
        width,
        NUM_CHOSEN=num_chosen,
        NUM_SHARED=0 if shared is None else 1,
        IS_EVEN=width % cut.block_inputs == 0,
        BLOCK_L=cut.block_outputs,
        BLOCK_I=cut.block_inputs,
        NUM_STAGES=cut.num_stages,
        num_warps=cut.num_warps,
    )
    return out_TL


def by_tiles(
    x_TL: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    experts: Experts,
    addend_TL: Tensor | None,
    tiles: SortedTiles,
) -> Tensor:
    """`routed_experts` with one read of an expert for all of its pairs, as far as caches go."""
    experts.check(x_TL)
    num_experts = len(experts.down_ELI)
    order = sort_pairs(ids_TK, num_experts, tiles.block_m)
    product_PI = gate_up(x_TL, ids_TK.shape[1], order, experts, tiles)
    out_PL = down(product_PI, order, experts, tiles)
    return combine(out_PL, weights_TK, ids_TK, addend_TL)


def gate_up(
    x_TL: Tensor, num_chosen: int, order: SortedPairs, experts: Experts, tiles: SortedTiles
) -> Tensor:
    """activation(gate x, up x), [P, I] in sorted order."""
    num_inputs, width = x_TL.shape[1], experts.width
    product_PI = x_TL.new_empty((len(order.pairs_P), width))
    weights, cut = _product(experts.gate_up_E2IL.flatten(0, 1), width, tiles.gate_up)
    grid = (len(order.tile_rows_M) * -(-width // tiles.gate_up.block_n),)
    gate_up_kernel[grid](
        x_TL,
        weights,
        product_PI,
        *order,
        width,
        num_inputs,
        x_TL.stride(0),
        NUM_CHOSEN=num_chosen,
        BLOCK_M=tiles.block_m,
        **cut,
        **experts.activation_arguments,
    )
    return product_PI


def down(product_PI: Tensor, order: SortedPairs, experts: Experts, tiles: SortedTiles) -> Tensor:
    """The experts' outputs, [P, L] by pair."""
    num_outputs, width = experts.down_ELI.shape[1:]
    out_PL = product_PI.new_empty((len(product_PI), num_outputs))
    weights, cut = _product(experts.down_ELI.flatten(0, 1), num_outputs, tiles.down)
    grid = (len(order.tile_rows_M) * -(-num_outputs // tiles.down.block_n),)
    down_kernel[grid](
        product_PI,
        weights,
        out_PL,
        *order,
        num_outputs,
        width,
        BLOCK_M=tiles.block_m,
        **cut,
    )
    return out_PL


def _product(
    weights_RK: Tensor, num_outputs: int, tiles: ProductTiles
) -> tuple[Any, dict[str, Any]]:
    """What a kernel loads rows of weights by, a pointer or a descriptor, and how it cuts them.

    Args:
        weights_RK: those of all experts, one behind the other.
        num_outputs: of an expert.
    """
    num_inputs = weights_RK.shape[1]
    # A descriptor's rows begin at multiples of 16 bytes, and a block of it is one expert's.
    has_descriptor = (
        tiles.has_descriptor
        and num_inputs * weights_RK.element_size() % 16 == 0
        and num_outputs % tiles.block_n == 0
    )
    cut = {
        "IS_EVEN": num_inputs % tiles.block_k == 0,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "HAS_DESCRIPTOR": has_descriptor,
        "HALVES": tiles.halves,
        "NUM_STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
    }
    if not has_descriptor:
        return weights_RK, cut
    return TensorDescriptor.from_tensor(weights_RK, [tiles.block_n, tiles.block_k]), cut
