"""config.json as published, and every value that is refused, by the name of its key."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stagecoach.config.model import (
    LayerKind,
    _apply_overrides,
    load_model_config,
    parse_model_config,
)
from stagecoach.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.cpu

MLA_LAYERS = [*range(4, 93, 4), 93]


def published_k3() -> dict[str, Any]:
    """The values of the published Kimi-K3 `config.json`."""
    return {
        "model_type": "kimi_k3",
        "eos_token_id": 163586,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "kimi_linear",
            "vocab_size": 163840,
            "hidden_size": 7168,
            "num_hidden_layers": 93,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "intermediate_size": 33792,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584,
            "latent_moe_use_norm": True,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "topk_method": "noaux_tc",
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "attn_res_block_size": 12,
            "num_nextn_predict_layers": 0,
            "linear_attn_config": {
                "full_attn_layers": MLA_LAYERS,
                "kda_layers": [layer for layer in range(1, 94) if layer not in MLA_LAYERS],
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "use_full_rank_gate": True,
            },
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "mxfp4-pack-quantized",
            },
        },
    }


def published_kimi_linear() -> dict[str, Any]:
    """The values of the published Kimi-Linear-48B-A3B `config.json`."""
    mla_layers = [4, 8, 12, 16, 20, 24, 27]
    return {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "intermediate_size": 9216,
        "hidden_act": "silu",
        "model_max_length": 1048576,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "dtype": "bfloat16",
        "linear_attn_config": {
            "full_attn_layers": mla_layers,
            "kda_layers": [layer for layer in range(1, 28) if layer not in mla_layers],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    }


def test_published_kimi_k3() -> None:
    config = parse_model_config(published_k3())
    mla = [layer for layer, kind in enumerate(config.layer_kinds) if kind is LayerKind.MLA]
    assert mla == [*range(3, 92, 4), 92] and len(mla) == 24
    assert config.is_moe_layer == (False, *[True] * 92)
    assert config.mla.cache_row_width == 576
    assert math.isclose(config.mla.softmax_scale, 192**-0.5)
    assert config.mla.latent_norm_eps == 1e-6 and config.rms_norm_eps == 1e-5
    assert config.kda.gate_lower_bound == -5.0 and config.kda.num_conv_rows == 3
    assert config.moe is not None and config.moe.shared_intermediate_size == 6144
    assert config.moe.latent_size == 3584 and config.moe.has_latent_norm
    assert (config.activation, config.situ_beta, config.situ_linear_beta) == ("situ", 4.0, 25.0)
    assert config.eos_token_ids == (163586,) and config.tensor_prefix == "language_model."


def test_blocks_seen_at_stage_boundaries() -> None:
    """Widths of the bank by first layer: 1..12 -> 1, 13..24 -> 2, ... 85..92 -> 8."""
    config = parse_model_config(published_k3())
    widths = [config.num_closed_blocks(layer) for layer in (0, 1, 12, 13, 24, 25, 84, 85, 92, 93)]
    assert widths == [0, 1, 1, 2, 2, 3, 7, 8, 8, 8]


def test_published_kimi_linear() -> None:
    config = parse_model_config(published_kimi_linear())
    assert config.num_layers == 27 and config.attn_res_block_size is None
    assert config.num_closed_blocks(27) == 0
    assert config.kda.gate_lower_bound is None and not config.kda.has_full_rank_gate
    assert config.mla.q_lora_rank is None and not config.mla.has_output_gate
    assert config.moe is not None and config.moe.latent_size is None
    assert config.moe.routed_scaling_factor == 2.446 and config.activation == "silu"
    assert config.max_position_embeddings == 1048576 and config.tensor_prefix == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0 must be at least 1"),
        ({"hidden_size": "7168"}, "hidden_size='7168' must be a non-negative integer"),
        ({"vocab_size": None}, "vocab_size=None must be"),
        ({"num_hidden_layers": 92}, r"share out 1\.\.num_hidden_layers=92;.* outside: \[93\]"),
        ({"num_hidden_layers": 94}, r"num_hidden_layers=94.*missing: \[94\]"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported \(situ, silu\)"),
        ({"mla_use_nope": False}, "mla_use_nope=false is not supported"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must equal num_attention_heads=96"),
        ({"topk_method": "greedy"}, r"topk_method='greedy' is not supported \(noaux_tc\)"),
        ({"moe_router_activation_func": "tanh"}, "moe_router_activation_func='tanh' is not"),
        ({"num_experts_per_token": 897}, r"num_experts_per_token=897 must lie in 1\.\.num_exp"),
        ({"num_expert_group": 5}, "num_expert_group=5 must divide num_experts=896"),
        ({"topk_group": 2}, "num_expert_group=1 .* at least topk_group=2"),
        ({"num_expert_group": 128}, "num_experts_per_token=16 experts are not in topk_group=1"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0 must be at least 1"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' must be a number"),
        ({"attn_res_block_size": -1}, "attn_res_block_size=-1 must be a non-negative integer"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1 must be positive"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor=nan must be a number"),
        ({"activation_situ_beta": 0}, "activation_situ_beta=0 must be positive"),
        ({"mla_use_output_gate": "false"}, "mla_use_output_gate='false' must be true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
        ({"num_experts": "896"}, "num_experts='896' must be a non-negative integer"),
        ({"num_shared_experts": "2"}, "num_shared_experts='2' must be a non-negative integer"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings='long' must be"),
        (
            {"use_grouped_topk": False, "num_expert_group": 4, "topk_group": 4},
            "use_grouped_topk=false with num_expert_group=4 is not supported",
        ),
        ({"linear_attn_config": None}, "linear_attn_config is missing or not an object"),
        ({"quantization_config": {"format": "nvfp4-pack-quantized"}}, "'nvfp4-pack-quantized' is"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_refused_values(changes: dict[str, Any], message: str) -> None:
    root = published_k3()
    root["text_config"] |= changes
    with pytest.raises(ConfigError, match=message):
        parse_model_config(root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"gate_lower_bound": 5.0}, r"linear_attn_config\.gate_lower_bound=5 must be negative"),
        ({"kda_layers": "all"}, "kda_layers must be a list of layer numbers"),
        ({"full_attn_layers": [*MLA_LAYERS, 1]}, r"listed twice: \[1\]"),
    ],
)
def test_refused_linear_attention(changes: dict[str, Any], message: str) -> None:
    root = published_k3()
    root["text_config"]["linear_attn_config"] |= changes
    with pytest.raises(ConfigError, match=message):
        parse_model_config(root)


def test_a_key_that_is_not_there_is_called_missing() -> None:
    root = published_k3()
    del root["text_config"]["kv_lora_rank"]
    with pytest.raises(ConfigError, match="kv_lora_rank is missing"):
        parse_model_config(root)


@pytest.mark.parametrize("token_id", [-1, 163840, "[EOS]", True, [163585, None]])
def test_an_end_token_outside_the_vocabulary_is_refused(token_id: object) -> None:
    for root, generation_eos, file_name in (
        (published_k3() | {"eos_token_id": token_id}, None, "config.json"),
        (published_k3(), token_id, "generation_config.json"),
    ):
        with pytest.raises(ConfigError, match=rf"^{file_name}: eos_token_id=.* is no token id in"):
            parse_model_config(root, generation_eos)


@pytest.mark.parametrize("file_name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"[]", b"\xff{}", b"{"])
def test_an_unreadable_file_is_named(tmp_path: Path, file_name: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_k3()))
    (tmp_path / file_name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"/{file_name}: "):
        load_model_config(tmp_path)


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model_type='llama' is not supported \(kimi_k3, kimi_l"):
        parse_model_config({"model_type": "llama"})
    with pytest.raises(ConfigError, match="kimi_k3 needs a text_config object"):
        parse_model_config({"model_type": "kimi_k3"})
    with pytest.raises(ConfigError, match="dtype='float8' is not supported"):
        parse_model_config(published_k3() | {"dtype": "float8"})


def test_files_and_overrides(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published_k3()))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [163585, 163586]}')
    override = {"text_config": {"linear_attn_config": {"gate_lower_bound": None}}}
    config = load_model_config(tmp_path, override)
    assert config.eos_token_ids == (163586, 163585)
    assert config.kda.gate_lower_bound is None and config.kda.num_heads == 96
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not valid JSON"):
        load_model_config(tmp_path)


def test_an_override_goes_where_the_file_has_the_key() -> None:
    config = {"model_type": "kimi_k3", "text_config": {"hidden_size": 1}, "pad_token_id": 3}
    changed = _apply_overrides(config, {"hidden_size": 2, "pad_token_id": 4})
    assert changed["text_config"]["hidden_size"] == 2
    assert changed["pad_token_id"] == 4
    nested = _apply_overrides(config, {"text_config": {"hidden_size": 5}})
    assert nested["text_config"] == {"hidden_size": 5}
    with pytest.raises(ConfigError, match="hiden_size"):
        _apply_overrides(config, {"hiden_size": 2})
    assert config["text_config"] == {"hidden_size": 1}, "the file's own values stay"
