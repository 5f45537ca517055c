"""What a checkpoint may say of its quantisation, and which names patterns choose."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from stagecoach.config.keys import ConfigKeys
from stagecoach.config.model import load_model_config, parse_model_config
from stagecoach.config.quantization import (
    DEFAULT_EXCLUDE,
    NamePatterns,
    has_packed_experts,
    has_whole_groups,
)
from stagecoach.errors import ConfigError
from stagecoach.model.ledger import model_tensors
from stagecoach.model.tiny import TinyShape, kimi_k3_config, kimi_linear_config

pytestmark = pytest.mark.cpu

PUBLISHED: dict[str, Any] = kimi_k3_config(TinyShape())["text_config"]["quantization_config"]


def parsed(section: Any) -> bool:
    return has_packed_experts(ConfigKeys({"quantization_config": section}))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The published section with one key, as `config_groups.group_0.weights.num_bits`, set."""
    section = copy.deepcopy(PUBLISHED)
    *parents, key = path.split(".")
    inner = section
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    return section


def test_the_published_section_says_packed() -> None:
    assert parsed(PUBLISHED)
    assert parsed({"format": "mxfp4-pack-quantized"})
    assert parsed(changed("transform_config", {}))
    assert not parsed(None)
    assert parse_model_config(kimi_k3_config(TinyShape())).has_packed_experts
    assert not parse_model_config(kimi_linear_config(TinyShape())).has_packed_experts


def test_experts_that_are_ignored_are_not_packed() -> None:
    rules = [
        "re:.*experts.*",
        r"re:model\.layers\.\d+\.block_sparse_moe",
        "model.layers.1.block_sparse_moe.experts.0.w1",
        "language_model.model.layers.1.block_sparse_moe.experts.0.w1",
    ]
    for rule in rules:
        assert not parsed(changed("ignore", [rule])), rule
    assert parsed(changed("ignore", ["lm_head", "re:experts"]))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_method='modelopt', quant_algo='NVFP4' is not supported",
        ),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            r"quant_method='fp8', fmt='e4m3', weight_block_size=\[128, 128\] is not supported",
        ),
        (changed("format", "nvfp4-pack-quantized"), "format='nvfp4-pack-quantized' is not"),
        (changed("format", "float-quantized"), "format='float-quantized' is not supported"),
        (changed("format", None), "format=None is not supported"),
        (changed("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme={'num_bits': 8} is not"),
        (changed("config_groups.group_0.weights.num_bits", 8), r"weights\.num_bits=8 is not"),
        (changed("config_groups.group_0.weights.group_size", 16), r"group_size=16 is not .*\(32\)"),
        (changed("config_groups.group_0.weights.symmetric", False), "symmetric=False is not"),
        (
            changed("config_groups.group_0.input_activations", {"num_bits": 4}),
            r"group_0\.input_activations={'num_bits': 4} is not supported",
        ),
        (
            changed("config_groups.group_0.output_activations", {"num_bits": 8}),
            r"group_0\.output_activations={'num_bits': 8} is not supported",
        ),
        (
            changed("transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}),
            "transform_config={'config_groups': .* is not supported",
        ),
        (changed("config_groups.group_0", 3), r"config_groups\.group_0 is not an object"),
        (changed("config_groups.group_0.weights", [1]), r"group_0\.weights is not an object"),
        (changed("config_groups", [1]), "config_groups is not an object"),
        (changed("ignore", "lm_head"), "ignore must be a list of texts"),
        (changed("ignore", ["re:("]), r"'re:\(' is no regular expression"),
        ("mxfp4", "quantization_config is missing or not an object"),
    ],
)
def test_what_is_not_loaded_is_refused_by_name(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(section)


def test_a_section_at_the_root_counts_too() -> None:
    config = kimi_k3_config(TinyShape())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with pytest.raises(ConfigError, match="quant_method='modelopt'"):
        parse_model_config(config)


def test_a_file_of_modelopt_is_refused(tmp_path: Path) -> None:
    config = kimi_k3_config(TinyShape())
    del config["text_config"]["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not load_model_config(tmp_path).has_packed_experts
    other = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quant_algo='NVFP4' is not"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("width", "input_width", "tp_size", "is_whole"),
    [(3072, 3584, 8, True), (96, 64, 2, False), (96, 48, 1, False)],
)
def test_ranks_take_whole_groups(
    width: int, input_width: int, tp_size: int, is_whole: bool
) -> None:
    assert has_whole_groups(width, input_width, tp_size) == is_whole


def test_the_default_chooses_what_the_recipe_for_kimi_k3_does() -> None:
    """Of a layer of each kind; short names."""
    chosen: dict[str, set[str]] = {}
    for name in model_tensors(parse_model_config(kimi_k3_config(TinyShape()))):
        if NamePatterns().selects(name):
            *layer, rest = name.removeprefix("model.layers.").split(".", 1)
            chosen.setdefault("".join(layer), set()).add(rest.removesuffix(".weight"))
    kda = {f"self_attn.{part}_proj" for part in ("q", "k", "v", "g", "o")}
    mla = {
        *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"),
        *("self_attn.kv_b_proj", "self_attn.g_proj", "self_attn.o_proj"),
    }
    shared = {f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    dense = {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    scalars = {"self_attn.A_log", "self_attn.dt_bias"}  # no matrices
    assert chosen["0"] - scalars == kda | dense
    assert chosen["1"] - scalars == kda | shared
    assert chosen["3"] == mla | shared
    assert set(chosen) == {str(layer) for layer in range(9)}


def test_patterns_of_the_caller() -> None:
    patterns = NamePatterns(("*.o_proj.*", "language_model.model.layers.1.*"), ("*.2.*",))
    assert patterns.selects("model.layers.1.self_attn.q_proj.weight")
    assert patterns.selects("model.layers.0.self_attn.o_proj.weight")
    assert not patterns.selects("model.layers.2.self_attn.o_proj.weight")
    assert not patterns.selects("model.layers.0.self_attn.q_proj.weight")


_QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_a_pattern_without_a_tensor_is_refused() -> None:
    names, matrices = [_QUERY, "lm_head.weight"], [_QUERY]
    NamePatterns().check(names, matrices)
    NamePatterns(("*.q_proj.*",), (*DEFAULT_EXCLUDE, "lm_head.*")).check(names, matrices)
    with pytest.raises(ConfigError, match=r"-include: the pattern '\*\.q_porj\.\*' matches none"):
        NamePatterns(("*.q_porj.*",)).check(names, matrices)
    with pytest.raises(ConfigError, match=r"-exclude: the pattern 'lm_haed\.\*' matches none"):
        NamePatterns(exclude=("lm_haed.*",)).check(names, matrices)


def test_a_pattern_of_what_is_never_quantised_is_refused() -> None:
    message = r"include: the pattern 'lm_head\.\*' matches none of 1 matrices that can be quantised"
    with pytest.raises(ConfigError, match=message):
        NamePatterns(("*.q_proj.*", "lm_head.*"), ("*norm.*",)).check(
            [_QUERY, "lm_head.weight", "model.norm.weight"], [_QUERY]
        )


def test_patterns_that_choose_nothing_are_refused() -> None:
    message = r"include=\*\.q_\* and --online-quantization-exclude=\*q_proj\*: none of 1 matrices"
    with pytest.raises(ConfigError, match=message):
        NamePatterns(("*.q_*",), ("*q_proj*",)).check([_QUERY, "lm_head.weight"], [_QUERY])
