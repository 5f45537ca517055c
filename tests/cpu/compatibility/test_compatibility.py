"""The table of refused combinations: every rule has one example that it alone refuses."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from stagecoach.compatibility import rules, support_table
from stagecoach.compatibility.rules import TABLE, Combination, Rule
from stagecoach.compatibility.support_table import FEATURES, LAYOUTS
from stagecoach.config.draft import DraftConfig, DraftGqaConfig, DraftMlaConfig
from stagecoach.config.engine import EngineConfig, SpeculativeConfig, option, speculation_key
from stagecoach.config.model import Taps, parse_model_config
from stagecoach.errors import ConfigError

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


_MLA = DraftMlaConfig(
    num_heads=12,
    q_lora_rank=None,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
_DRAFT: dict[str, Any] = {
    "taps": Taps((-1, 1, 3)),
    "hidden_size": 48,
    "vocab_size": 131,
    "num_layers": 1,
    "attention": _MLA,
    "rope": None,
    "is_causal": False,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "has_tap_norms": False,
    "markov_rank": 4,
    "has_confidence_head": False,
    "confidence_reads_markov": False,
    "confidence_temperatures": (),
    "mask_token_id": 130,
    "block_length": 7,
}
_NONE: Mapping[str, Any] = MappingProxyType({})


class Example(NamedTuple):
    """A combination that a rule refuses, and the nearest one that it lets pass.

    With facts or keys of a draft it speculates.
    """

    refused: Mapping[str, Any] = _NONE  # options
    allowed: Mapping[str, Any] = _NONE
    model: Mapping[str, Any] = _NONE  # keys of config.json that both have
    draft: Mapping[str, Any] | None = None  # fields of DraftConfig that both have
    refused_draft: Mapping[str, Any] = _NONE  # fields that only the refused one has
    refused_keys: Mapping[str, Any] = _NONE  # of --speculative-config
    allowed_keys: Mapping[str, Any] = _NONE


def _draft_example(**refused: Any) -> Example:
    """The other draft, _DRAFT, is allowed."""
    return Example(draft={}, refused_draft=refused)


def _key_example(refused: dict[str, Any], allowed: dict[str, Any]) -> Example:
    return Example(draft={}, refused_keys=refused, allowed_keys=allowed)


def _cache_example(**options: Any) -> Example:
    return Example({**options, "enable_prefix_caching": False}, options)


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
    "draft-heads": Example(
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2},
        draft={"attention": dataclasses.replace(_MLA, num_heads=4)},
    ),
    "draft-kv-heads": Example(
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2},
        draft={"attention": DraftGqaConfig(num_heads=12, num_kv_heads=2, head_dim=8)},
    ),
    "draft-width": Example(
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2},
        draft={"intermediate_size": 64},
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
    "draft-hidden-size": _draft_example(hidden_size=64),
    "draft-vocabulary": _draft_example(vocab_size=132),
    "draft-mask": _draft_example(mask_token_id=131),
    "draft-taps": _draft_example(taps=Taps((-1, 1, 4))),
    "draft-block": _key_example({"num_speculative_tokens": 8}, {"num_speculative_tokens": 7}),
    "synthetic-schedule": _key_example(
        {"synthetic_acceptance_length": 2.5, "confidence_schedule": True},
        {"synthetic_acceptance_length": 2.5, "confidence_schedule": False},
    ),
    "synthetic-watchdog": _key_example(
        {"synthetic_acceptance_length": 2.5, "watchdog": True},
        {"synthetic_acceptance_length": 2.5},
    ),
    "synthetic-acceptance": _key_example(
        {"synthetic_acceptance_length": 2.5, "acceptance": "rejection"},
        {"acceptance": "rejection", "watchdog": True, "confidence_schedule": True},
    ),
    "hosts-stages": Example({"nnodes": 2}, {"nnodes": 2, "pipeline_parallel_size": 2}),
    "hosts-rank": Example(
        {"nnodes": 2, "node_rank": 2, "pipeline_parallel_size": 2},
        {"nnodes": 2, "node_rank": 1, "pipeline_parallel_size": 2},
    ),
    "hosts-launcher": Example(
        {"launcher": "torchrun", "nnodes": 2, "pipeline_parallel_size": 2},
        {"launcher": "torchrun", "pipeline_parallel_size": 2},
    ),
    "hosts-threads": Example(
        {"launcher": "ray", "distributed_executor_backend": "uni"}, {"launcher": "ray"}
    ),
    "expert-groups": Example(
        {"mxfp4_experts": "packed", "tensor_parallel_size": 2},
        {"mxfp4_experts": "packed", "tensor_parallel_size": 3},
        {
            "moe_intermediate_size": 96,
            "routed_expert_hidden_size": 64,
            "quantization_config": {"format": "mxfp4-pack-quantized"},
        },
    ),
    "packed-experts": Example({"mxfp4_experts": "packed"}, {"mxfp4_experts": "decoded"}),
    "online-patterns": Example(
        {"online_quantization_include": ("*.self_attn.*",)},
        {
            "online_quantization": "ptpc_fp8",
            "online_quantization_include": ("*.self_attn.*",),
        },
    ),
    "draft-online": Example(
        {},
        {"online_quantization": "ptpc_fp8"},
        draft={},
        refused_keys={"online_quantization": "follow"},
        allowed_keys={"online_quantization": "follow"},
    ),
    "recover-threads": Example(
        {"recover": True, "distributed_executor_backend": "uni"}, {"recover": True}
    ),
    "device-float64": Example({"device": "cuda", "dtype": "float64"}, {"device": "cuda"}),
    "capture-sizes": Example(
        {"cudagraph_capture_sizes": (16, 32), "max_num_seqs": 8},
        {"cudagraph_capture_sizes": (8, 32), "max_num_seqs": 8},
    ),
    "cache-interval": _cache_example(state_checkpoint_interval=0),
    "cache-slots": _cache_example(max_state_checkpoints=0),
    "cache-host-tier": _cache_example(kv_offloading_size=0.5),
    "cache-verify": _cache_example(verify_cache=0.1),
}


def _combination(
    options: Mapping[str, Any],
    model: Mapping[str, Any] = _NONE,
    draft: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] = _NONE,
) -> Combination:
    speculative = None if draft is None else SpeculativeConfig(model="a-draft", **keys)
    return Combination(
        EngineConfig(model="unused", speculative_config=speculative, **options),
        parse_model_config({**copy.deepcopy(_CONFIG), **model}),
        None if draft is None else DraftConfig(**{**_DRAFT, **draft}),
    )


def _refused(example: Example) -> Combination:
    draft = None if example.draft is None else {**example.draft, **example.refused_draft}
    return _combination(example.refused, example.model, draft, example.refused_keys)


def _allowed(example: Example) -> Combination:
    return _combination(example.allowed, example.model, example.draft, example.allowed_keys)


def test_every_rule_has_an_example() -> None:
    assert list(_EXAMPLES) == [rule.name for rule in TABLE]


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.name)
def test_the_example_is_refused_by_its_own_rule_alone(rule: Rule) -> None:
    asked = _refused(_EXAMPLES[rule.name])
    assert [other.name for other in TABLE if other.is_refused(asked)] == [rule.name]


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.name)
def test_the_message_names_everything_that_clashes_with_its_values(rule: Rule) -> None:
    example = _EXAMPLES[rule.name]
    asked = _refused(example)
    with pytest.raises(ConfigError) as caught:
        rules.check(asked)
    text = str(caught.value)
    parts = rule.parts(asked)
    assert len(parts) >= 2
    for name, value in parts:
        assert f"{name}={value}" in text
    for name, value in example.refused.items():
        if option(name) in dict(parts):
            spelling = ",".join(map(str, value)) if isinstance(value, tuple) else value
            assert f"{option(name)}={spelling}" in text
    for key, value in example.refused_keys.items():
        assert f"{speculation_key(key)}={str(value).lower()}" in text
    for value in example.refused_draft.values():
        spelling = ",".join(map(str, value.layers)) if isinstance(value, Taps) else value
        assert f"={spelling} " in text
        assert f"{speculation_key('model')}=a-draft" in text
    assert rule.requires in text and rule.reason in text


@pytest.mark.parametrize("name", _EXAMPLES)
def test_the_neighbour_passes(name: str) -> None:
    rules.check(_allowed(_EXAMPLES[name]))


def test_parts_of_the_model_that_are_absent_refuse_nothing() -> None:
    """Without KDA, MoE or a dense MLP, their sizes do not matter."""
    all_mla = {
        **_CONFIG["linear_attn_config"],
        "kda_layers": [],
        "full_attn_layers": [1, 2, 3, 4],
        "num_heads": 7,
    }
    dense = {"linear_attn_config": all_mla, "num_experts": 0, "moe_intermediate_size": 7}
    rules.check(_combination({"tensor_parallel_size": 2}, dense))
    moe = {"first_k_dense_replace": 0, "intermediate_size": 7}
    rules.check(_combination({"tensor_parallel_size": 2}, moe))


def test_the_cache_is_switched_off_without_naming_its_options() -> None:
    defaults = {"state_checkpoint_interval": 512, "max_state_checkpoints": None}
    rules.check(_combination({"enable_prefix_caching": False, **defaults}))


def test_a_draft_that_says_no_block_length_takes_any_k() -> None:
    rules.check(_combination({}, draft={"block_length": None}, keys={"num_speculative_tokens": 16}))


def test_taps_below_the_embedding_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"target_layer_ids=-2,0 and num_hidden_layers=4"):
        rules.check(_combination({}, draft={"taps": Taps((-2, 0))}))


def test_a_schedule_needs_no_confidence_head() -> None:
    rules.check(_combination({}, draft={}, keys={"confidence_schedule": True}))


def test_one_token_a_step_is_allowed() -> None:
    rules.check(_combination({"max_num_batched_tokens": 1}, draft={}))


def test_without_a_length_few_pages_are_allowed() -> None:
    """Requests that do not fit are then refused one by one."""
    rules.check(_combination({"num_gpu_blocks_override": 2}))


def test_rules_limit_features_that_exist() -> None:
    for rule in TABLE:
        assert set(rule.features) <= set(FEATURES), rule.name
        assert rule.axes <= {"pp", "tp"}, rule.name
        assert bool(rule.features) == bool(rule.axes), rule.name


def test_a_cell_of_the_support_table_follows_from_the_rules() -> None:
    names = [name for name, _ in LAYOUTS]
    rows = {
        row.feature: dict(zip(names, row.cells, strict=True))
        for row in support_table.support_table()
    }
    assert list(rows) == list(FEATURES)
    assert all(cells["pp 1, tp 1"] == "yes" for cells in rows.values())
    for rule in TABLE:
        for feature in rule.features:
            for name, above_one in LAYOUTS:
                assert (rule.requires in rows[feature][name]) == (rule.axes <= above_one)
    assert set(rows["sampling parameters"].values()) == {"yes"}


def test_markdown_has_a_line_for_every_feature_and_rule() -> None:
    lines = support_table.render_markdown().splitlines()
    for first in (*FEATURES, *(f"`{rule.name}`" for rule in TABLE)):
        assert sum(line.startswith(f"| {first} |") for line in lines) == 1, first
    tables = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"\|", line)) for line in tables} == {len(LAYOUTS) + 2, 4}
