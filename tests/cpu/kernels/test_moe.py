"""Routing and routed experts against published code and plain sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as hf
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

from stagecoach.kernels.activation import silu_and_mul
from stagecoach.kernels.moe import route, routed_experts


def route_plainly(logits_TE: Tensor, bias_E: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    return route(logits_TE, bias_E, count, "sigmoid", True, 1.0, 1, 1)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (4, 1)])
def test_route_equals_published_router(groups: tuple[int, int]) -> None:
    """transformers KimiLinearTopkRouter in float32: the same experts, weights within 2.4e-7."""
    num_groups, topk_group = groups
    config = KimiLinearConfig(
        hidden_size=24,
        num_local_experts=16,
        num_experts_per_tok=4,
        n_group=num_groups,
        topk_group=topk_group,
        routed_scaling_factor=2.5,
    )
    torch.manual_seed(0)
    router = hf.KimiLinearTopkRouter(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_(std=0.3)
    with torch.no_grad():
        logits_TE, expected_TK, expected_ids_TK = router(torch.randn(60, 24))
    weights_TK, ids_TK = route(
        logits_TE, router.e_score_correction_bias, 4, "sigmoid", True, 2.5, num_groups, topk_group
    )
    assert ids_TK.dtype == torch.int64
    order, expected_order = ids_TK.argsort(1), expected_ids_TK.argsort(1)
    assert torch.equal(ids_TK.gather(1, order), expected_ids_TK.gather(1, expected_order))
    torch.testing.assert_close(
        weights_TK.gather(1, order), expected_TK.gather(1, expected_order), rtol=1e-6, atol=1e-7
    )


def test_bias_only_chooses() -> None:
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    bias_E = torch.tensor([-9.0, 0.0, 0.0, 9.0], dtype=torch.float64)
    weights_TK, ids_TK = route(logits_TE, bias_E, 2, "sigmoid", False, 1.0, 1, 1)
    assert ids_TK.tolist() == [[3, 1]]
    assert torch.equal(weights_TK, logits_TE.sigmoid()[:, [3, 1]])
    weights_TK, ids_TK = route(logits_TE, None, 2, "softmax", False, 3.0, 1, 1)
    assert ids_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(weights_TK, 3 * logits_TE.softmax(1)[:, :2], rtol=1e-15, atol=0)


@pytest.mark.parametrize("num_experts", [5, 16, 300])
def test_ties_go_to_the_lowest_index(num_experts: int) -> None:
    logits_TE = torch.zeros(3, num_experts)
    logits_TE[1, 3] = 1.0
    logits_TE[2, 0] = -1.0
    ids_TK = route_plainly(logits_TE, None, 3)[1]
    assert ids_TK.tolist() == [[0, 1, 2], [3, 0, 1], [1, 2, 3]]
    grouped = route(torch.zeros(1, 12), None, 3, "sigmoid", True, 1.0, 4, 2)[1]
    assert grouped.tolist() == [[0, 1, 2]]


def test_route_computes_in_the_accumulate_type() -> None:
    logits_TE = torch.randn(9, 16).bfloat16()
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        weights_TK, _ = route_plainly(logits_TE.to(dtype), torch.zeros(16), 2)
        assert weights_TK.dtype == expected
        torch.testing.assert_close(weights_TK.sum(1), torch.ones(9, dtype=expected))


def make_experts(num_experts: int, latent: int, intermediate: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_experts, 2 * intermediate, latent), (num_experts, latent, intermediate)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) / shape[2] ** 0.5
        for shape in shapes
    ]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 8, 50])
def test_experts_equal_published_experts(num_tokens: int) -> None:
    """transformers KimiLinearExperts, eager, float64: 2e-16."""
    config = KimiLinearConfig(
        hidden_size=12, num_local_experts=8, moe_intermediate_size=10, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    experts = hf.KimiLinearExperts(config).double()
    gate_up_E2IL, down_ELI = make_experts(8, 12, 10, seed=1)
    experts.gate_up_proj.data, experts.down_proj.data = gate_up_E2IL, down_ELI
    x_TL = torch.randn(num_tokens, 12, dtype=torch.float64)
    weights_TK, ids_TK = route_plainly(torch.randn(num_tokens, 8, dtype=torch.float64), None, 3)
    with torch.no_grad():
        expected_TL = experts(x_TL, ids_TK, weights_TK)
    before = x_TL.clone(), weights_TK.clone()
    y_TL = routed_experts(x_TL, weights_TK, ids_TK, gate_up_E2IL, down_ELI, silu_and_mul)
    torch.testing.assert_close(y_TL, expected_TL, rtol=1e-12, atol=1e-13)
    assert torch.equal(x_TL, before[0]) and torch.equal(weights_TK, before[1])


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(1, 40),
    num_experts=st.sampled_from([2, 5, 16]),
    num_chosen=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_neighbours_never_change_a_token(
    num_tokens: int, num_experts: int, num_chosen: int, seed: int
) -> None:
    """A token alone equals the token in a batch with a NaN neighbour.

    float64: required 1e-13, reached 4e-15.

    Experts that nobody chose may hold anything.
    """
    gate_up_E2IL, down_ELI = make_experts(num_experts, 6, 4, seed)
    generator = torch.Generator().manual_seed(seed)
    x_TL = torch.randn(num_tokens, 6, generator=generator, dtype=torch.float64)
    logits_TE = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    weights_TK, ids_TK = route_plainly(logits_TE, None, num_chosen)
    unused = [
        expert for expert in range(num_experts) if expert not in set(ids_TK.flatten().tolist())
    ]
    gate_up_E2IL[unused] = float("nan")
    if num_tokens > 1:
        x_TL[-1] = float("nan")
    y_TL = routed_experts(x_TL, weights_TK, ids_TK, gate_up_E2IL, down_ELI, silu_and_mul)
    for token in range(max(1, num_tokens - 1)):
        now = slice(token, token + 1)
        alone_1L = routed_experts(
            x_TL[now], weights_TK[now], ids_TK[now], gate_up_E2IL, down_ELI, silu_and_mul
        )
        torch.testing.assert_close(y_TL[now], alone_1L, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("num_tokens", [1, 3, 64])
def test_half_precision_sums_are_wide(num_tokens: int) -> None:
    """bfloat16 experts, float32 weighted sum: 9e-3 from float64 on the same values."""
    gate_up_E2IL, down_ELI = (w.bfloat16() for w in make_experts(4, 16, 8, seed=2))
    x_TL = torch.randn(num_tokens, 16).bfloat16()
    weights_TK, ids_TK = route_plainly(torch.randn(num_tokens, 4), None, 2)
    y_TL = routed_experts(x_TL, weights_TK, ids_TK, gate_up_E2IL, down_ELI, silu_and_mul)
    exact_TL = routed_experts(
        x_TL.double(), weights_TK.double(), ids_TK, gate_up_E2IL.double(), down_ELI.double(),
        silu_and_mul,
    )  # fmt: skip
    assert y_TL.dtype == torch.bfloat16
    torch.testing.assert_close(y_TL.double(), exact_TL, rtol=3e-2, atol=3e-2)
