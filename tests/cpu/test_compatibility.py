"""The table of refused combinations: every rule has one example that it alone refuses."""

import copy
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from stagecoach import compatibility
from stagecoach.compatibility import FEATURES, LAYOUTS, TABLE, Rule
from stagecoach.config import EngineConfig, option
from stagecoach.errors import ConfigError
from stagecoach.model_config import ModelConfig, parse_model_config

_CONFIG: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 36,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 12,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


class Example(NamedTuple):
    """A combination that a rule refuses, and the nearest one that it lets pass."""

    refused: dict[str, Any]  # options
    allowed: dict[str, Any]
    model: Mapping[str, Any] = MappingProxyType({})  # keys of config.json that both have


_EXAMPLES = {
    "kda-heads": Example(
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2},
        {"linear_attn_config": {**_CONFIG["linear_attn_config"], "num_heads": 8}},
    ),
    "mla-heads": Example(
        {"tensor_parallel_size": 4}, {"tensor_parallel_size": 3}, {"num_attention_heads": 6}
    ),
    "dense-width": Example(
        {"tensor_parallel_size": 3}, {"tensor_parallel_size": 2}, {"intermediate_size": 64}
    ),
    "expert-width": Example(
        {"tensor_parallel_size": 4}, {"tensor_parallel_size": 2}, {"moe_intermediate_size": 18}
    ),
    "stages": Example({"pipeline_parallel_size": 5}, {"pipeline_parallel_size": 4}),
    "partition-length": Example(
        {"pipeline_parallel_size": 2, "pp_partition": (1, 2, 1)},
        {"pipeline_parallel_size": 3, "pp_partition": (1, 2, 1)},
    ),
    "partition-empty-stage": Example(
        {"pipeline_parallel_size": 2, "pp_partition": (4, 0)},
        {"pipeline_parallel_size": 2, "pp_partition": (3, 1)},
    ),
    "partition-sum": Example(
        {"pipeline_parallel_size": 2, "pp_partition": (3, 2)},
        {"pipeline_parallel_size": 2, "pp_partition": (2, 2)},
    ),
    "model-length": Example({"max_model_len": 257}, {"max_model_len": 256}),
    "pages": Example(
        {"max_model_len": 65, "block_size": 16, "num_gpu_blocks_override": 5},
        {"max_model_len": 65, "block_size": 16, "num_gpu_blocks_override": 6},
    ),
}


def _engine(options: dict[str, Any]) -> EngineConfig:
    return EngineConfig(model="unused", **options)


def _model(keys: Mapping[str, Any]) -> ModelConfig:
    return parse_model_config({**copy.deepcopy(_CONFIG), **keys})


def test_every_rule_has_an_example() -> None:
    assert list(_EXAMPLES) == [rule.name for rule in TABLE]


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.name)
def test_the_example_is_refused_by_its_own_rule_alone(rule: Rule) -> None:
    example = _EXAMPLES[rule.name]
    engine, model = _engine(example.refused), _model(example.model)
    assert [other.name for other in TABLE if other.is_refused(engine, model)] == [rule.name]


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.name)
def test_the_message_names_everything_that_clashes_with_its_values(rule: Rule) -> None:
    example = _EXAMPLES[rule.name]
    engine, model = _engine(example.refused), _model(example.model)
    with pytest.raises(ConfigError) as caught:
        compatibility.check(engine, model)
    text = str(caught.value)
    parts = rule.parts(engine, model)
    assert len(parts) >= 2
    for name, value in parts:
        assert f"{name}={value}" in text
    for name, value in example.refused.items():
        if option(name) in dict(parts):
            spelling = ",".join(map(str, value)) if isinstance(value, tuple) else value
            assert f"{option(name)}={spelling}" in text
    assert rule.requires in text and rule.reason in text


@pytest.mark.parametrize("name", _EXAMPLES)
def test_the_neighbour_passes(name: str) -> None:
    example = _EXAMPLES[name]
    compatibility.check(_engine(example.allowed), _model(example.model))


def test_parts_of_the_model_that_are_absent_refuse_nothing() -> None:
    """Without KDA, MoE or a dense MLP, their sizes do not matter."""
    all_mla = {
        **_CONFIG["linear_attn_config"],
        "kda_layers": [],
        "full_attn_layers": [1, 2, 3, 4],
        "num_heads": 7,
    }
    dense = _model({"linear_attn_config": all_mla, "num_experts": 0, "moe_intermediate_size": 7})
    compatibility.check(_engine({"tensor_parallel_size": 2}), dense)
    moe = _model({"first_k_dense_replace": 0, "intermediate_size": 7})
    compatibility.check(_engine({"tensor_parallel_size": 2}), moe)


def test_one_token_a_step_is_allowed() -> None:
    compatibility.check(_engine({"max_num_batched_tokens": 1}), _model({}))


def test_without_a_length_few_pages_are_allowed() -> None:
    """Requests that do not fit are then refused one by one."""
    compatibility.check(_engine({"num_gpu_blocks_override": 2}), _model({}))


def test_rules_limit_features_that_exist() -> None:
    for rule in TABLE:
        assert set(rule.features) <= set(FEATURES), rule.name
        assert rule.axes <= {"pp", "tp"}, rule.name
        assert bool(rule.features) == bool(rule.axes), rule.name


def test_a_cell_of_the_support_table_follows_from_the_rules() -> None:
    names = [name for name, _ in LAYOUTS]
    rows = {
        row.feature: dict(zip(names, row.cells, strict=True))
        for row in compatibility.support_table()
    }
    assert list(rows) == list(FEATURES)
    assert all(cells["pp 1, tp 1"] == "yes" for cells in rows.values())
    for rule in TABLE:
        for feature in rule.features:
            for name, above_one in LAYOUTS:
                assert (rule.requires in rows[feature][name]) == (rule.axes <= above_one)
    assert set(rows["sampling parameters"].values()) == {"yes"}


def test_markdown_has_a_line_for_every_feature_and_rule() -> None:
    lines = compatibility.render_markdown().splitlines()
    for first in (*FEATURES, *(f"`{rule.name}`" for rule in TABLE)):
        assert sum(line.startswith(f"| {first} |") for line in lines) == 1, first
    tables = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"\|", line)) for line in tables} == {len(LAYOUTS) + 2, 4}
