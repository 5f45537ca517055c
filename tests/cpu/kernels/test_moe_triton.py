"""The GPU's choice of experts and their products through Triton's interpreter."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stagecoach.kernels.activation import Activation
from stagecoach.kernels.moe import Routing, SharedExpert, cuda, reference, routed_experts
from stagecoach.kernels.moe.tiles import (
    PairCut,
    PairTiles,
    ProductTiles,
    SortedTiles,
    WholeCut,
    most_tiles,
)

SILU = Activation("silu")
SITU = Activation("situ", 4.0, 25.0)


@pytest.mark.parametrize(
    ("num_experts", "routing"),
    [
        (16, Routing(4, "sigmoid", True, 2.5)),
        (13, Routing(3, "softmax", False, 1.0)),
        (12, Routing(5, "sigmoid", True, 1.0, 4, 2)),
        (6, Routing(3, "softmax", True, 3.0, 6, 2)),
    ],
)
def test_choice_is_the_references(num_experts: int, routing: Routing) -> None:
    logits_TE = torch.randn(7, num_experts)
    logits_TE[2] = 0.5  # ties
    bias_E = torch.randn(num_experts) * 0.2
    bias_E[2:5] = 0.1
    expected_TK, expected_ids_TK = reference.route(logits_TE, bias_E, *routing)
    # Three parts of which the last two are small, in two addends.
    small_TQ = torch.randn(2, 7, num_experts) * 1e-3
    small_TQ[:, 2] = 0
    parts_TQ = torch.cat([logits_TE - small_TQ.sum(0), *small_TQ], dim=1)
    share_TQ = torch.rand(7, 1)
    sums_STQ = torch.stack([parts_TQ * share_TQ, parts_TQ * (1 - share_TQ)])
    num_real_1 = torch.tensor([5], dtype=torch.int32)
    weights_TK, ids_TK = cuda.route(sums_STQ, num_experts, bias_E, routing, num_real_1)
    assert ids_TK.dtype == torch.int32
    assert torch.equal(ids_TK[:5].long(), expected_ids_TK[:5])
    torch.testing.assert_close(weights_TK[:5], expected_TK[:5], rtol=2e-6, atol=1e-7)
    assert (ids_TK[5:] == -1).all() and (weights_TK[5:] == 0).all()
    assert torch.equal(cuda.route(sums_STQ, num_experts, bias_E, routing, None)[1][:5], ids_TK[:5])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits_TE = torch.tensor([[math.nan] * 6, [math.inf, -math.inf, math.nan, 0, 1, 2]])
    for routing in (Routing(4, "sigmoid", True, 1.0), Routing(4, "softmax", True, 1.0)):
        ids_TK = cuda.route(logits_TE[None], 6, None, routing, None)[1]
        for row in ids_TK.tolist():
            assert len(set(row)) == 4 and set(row) <= set(range(6))


def experts_of(num_experts: int, latent: int, width: int, activation: Activation) -> cuda.Experts:
    gate_up = torch.randn(num_experts, 2 * width, latent) / math.sqrt(latent)
    down = torch.randn(num_experts, latent, width) / math.sqrt(width)
    return cuda.Experts(gate_up, down, activation)


def choices(num_tokens: int, num_chosen: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Distinct experts of each token; the last expert gets none, the first many."""
    scores = torch.rand(num_tokens, num_experts)
    scores[:, -1] = -1
    scores[::2, 0] = 2
    ids_TK = scores.topk(num_chosen).indices.int()
    return torch.rand(num_tokens, num_chosen), ids_TK


