"""The bundled model: published layout, right answers, and the tokens of an independent engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from safetensors import safe_open

from stagecoach import LLM, SamplingParams
from stagecoach.checkpoint_folder import checkpoint_folder
from stagecoach.demo.evaluation import evaluate_model, render_prompt
from stagecoach.demo.tasks import FAMILIES, generate
from stagecoach.text.tokenizer import NUM_SPECIAL_TOKENS, SPECIAL_TOKEN_OFFSETS, load_tokenizer
from tests.cpu.model.test_kimi_k3 import mlx_model

MAX_BYTES = 32 * 2**20


@pytest.fixture(scope="module")
def folder() -> Path:
    return checkpoint_folder("demo")


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Two stages and two ranks, as `stagecoach demo` runs it, in this process."""
    with LLM(
        "demo",
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        distributed_executor_backend="uni",
        num_threads=1,
        show_progress=False,
        log_level="warning",
    ) as engine:
        yield engine


def test_files_are_those_of_a_published_checkpoint(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tiktoken.model",
        "tokenizer_config.json",
    } <= names
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = set(index["weight_map"].values())
    assert len(shards) >= 2
    for shard in shards:
        with safe_open(folder / shard, framework="pt") as file:
            stored = set(file.keys())
        assert stored == {name for name, file in index["weight_map"].items() if file == shard}


def test_tensors_have_the_published_names_and_types(folder: Path, config: dict[str, Any]) -> None:
    text = config["text_config"]
    types: dict[str, tuple[str, list[int]]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                view = file.get_slice(name)
                types[name] = (view.get_dtype(), view.get_shape())
    assert all(name.startswith("language_model.") for name in types)
    for name, (dtype, _) in types.items():
        if name.endswith(("weight_packed", "weight_scale")):
            assert dtype == "U8", name
        elif name.endswith(
            ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
        ):
            assert dtype == "F32", name
        else:
            assert dtype == "BF16", name
    expert = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    width, latent = text["moe_intermediate_size"], text["routed_expert_hidden_size"]
    assert types[f"{expert}.weight_packed"][1] == [width, latent // 2]
    assert types[f"{expert}.weight_scale"][1] == [width, latent // 32]
    [num_heads] = types["language_model.model.layers.0.self_attn.A_log"][1]
    assert num_heads > text["linear_attn_config"]["num_heads"], "A_log is padded"


def test_shape_is_kimi_k3_in_small(config: dict[str, Any]) -> None:
    text = config["text_config"]
    linear = text["linear_attn_config"]
    num_layers = text["num_hidden_layers"]
    assert config["model_type"] == "kimi_k3" and num_layers >= 9
    assert {num_layers - 1, num_layers} <= set(linear["full_attn_layers"])
    assert 4 in linear["full_attn_layers"] and {1, 2, 3} <= set(linear["kda_layers"])
    assert text["num_attention_heads"] % 4 == linear["num_heads"] % 4 == 0
    assert text["num_experts_per_token"] >= 2 and text["num_shared_experts"] >= 1
    assert text["mla_use_nope"] and text["attn_res_block_size"] < num_layers


def test_special_tokens_stand_at_the_end_in_the_originals_order(
    folder: Path, config: dict[str, Any]
) -> None:
    tokenizer = load_tokenizer(folder)
    first = tokenizer.vocab_size - NUM_SPECIAL_TOKENS
    assert tokenizer.vocab_size == config["text_config"]["vocab_size"]
    for name, offset in SPECIAL_TOKEN_OFFSETS.items():
        assert tokenizer.special_id(name) == first + offset


def test_greedy_tokens_equal_those_of_mlx_lm(
    llm: LLM, folder: Path, config: dict[str, Any]
) -> None:
    """float32 on both sides; whole answers, one of each family with a short prompt."""
    oracle = mlx_model(folder, config)
    examples = [generate(family, 3, 0, "held_out") for family in FAMILIES]
    # Long contexts only cost the oracle time.
    prompts = [
        prompt
        for prompt in (render_prompt(llm, example) for example in examples)
        if len(prompt) <= 600
    ]
    assert len(prompts) >= 3
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ours = output.outputs[0].token_ids
        theirs = [
            int(token) for token, _ in generate_step(mx.array(prompt), oracle, max_tokens=len(ours))
        ]
        assert ours == theirs


def test_answers_are_right(llm: LLM) -> None:
    """A few examples of each family; `stagecoach eval` scores many."""
    report = evaluate_model(llm, families=FAMILIES, limit=4, seed=17, max_tokens=400)
    assert sum(report.tasks.values()) / len(FAMILIES) >= 0.8, report
