"""Checkpoints and reference answers that all schedule tests share."""

from pathlib import Path

import pytest

from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.model import tiny
from stagecoach.request import SamplingParams
from tests.cpu.engine.schedules import Answer, Ask, run_alone

# Six layers: both attentions at both ends of stages, and a bank that grows at layers 0, 2, 4.
SHAPE = tiny.TinyShape(
    num_layers=6,
    mla_layers=(1, 4, 5),
    hidden_size=32,
    head_dim=8,
    dense_size=48,
    num_experts=4,
    latent_size=32,
    q_lora_rank=16,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
    block_size=2,
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi_k3")
    tiny.write_tiny_model(folder, tiny.kimi_k3_config(SHAPE), seed=11)
    return folder


@pytest.fixture(scope="session")
def linear_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in Kimi-Linear: a plain residual stream and other gates."""
    folder = tmp_path_factory.mktemp("kimi_linear")
    tiny.write_tiny_model(folder, tiny.kimi_linear_config(SHAPE), seed=12)
    return folder


@pytest.fixture(scope="session")
def draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained draft for both; its taps are the embedding, an early layer and the last."""
    folder = tmp_path_factory.mktemp("draft")
    shape = TinyDraftShape(
        taps=(5, -1, 2),
        hidden_size=SHAPE.hidden_size,
        head_dim=8,
        q_lora_rank=16,
        kv_lora_rank=16,
        nope_dim=8,
        rope_dim=4,
        value_dim=8,
        intermediate_size=48,
        markov_rank=8,
    )
    write_tiny_draft(folder, mla_draft_config(shape), seed=13)
    return folder


@pytest.fixture(scope="session")
def asks() -> list[Ask]:
    """Prompts around the page size, greedy and sampled, some with every kind of logprobs."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3),
        SamplingParams(
            temperature=0.8, seed=5, max_tokens=7, ignore_eos=True, logprobs=2, prompt_logprobs=2
        ),
        SamplingParams(
            temperature=1.3, seed=6, top_k=40, top_p=0.9, max_tokens=6, ignore_eos=True, logprobs=0
        ),
        SamplingParams(
            temperature=0.7,
            seed=7,
            max_tokens=9,
            ignore_eos=True,
            repetition_penalty=1.3,
            presence_penalty=0.5,
        ),
    ]
    lengths = (1, 7, 8, 9, 16, 23, 33)
    return [
        Ask(
            tuple((31 * place + 7 * number) % 500 for place in range(length)),
            params[number % len(params)],
        )
        for number, length in enumerate(lengths)
    ]


@pytest.fixture(scope="session")
def expected(checkpoint: Path, asks: list[Ask]) -> list[Answer]:
    """Each request alone, its prompt in one chunk, on one stage and one rank."""
    return run_alone(checkpoint, asks)


@pytest.fixture(scope="session")
def linear_expected(linear_checkpoint: Path, asks: list[Ask]) -> list[Answer]:
    return run_alone(linear_checkpoint, asks)
