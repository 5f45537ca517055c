"""The random small checkpoint: the published layout, byte for byte reproducible."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stagecoach.config.model import LayerKind, load_model_config
from stagecoach.model.tiny import (
    TinyShape,
    kimi_k3_config,
    kimi_linear_config,
    write_shards,
    write_tiny_model,
)
from stagecoach.text.tokenizer import SPECIAL_TOKEN_OFFSETS, load_tokenizer

pytestmark = pytest.mark.cpu


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def test_names_shapes_and_dtypes_are_the_published_ones(k3_folder: Path) -> None:
    tensors = stored_tensors(k3_folder)
    described = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    layer = "language_model.model.layers.{}."
    expected = {
        "language_model.lm_head.weight": ("bfloat16", (512, 64)),
        "language_model.model.embed_tokens.weight": ("bfloat16", (512, 64)),
        "language_model.model.output_attn_res_proj.weight": ("bfloat16", (1, 64)),
        layer.format(0) + "self_attention_res_norm.weight": ("bfloat16", (64,)),
        layer.format(0) + "mlp.down_proj.weight": ("bfloat16", (64, 96)),
        layer.format(0) + "self_attn.A_log": ("float32", (8,)),
        layer.format(0) + "self_attn.dt_bias": ("float32", (64,)),
        layer.format(0) + "self_attn.q_conv1d.weight": ("float32", (64, 1, 4)),
        layer.format(0) + "self_attn.o_norm.weight": ("float32", (16,)),
        layer.format(3) + "self_attn.kv_a_proj_with_mqa.weight": ("bfloat16", (40, 64)),
        layer.format(3) + "block_sparse_moe.gate.weight": ("bfloat16", (8, 64)),
        layer.format(3) + "block_sparse_moe.gate.e_score_correction_bias": ("float32", (8,)),
        layer.format(3) + "block_sparse_moe.experts.7.w1.weight_packed": ("uint8", (32, 16)),
        layer.format(3) + "block_sparse_moe.experts.7.w2.weight_scale": ("uint8", (32, 1)),
    }
    assert {name: described[name] for name in expected} == expected
    assert tensors[layer.format(0) + "self_attn.A_log"][4:].tolist() == [0.0] * 4
    assert not any(name.endswith("w1.weight") for name in tensors)


def test_shards_and_index_agree(k3_folder: Path) -> None:
    index = json.loads((k3_folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in k3_folder.glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):06d}.safetensors"
    for file in files:
        listed = {name for name, place in index["weight_map"].items() if place == file}
        assert listed == set(load_file(k3_folder / file))
    total = sum(tensor.nbytes for tensor in stored_tensors(k3_folder).values())
    assert index["metadata"]["total_size"] == total


def test_a_seed_gives_one_model(tmp_path: Path) -> None:
    config = kimi_k3_config(TinyShape(num_layers=2, mla_layers=(1,)))
    for name, seed in (("first", 7), ("second", 7), ("third", 8)):
        write_tiny_model(tmp_path / name, config, seed)
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("first", "second", "third")
    ]
    assert contents[0] == contents[1] != contents[2]


def test_the_config_reads_back(k3_folder: Path) -> None:
    config = load_model_config(k3_folder)
    assert config.model_type == "kimi_k3" and config.num_layers == 9
    mla = [layer for layer, kind in enumerate(config.layer_kinds) if kind is LayerKind.MLA]
    assert mla == [3, 7, 8]
    assert config.is_moe_layer == (False, *[True] * 8)
    assert config.eos_token_ids == (258,) and config.attn_res_block_size == 4


def test_kimi_linear_differs_where_the_original_does(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, kimi_linear_config(TinyShape(q_lora_rank=None)), seed=1)
    config = load_model_config(tmp_path)
    assert config.attn_res_block_size is None and config.activation == "silu"
    assert config.kda.gate_lower_bound is None and not config.kda.has_full_rank_gate
    tensors = stored_tensors(tmp_path)
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)
    assert "model.layers.0.self_attn.g_b_proj.weight" in tensors
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in tensors


def test_its_tokenizer_has_256_bytes_and_256_specials(k3_folder: Path) -> None:
    tokenizer = load_tokenizer(k3_folder)
    assert tokenizer.vocab_size == 512
    text = "naïve 東京 🚂\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode_bytes(text.encode()) == text.encode()
    ours = json.loads((k3_folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    for token_id, entry in ours.items():
        assert tokenizer.special_id(entry["content"]) == int(token_id)
        assert SPECIAL_TOKEN_OFFSETS[entry["content"]] == int(token_id) - 256


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    tensors = {"small": torch.ones(4), "large": torch.ones(100), "last": torch.ones(4)}
    write_shards(tmp_path, tensors, max_shard_bytes=50)
    assert [sorted(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))] == [
        ["small"],
        ["large"],
        ["last"],
    ]
