"""The bundled checkpoint has the published layout: names, shapes, dtypes, files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

DEMO = Path(__file__).parents[3] / "stagecoach" / "demo" / "checkpoint"
MAX_BYTES = 24_000_000
KDA_LAYERS, MLA_LAYERS = (0, 1, 2, 4, 5, 6), (3, 7, 8)
NUM_EXPERTS = 16

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
KDA = {
    **{f"{name}_proj.weight": ((256, 256), BF16) for name in "qkvgo"},
    **{f"{name}_conv1d.weight": ((256, 1, 4), F32) for name in "qkv"},
    "A_log": ((8,), F32),
    "dt_bias": ((256,), F32),
    "f_a_proj.weight": ((64, 256), BF16),
    "f_b_proj.weight": ((256, 64), BF16),
    "b_proj.weight": ((4, 256), BF16),
    "o_norm.weight": ((64,), F32),
}
MLA = {
    "q_a_proj.weight": ((128, 256), BF16),
    "q_a_layernorm.weight": ((128,), BF16),
    "q_b_proj.weight": ((384, 128), BF16),
    "kv_a_proj_with_mqa.weight": ((80, 256), BF16),
    "kv_a_layernorm.weight": ((64,), BF16),
    "kv_b_proj.weight": ((512, 64), BF16),
    "g_proj.weight": ((256, 256), BF16),
    "o_proj.weight": ((256, 256), BF16),
}
MOE = {
    "gate.weight": ((16, 256), BF16),
    "gate.e_score_correction_bias": ((16,), F32),
    "routed_expert_down_proj.weight": ((128, 256), BF16),
    "routed_expert_up_proj.weight": ((256, 128), BF16),
    "routed_expert_norm.weight": ((128,), BF16),
    "shared_experts.gate_proj.weight": ((256, 256), BF16),
    "shared_experts.up_proj.weight": ((256, 256), BF16),
    "shared_experts.down_proj.weight": ((256, 256), BF16),
}
EXPERT = {"weight_packed": ((128, 64), U8), "weight_scale": ((128, 4), U8)}
DENSE = {
    "gate_proj.weight": ((768, 256), BF16),
    "up_proj.weight": ((768, 256), BF16),
    "down_proj.weight": ((256, 768), BF16),
}
LAYER = {
    **{
        f"{name}.weight": ((256,), BF16)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attention_res_norm",
            "mlp_res_norm",
        )
    },
    "self_attention_res_proj.weight": ((1, 256), BF16),
    "mlp_res_proj.weight": ((1, 256), BF16),
}
OUTSIDE = {
    "model.embed_tokens.weight": ((4096, 256), BF16),
    "lm_head.weight": ((4096, 256), BF16),
    "model.norm.weight": ((256,), BF16),
    "model.output_attn_res_norm.weight": ((256,), BF16),
    "model.output_attn_res_proj.weight": ((1, 256), BF16),
}


def expected_tensors() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    expected = dict(OUTSIDE)
    for layer in range(9):
        parts = {f"self_attn.{k}": v for k, v in (KDA if layer in KDA_LAYERS else MLA).items()}
        parts |= LAYER
        if layer == 0:
            parts |= {f"mlp.{name}": value for name, value in DENSE.items()}
        else:
            parts |= {f"block_sparse_moe.{name}": value for name, value in MOE.items()}
            parts |= {
                f"block_sparse_moe.experts.{expert}.{matrix}.{name}": value
                for expert in range(NUM_EXPERTS)
                for matrix in ("w1", "w2", "w3")
                for name, value in EXPERT.items()
            }
        expected |= {f"model.layers.{layer}.{name}": value for name, value in parts.items()}
    return {f"language_model.{name}": value for name, value in expected.items()}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    index = json.loads((DEMO / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) >= 2
    found = {}
    for name in files:
        shard = load_file(DEMO / name)
        assert sorted(shard) == sorted(k for k, v in index["weight_map"].items() if v == name)
        found |= shard
    num_bytes = sum(value.numel() * value.element_size() for value in found.values())
    assert num_bytes == index["metadata"]["total_size"]
    return found


def test_every_tensor_has_its_published_name_shape_and_dtype(tensors: dict[str, Tensor]) -> None:
    found = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    assert found == expected_tensors()


def test_decay_rates_are_padded_with_zeros(tensors: dict[str, Tensor]) -> None:
    for layer in KDA_LAYERS:
        rates = tensors[f"language_model.model.layers.{layer}.self_attn.A_log"]
        assert rates[:4].abs().min() > 0
        assert rates[4:].abs().max() == 0


def test_all_weights_are_finite(tensors: dict[str, Tensor]) -> None:
    assert all(value.float().isfinite().all() for value in tensors.values())


def test_config_places_layers_and_specials() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["model_type"] == "kimi_k3"
    text = config["text_config"]
    assert text["linear_attn_config"]["full_attn_layers"] == [layer + 1 for layer in MLA_LAYERS]
    assert text["linear_attn_config"]["kda_layers"] == [layer + 1 for layer in KDA_LAYERS]
    assert text["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert (text["bos_token_id"], text["eos_token_id"], text["pad_token_id"]) == (3840, 3842, 4095)
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 3842


def test_the_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < MAX_BYTES
