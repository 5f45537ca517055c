"""The bundled draft: published layout, a whole config, and drafts that are worth a verify round."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stagecoach import LLM
from stagecoach.config.draft import parse_draft_config
from stagecoach.demo.evaluation import evaluate_model
from stagecoach.demo.tasks import FAMILIES
from stagecoach.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.cpu

DEMO = Path(__file__).parents[3] / "stagecoach" / "demo"
DRAFT = DEMO / "draft_checkpoint"
MAX_BYTES = 8_000_000
NUM_LAYERS = 2
TAPS = [-1, 3, 7, 8]

LAYER = {
    "input_layernorm.weight": (256,),
    "post_attention_layernorm.weight": (256,),
    "self_attn.q_a_proj.weight": (128, 256),
    "self_attn.q_a_layernorm.weight": (128,),
    "self_attn.q_b_proj.weight": (8 * 48, 128),
    "self_attn.kv_a_proj_with_mqa.weight": (64 + 16, 256),
    "self_attn.kv_a_layernorm.weight": (64,),
    "self_attn.kv_b_proj.weight": (8 * 64, 64),
    "self_attn.o_proj.weight": (256, 8 * 32),
    "mlp.gate_proj.weight": (768, 256),
    "mlp.up_proj.weight": (768, 256),
    "mlp.down_proj.weight": (256, 768),
}
OUTSIDE = {
    "context_proj.weight": (256, 4 * 256),
    "context_norm.weight": (256,),
    "final_norm.weight": (256,),
    "markov_head.markov_w1.weight": (4096, 64),
    "markov_head.markov_w2.weight": (4096, 64),
    "confidence_head.proj.weight": (1, 256 + 64),
    "confidence_head.proj.bias": (1,),
}
# Every key of the published drafts' configs, less `_torchspec_version`.
PUBLISHED_KEYS = {
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "mla_use_nope", "mla_use_output_gate", "vocab_size", "draft_vocab_size",
    "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_parameters",
    "num_target_layers", "target_hidden_size", "target_num_hidden_layers", "target_layer_ids",
    "mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "tie_word_embeddings", "torch_dtype",
}  # fmt: skip


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    (file,) = DRAFT.glob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((DRAFT / "config.json").read_text(encoding="utf-8"))


def test_every_tensor_has_its_published_name_and_shape(tensors: dict[str, Tensor]) -> None:
    expected = dict(OUTSIDE)
    for layer in range(NUM_LAYERS):
        expected |= {f"layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    assert {name: tuple(value.shape) for name, value in tensors.items()} == expected


def test_all_weights_are_finite_bfloat16(tensors: dict[str, Tensor]) -> None:
    for name, value in tensors.items():
        assert value.dtype == torch.bfloat16, name
        assert value.float().isfinite().all(), name


def test_every_head_was_trained(tensors: dict[str, Tensor]) -> None:
    """These start from zero."""
    for name in ("markov_head.markov_w2.weight", "confidence_head.proj.weight"):
        assert tensors[name].abs().max() > 0, name


def test_config_has_every_published_key(config: dict[str, Any]) -> None:
    assert set(config) >= PUBLISHED_KEYS
    assert config["model_type"] == "k3_dspark"
    assert config["target_layer_ids"] == TAPS
    assert config["num_hidden_layers"] == NUM_LAYERS
    assert "aux_hidden_stream" not in config  # running sums


def test_config_fits_the_target(config: dict[str, Any]) -> None:
    text = (DEMO / "checkpoint" / "config.json").read_text(encoding="utf-8")
    target = json.loads(text)["text_config"]
    for key in ("hidden_size", "vocab_size", "max_position_embeddings"):
        assert config[key] == target[key], key
    assert config["target_num_hidden_layers"] == target["num_hidden_layers"]
    tokenizer = load_tokenizer(DEMO / "checkpoint")
    assert tokenizer.special_name(config["mask_token_id"]) == "<|reserved_token_4093|>"


def test_confidence_is_calibrated_for_every_place(config: dict[str, Any]) -> None:
    temperatures = parse_draft_config(config).confidence_temperatures
    assert len(temperatures) == 7
    assert all(0.25 < temperature < 4 for temperature in temperatures)
    assert len(set(temperatures)) > 1


def test_the_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) <= MAX_BYTES


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_returns_many_tokens(temperature: float) -> None:
    """Over the first held-out examples; the model card has 7 tokens over many more."""
    speculation = {"model": "demo-draft", "confidence_schedule": False, "watchdog": False}
    with LLM(
        "demo",
        speculative_config=speculation,
        distributed_executor_backend="uni",
        num_threads=1,
        show_progress=False,
        log_level="warning",
    ) as llm:
        report = evaluate_model(
            llm, families=FAMILIES, limit=2, seed=3, max_tokens=200, temperature=temperature
        )
    assert report.speculation is not None
    mean = report.speculation.tokens_per_round
    assert mean is not None
    assert mean > 6
