"""From EngineConfig to ResolvedConfig: open values are settled, bad ones refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from stagecoach.config import EngineConfig
from stagecoach.errors import CheckpointError, ConfigError
from stagecoach.resolve import resolve

_CONFIG: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 96,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return tmp_path


def test_open_values_come_from_the_model(folder: Path) -> None:
    resolved = resolve(EngineConfig(model=str(folder), pipeline_parallel_size=2))
    assert resolved.checkpoint == folder
    assert resolved.max_model_len == 256
    assert resolved.dtype == "float32", "bfloat16 is slower on a CPU"
    assert len(resolved.partition) == 2 and sum(resolved.partition) == 4
    assert resolved.model.num_layers == 4


def test_values_that_were_given_stay(folder: Path) -> None:
    resolved = resolve(
        EngineConfig(
            model=str(folder),
            dtype="float64",
            max_model_len=100,
            pipeline_parallel_size=3,
            pp_partition=(1, 1, 2),
        )
    )
    assert (resolved.dtype, resolved.max_model_len) == ("float64", 100)
    assert resolved.partition == (1, 1, 2)


def test_overrides_replace_keys_of_the_file(folder: Path) -> None:
    overrides = {"max_position_embeddings": 512, "linear_attn_config": {"num_heads": 2}}
    resolved = resolve(EngineConfig(model=str(folder), hf_overrides=overrides, max_model_len=300))
    assert resolved.model.max_position_embeddings == 512
    assert resolved.model.kda.num_heads == 2
    assert resolved.model.kda.head_dim == 8, "the rest of the object stays"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"num_hidden_layers": 5}, "num_hidden_layers=5"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
    ],
)
def test_an_unsupported_override_names_the_key_and_the_option(
    folder: Path, overrides: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        resolve(EngineConfig(model=str(folder), hf_overrides=overrides))
    assert "--hf-overrides=" + json.dumps(overrides) in str(caught.value)


def test_a_refused_combination_is_refused_here(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size=3 and .*num_heads=4"):
        resolve(EngineConfig(model=str(folder), tensor_parallel_size=3))


def test_a_folder_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="--model=/nowhere/at/all"):
        resolve(EngineConfig(model="/nowhere/at/all"))


def test_a_folder_without_a_config_is_a_broken_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(EngineConfig(model=str(tmp_path)))
