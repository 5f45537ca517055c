"""What drafts' config.json files mean, and what is refused in them by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stagecoach.config.draft import (
    DraftGqaConfig,
    DraftMlaConfig,
    RopeConfig,
    load_draft_config,
    parse_draft_config,
)
from stagecoach.config.model import Taps
from stagecoach.errors import CheckpointError, ConfigError
from tests.cpu.draft.published import GQA_CONFIG, MLA_CONFIG

pytestmark = pytest.mark.cpu


def mla(**changes: Any) -> dict[str, Any]:
    """The published config; None takes a key away."""
    return _changed(MLA_CONFIG, changes)


def gqa(**changes: Any) -> dict[str, Any]:
    return _changed(GQA_CONFIG, changes)


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config | changes).items() if value is not None}


def test_the_published_latent_draft() -> None:
    config = parse_draft_config(MLA_CONFIG)
    assert config.taps == Taps((2, 23, 47, 71, 89))
    assert config.attention == DraftMlaConfig(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    assert config.rope == RopeConfig(
        theta=50000.0,
        yarn_factor=32.0,
        original_max_position_embeddings=32768,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    assert not config.is_causal
    assert not config.has_tap_norms
    assert config.has_confidence_head and config.confidence_reads_markov
    assert (config.markov_rank, config.mask_token_id, config.block_length) == (256, 163837, None)
    assert config.cache_row_width(1) == config.cache_row_width(8) == 576


def test_the_published_grouped_draft() -> None:
    """Its taps are mixtures though no key says so: the engine of its makers has no other."""
    config = parse_draft_config(GQA_CONFIG)
    assert config.taps == Taps((7, 23, 51, 67, 83), are_mixtures=True)
    assert config.attention == DraftGqaConfig(num_heads=64, num_kv_heads=16, head_dim=64)
    assert config.rope == RopeConfig(theta=10000.0)
    assert (config.mask_token_id, config.block_length) == (163824, 7)
    assert config.cache_row_width(1) == 2 * 16 * 64
    assert config.cache_row_width(8) == 2 * 2 * 64


def test_the_published_softmax_scale() -> None:
    config = parse_draft_config(MLA_CONFIG)
    assert isinstance(config.attention, DraftMlaConfig) and config.rope is not None
    assert config.attention.softmax_scale(config.rope) == pytest.approx(0.13086080, abs=5e-9)
    assert config.attention.softmax_scale(None) == pytest.approx(192**-0.5)
    assert config.rope.magnitude == 1.0


def test_without_mscale_all_dim_yarn_lengthens_what_is_rotated() -> None:
    rope = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    config = parse_draft_config(gqa(rope_parameters=rope | {"rope_theta": 10000.0}))
    assert config.rope is not None
    assert config.rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert config.rope.attention_magnitude == 1.0


def test_the_variants_of_a_latent_draft() -> None:
    config = parse_draft_config(
        mla(
            num_attention_heads=96,
            num_key_value_heads=96,
            q_lora_rank=None,
            markov_rank=512,
            mla_use_nope=True,
            fc_norm=True,
            aux_hidden_stream="attn_res",
            is_causal=True,
            confidence_head_with_markov=False,
            confidence_temperatures=[1.5, 2, 0.5],
            block_size=5,
            architectures=None,
        )
    )
    assert isinstance(config.attention, DraftMlaConfig)
    assert (config.attention.num_heads, config.attention.q_lora_rank) == (96, None)
    assert config.rope is None
    assert config.has_tap_norms and config.taps.are_mixtures and config.is_causal
    assert not config.confidence_reads_markov
    assert config.confidence_temperatures == (1.5, 2.0, 0.5)
    assert (config.markov_rank, config.block_length) == (512, 5)


def test_taps_are_sorted_and_may_begin_with_the_embedding() -> None:
    config = parse_draft_config(mla(target_layer_ids=[89, -1, 47, 2], num_target_layers=4))
    assert config.taps.layers == (-1, 2, 47, 89)


def test_renamed_keys_are_read() -> None:
    renamed = mla(
        target_layer_ids=None,
        mask_token_id=None,
        markov_rank=None,
        dspark_target_layer_ids=[2, 23, 47, 71, 89],
        dspark_noise_token_id=163837,
        dspark_markov_rank=256,
    )
    assert parse_draft_config(renamed) == parse_draft_config(MLA_CONFIG)


def test_places_of_a_key_that_disagree_are_refused() -> None:
    nested = {"target_layer_ids": [7, 23, 51, 67, 83], "mask_token_id": 1}
    with pytest.raises(ConfigError, match=r"mask_token_id=2, dflash_config\.mask_token_id=1"):
        parse_draft_config(gqa(dflash_config=nested, mask_token_id=2))


@pytest.mark.parametrize(
    ("changes", "is_causal"),
    [
        ({}, False),
        ({"is_causal": True}, True),
        ({"is_causal": False, "dflash_config": {"causal": True}}, False),
        ({"dflash_config": {"causal": True}}, True),
        ({"dflash_config": {"is_causal": True}}, True),
        ({"dflash_config": {"causal": False}}, False),
        ({"layer_types": ["full_attention"] * 5}, False),
    ],
)
def test_which_key_says_causal(changes: dict[str, Any], is_causal: bool) -> None:
    assert parse_draft_config(mla(**changes)).is_causal == is_causal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"architectures": ["Qwen3DSparkModel"]}, "architectures"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        ({"dspark_draft_topk": 64}, "dspark_draft_topk=64"),
        ({"dflash_config": {"sample_from_anchor": False}}, "dflash_config.sample_from_anchor"),
        ({"mla_use_qk_norm": True}, "mla_use_qk_norm"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"markov_head_type": "gated"}, "markov_head_type='gated'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"dflash_config": {"use_swa": True}}, "dflash_config.use_swa"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size=32000 with vocab_size=163840"),
        ({"target_hidden_size": 4096}, "target_hidden_size=4096 with hidden_size=7168"),
        ({"num_target_layers": 4}, "num_target_layers=4"),
        ({"target_layer_ids": [2, 2, 47, 71, 89]}, "target_layer_ids"),
        ({"target_layer_ids": [-2, 2, 47, 71, 89]}, "target_layer_ids"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"aux_hidden_stream": "attnres"}, "aux_hidden_stream='attnres'"),
        ({"mask_token_id": 163840}, "mask_token_id=163840"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"markov_rank": 0}, "markov_rank=0"),
        ({"num_key_value_heads": 16}, "num_key_value_heads=16"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"confidence_temperatures": [1.0, 0.0]}, "confidence_temperatures"),
        ({"confidence_temperatures": [1.0], "enable_confidence_head": False}, "enable_confidence"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type='llama3'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "attention_factor": 1.1}},
            "rope_parameters.attention_factor=1.1",
        ),
        ({"dflash_config": [1]}, "dflash_config"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_draft_config(mla(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 24}, "num_key_value_heads=24 must divide num_attention_heads=64"),
        ({"head_dim": 63}, "head_dim=63"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"transformer_layer_config": {"head_dim": 64}}, "transformer_layer_config"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None}, "architectures"),
    ],
)
def test_the_grouped_form_too(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_draft_config(gqa(**changes))
    assert message in str(caught.value)


def test_a_folder_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config"):
        load_draft_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MLA_CONFIG))
    assert load_draft_config(tmp_path) == parse_draft_config(MLA_CONFIG)
