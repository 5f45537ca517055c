"""The operators against the modules: together they read every weight once."""

from math import prod
from typing import Any

import pytest

from stagecoach.config.draft import load_draft_config
from stagecoach.config.model import ModelConfig, parse_model_config
from stagecoach.costs.operators import (
    OperatorKind,
    block_operators,
    context_operators,
    first_stage_operators,
    head_operators,
    last_stage_operators,
    layer_operators,
)
from stagecoach.costs.routing_skew import distinct_experts
from stagecoach.draft.load import draft_tensors
from stagecoach.model.ledger import model_tensors
from stagecoach.model.tiny import TinyShape, kimi_k3_config, kimi_linear_config
from stagecoach.published import DRAFTS, published_config, published_folder

pytestmark = pytest.mark.cpu


def weights_of(operators: Any, config: ModelConfig) -> int:
    """Values of all their weights; of a recurrence what stands for its state is no weight."""
    total = 0
    for item in operators:
        if item.kind is OperatorKind.EXPERTS:
            assert config.moe is not None
            total += config.moe.num_experts * item.reads
        elif item.kind is OperatorKind.RECURRENCE:
            total += 3 * item.heads * item.head_dim * config.kda.conv_kernel_size
        elif item.kind is not OperatorKind.LOOKUP:
            total += item.reads + item.whole_reads
    return total


@pytest.mark.parametrize(
    "root",
    [
        published_config("kimi-linear-48b"),
        kimi_k3_config(TinyShape(hidden_size=256, num_experts=4)),
        kimi_k3_config(TinyShape(hidden_size=256, q_lora_rank=None, latent_size=None)),
        kimi_linear_config(TinyShape(hidden_size=256, num_shared_experts=0)),
    ],
)
def test_layers_read_what_they_hold(root: dict[str, Any]) -> None:
    config = parse_model_config(root)
    held: dict[str, int] = {}
    for name, slot in model_tensors(config).items():
        parts = name.split(".")
        key = parts[2] if parts[1] == "layers" else "ends"
        held[key] = held.get(key, 0) + prod(slot.shape)
    for layer in range(config.num_layers):
        read = weights_of(layer_operators(config, layer), config)
        # Vectors are not listed.
        assert 0.98 <= read / held[str(layer)] <= 1, layer
    ends = weights_of((*first_stage_operators(config), *last_stage_operators(config)), config)
    assert ends + config.vocab_size * config.hidden_size == pytest.approx(held["ends"], rel=0.01)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_reads_what_it_holds(name: str) -> None:
    draft = load_draft_config(published_folder(name))
    held = sum(prod(slot.shape) for slot in draft_tensors(draft).values())
    operators = (*context_operators(draft), *block_operators(draft), *head_operators(draft))
    read = sum(item.reads + item.whole_reads for item in operators)
    head = draft.vocab_size * draft.hidden_size
    looked_up = draft.vocab_size * draft.markov_rank
    # Rows are made of context and of blocks by the same weights.
    rows = sum(item.whole_reads for item in context_operators(draft)[1:])
    assert read - head - rows == pytest.approx(held - looked_up, rel=0.001)


@pytest.mark.parametrize(("num_tokens", "counted"), [(1, 8), (8, 54.2), (64, 192), (256, 247.3)])
def test_experts_are_those_that_were_counted(num_tokens: int, counted: float) -> None:
    assert distinct_experts(num_tokens, 256, 8) == pytest.approx(counted, rel=1e-3)


def test_experts_of_other_models_stay_in_bounds_and_grow() -> None:
    numbers = [distinct_experts(2**power, 896, 16) for power in range(14)]
    assert numbers[0] == pytest.approx(16)
    assert numbers == sorted(numbers) and numbers[-1] <= 896
    assert distinct_experts(0, 896, 16) == 0
    assert distinct_experts(5, 4, 4) == 4