CUTS = [
    PairTiles(WholeCut(8, 4), PairCut(16, 8, 4, 3)),
    PairTiles(WholeCut(4, 4), WholeCut(1, 4)),
    SortedTiles(16, ProductTiles(16, 16, 4, 2), ProductTiles(16, 16, 4, 2)),
    SortedTiles(32, ProductTiles(16, 16, 4, 2, True, True), ProductTiles(16, 16, 4, 2, True, True)),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("tiles", CUTS)
@pytest.mark.parametrize(
    ("num_tokens", "latent", "width", "activation"), [(3, 24, 20, SILU), (17, 32, 12, SITU)]
)
def test_experts_are_the_references(
    tiles: PairTiles | SortedTiles,
    num_tokens: int,
    latent: int,
    width: int,
    activation: Activation,
) -> None:
    if isinstance(tiles, PairTiles):
        num_tokens = min(num_tokens, 4)
    experts = experts_of(7, latent, width, activation)
    shared = SharedExpert(torch.randn(2 * width, latent) / 5, torch.randn(latent, width) / 4)
    x_TL = torch.randn(num_tokens, latent)
    weights_TK, ids_TK = choices(num_tokens, 3, 7)
    routed_TL = reference.routed_experts(x_TL, weights_TK, ids_TK.long(), *experts)
    shared_TL = shared(x_TL, activation)
    # Tokens that are nobody's, and all that only they have.
    x_TL = torch.cat([x_TL, torch.full((2, latent), math.nan)])
    weights_TK = torch.cat([weights_TK, torch.zeros(2, 3)])
    ids_TK = torch.cat([ids_TK, torch.full((2, 3), -1, dtype=torch.int32)])
    experts.gate_up_E2IL[-1] = math.nan
    experts.down_ELI[-1] = math.nan
    for added in (False, True):
        if isinstance(tiles, PairTiles):
            more = shared if added else None
            out_TL = cuda.by_pairs(x_TL, weights_TK, ids_TK, experts, more, tiles)
        else:
            addend_TL = None
            if added:  # rows with a stride
                addend_TL = torch.full((num_tokens + 2, 2 * latent), math.nan)[:, :latent]
                addend_TL[:-2] = shared_TL
            out_TL = cuda.by_tiles(x_TL, weights_TK, ids_TK, experts, addend_TL, tiles)
        expected_TL = routed_TL + shared_TL if added else routed_TL
        torch.testing.assert_close(out_TL[:-2], expected_TL, rtol=2e-5, atol=2e-5)
        assert (out_TL[-2:] == 0).all()


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_few_tokens_have_the_shared_expert_too(num_tokens: int) -> None:
    experts = experts_of(3, 20, 4, SILU)
    shared = SharedExpert(torch.randn(8, 20), torch.randn(20, 4))
    x_TL = torch.randn(num_tokens, 20)
    weights_TK, ids_TK = choices(num_tokens, 2, 3)
    expected_TL = routed_experts(x_TL, weights_TK, ids_TK.long(), *experts, shared)
    out_TL = cuda.routed_experts(x_TL, weights_TK, ids_TK, *experts, shared)
    torch.testing.assert_close(out_TL, expected_TL, rtol=2e-5, atol=2e-5)


def test_a_shared_expert_of_another_width_is_added() -> None:
    experts = experts_of(5, 24, 8, SITU)
    shared = SharedExpert(torch.randn(20, 24), torch.randn(24, 10))
    x_TL = torch.randn(2, 24)
    weights_TK, ids_TK = choices(2, 2, 5)
    expected_TL = routed_experts(x_TL, weights_TK, ids_TK.long(), *experts, shared)
    out_TL = cuda.routed_experts(x_TL, weights_TK, ids_TK, *experts, shared)
    torch.testing.assert_close(out_TL, expected_TL, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_tokens", [30, 1400])
def test_pairs_are_sorted_and_cut_into_tiles(num_tokens: int) -> None:
    """A block of pairs, which one program sorts, and several."""
    num_experts, block_m = 5, 16
    ids_TK = choices(num_tokens, 3, num_experts)[1]
    ids_TK[-3:] = -1
    order = cuda.sort_pairs(ids_TK, num_experts, block_m)
    flat_P = ids_TK.flatten()
    expected_P = torch.cat([(flat_P == expert).nonzero()[:, 0] for expert in range(num_experts)])
    assert torch.equal(order.pairs_P[: len(expected_P)].long(), expected_P)
    counts = [int((flat_P == expert).sum()) for expert in range(num_experts)]
    assert order.offsets_E1.diff().tolist() == counts
    tiles = [
        (expert, int(order.offsets_E1[expert]) + row)
        for expert, count in enumerate(counts)
        for row in range(0, count, block_m)
    ]
    num_tiles = int(order.num_tiles_1)
    assert num_tiles <= most_tiles(ids_TK.numel(), num_experts, block_m) == len(order.tile_rows_M)
    found = zip(order.tile_experts_M.tolist(), order.tile_rows_M.tolist(), strict=True)
    assert list(found)[:num_tiles] == tiles
