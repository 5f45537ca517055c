"""The search for the most even split, against trying all of them, and its refusals."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.config.draft import DraftConfig, parse_draft_config
from stagecoach.config.model import ModelConfig, parse_model_config
from stagecoach.costs.machine import H200
from stagecoach.costs.step_time import StepCosts, StepShape, Storage
from stagecoach.draft.tiny import TinyDraftShape, gqa_draft_config, mla_draft_config
from stagecoach.model.tiny import TinyShape, kimi_k3_config, kimi_linear_config
from stagecoach.pipeline.partition import (
    balance,
    estimate_layer_costs,
    partition,
    time_layer_costs,
)
from stagecoach.published import published_config

pytestmark = pytest.mark.cpu


def tiny_config(**sizes: object) -> ModelConfig:
    return parse_model_config(kimi_k3_config(TinyShape(**sizes)))  # type: ignore[arg-type]


def tiny_draft(config: Callable[[TinyDraftShape], dict[str, Any]]) -> DraftConfig:
    """Three taps and two layers, for hidden size 64 and a vocabulary of 512."""
    return parse_draft_config(config(TinyDraftShape()))


def split(config: ModelConfig, num_stages: int, **draft: Any) -> tuple[int, ...]:
    return partition(estimate_layer_costs(config, **draft), num_stages)


def group_sums(costs: list[int], counts: tuple[int, ...]) -> list[int]:
    sums, start = [], 0
    for count in counts:
        sums.append(sum(costs[start : start + count]))
        start += count
    return sums


def all_splits(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [
        tuple(end - start for start, end in zip((0, *cut), (*cut, num_layers), strict=True))
        for cut in cuts
    ]


@given(st.data())
def test_no_split_has_a_smaller_largest_stage(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    num_stages = data.draw(st.integers(1, len(costs)))
    counts = balance(costs, num_stages)
    assert len(counts) == num_stages and sum(counts) == len(costs) and min(counts) >= 1
    sums = [group_sums(costs, split) for split in all_splits(len(costs), num_stages)]
    best = min(map(max, sums))
    ours = group_sums(costs, counts)
    assert max(ours) == best
    reaching = [candidate for candidate in sums if max(candidate) == best]
    if any(candidate[-1] < best for candidate in reaching):
        assert ours[-1] < best, "a tie left the largest share on the last stage"


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 5))
def test_equal_layers_are_shared_out_with_the_remainder_in_front(
    num_layers: int, num_stages: int, cost: int
) -> None:
    num_stages = min(num_stages, num_layers)
    share, remainder = divmod(num_layers, num_stages)
    expected = (share + 1,) * remainder + (share,) * (num_stages - remainder)
    assert balance([cost] * num_layers, num_stages) == expected


def test_real_sizes_are_split_quickly() -> None:
    counts = balance([7 + layer % 3 for layer in range(93)], 16)
    assert sum(counts) == 93


def test_a_heavy_head_and_a_draft_move_layers_to_the_front() -> None:
    plain = tiny_config(vocab_size=512)
    heavy_head = replace(plain, vocab_size=20_000)
    assert split(heavy_head, 2)[1] < split(plain, 2)[1]
    assert split(plain, 2, draft=tiny_draft(mla_draft_config))[1] < split(plain, 2)[1]


def test_costs_follow_the_architecture() -> None:
    config = tiny_config()
    costs = estimate_layer_costs(config)
    assert len(costs.layers) == config.num_layers
    assert costs.last_stage == 64 + 512 * 64 and costs.first_stage == 64
    folded = costs.folded()
    assert folded[-1] == costs.layers[-1] + costs.last_stage
    assert folded[0] == costs.layers[0] + costs.first_stage
    more_experts_a_token = estimate_layer_costs(tiny_config(num_experts_per_token=4))
    assert more_experts_a_token.layers[0] == costs.layers[0], "layer 0 is dense"
    # Two more experts of three 32 x 32 matrices.
    assert more_experts_a_token.layers[1] - costs.layers[1] == 2 * 3 * 32 * 32


def test_a_draft_costs_its_context_row_and_one_row_of_a_block() -> None:
    config = tiny_config()

    def cost(draft: DraftConfig) -> int:
        with_draft, without = (estimate_layer_costs(config, item) for item in (draft, None))
        assert with_draft.layers == without.layers
        assert with_draft.first_stage == without.first_stage
        return with_draft.last_stage - without.last_stage

    mlp, head = 3 * 64 * 96, 512 * (64 + 16)
    # Rows cached by each of two layers: of the context, then of the block.
    row = 64 * (32 + 8)
    query, absorbed, output = 24 * (64 + 4 * 24), 32 * 4 * (16 + 16), 4 * 16 * 64
    context = 3 * 64 * 64 + 2 * row
    latent = context + 2 * (query + row + absorbed + output + mlp) + head
    assert cost(tiny_draft(mla_draft_config)) == latent
    row = 64 * 2 * 4 * 16
    context = 3 * 64 * 64 + 2 * row
    grouped = context + 2 * (2 * 64 * 4 * 16 + row + mlp) + head
    assert cost(tiny_draft(gqa_draft_config)) == grouped


def test_the_tokens_of_a_window_share_all_weights_but_the_experts() -> None:
    config = tiny_config()
    assert config.moe is not None
    one, two, many = (
        estimate_layer_costs(config, num_draft_tokens=num_drafts).layers
        for num_drafts in (0, 1, 99)
    )
    assert one[0] == two[0] == many[0], "layer 0 is dense"
    expert = 3 * 32 * 32
    assert two[1] - one[1] == config.moe.num_experts_per_token * expert
    num_others = config.moe.num_experts - config.moe.num_experts_per_token
    assert many[1] - one[1] == num_others * expert


def test_kimi_linear_has_costs_too() -> None:
    config = parse_model_config(kimi_linear_config(TinyShape(q_lora_rank=None)))
    assert sum(split(config, 3)) == config.num_layers


@pytest.mark.parametrize("override", [(5, 4), (5, 4, 1), (5, 0, 4), (10, -2, 1)])
def test_an_override_that_does_not_fit_never_gets_here(override: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="of 9 layers"):
        partition(estimate_layer_costs(tiny_config()), 3, override)


def test_an_override_that_fits_is_taken() -> None:
    assert partition(estimate_layer_costs(tiny_config()), 3, [1, 7, 1]) == (1, 7, 1)


def test_on_a_gpu_a_head_counts_for_less_beside_the_experts_of_many_requests() -> None:
    heavy_head = tiny_config(vocab_size=200_000, num_experts=64, expert_size=512, latent_size=512)
    costs = StepCosts(machine=H200, model=heavy_head)

    def head_share(num_windows: int) -> float:
        times = time_layer_costs(costs, StepShape(num_windows=num_windows, context=100))
        return times.last_stage / sum(times.layers)

    assert head_share(16) < head_share(1)


def test_on_a_gpu_a_head_counts_for_more_beside_packed_experts() -> None:
    config = parse_model_config(published_config("kimi-k3"))
    step = StepShape(num_windows=16, context=2048)

    def head_share(expert_bytes: float) -> float:
        costs = StepCosts(machine=H200, model=config, storage=Storage(expert=expert_bytes))
        times = time_layer_costs(costs, step)
        return times.last_stage / sum(times.layers)

    assert head_share(0.53125) > head_share(2.0)
