"""A model of three layers, so that a schedule takes a fraction of a second, and what is loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.fuzz.draw import Given
from stagecoach.fuzz.play import Player
from stagecoach.model.tiny import TinyShape, kimi_k3_config, write_tiny_model

SHAPE = TinyShape(
    num_layers=3,
    mla_layers=(1,),
    hidden_size=32,
    num_heads=2,
    head_dim=8,
    dense_size=32,
    num_experts=2,
    num_experts_per_token=1,
    num_shared_experts=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
    block_size=2,
)
DRAFT_SHAPE = TinyDraftShape(
    taps=(-1, 2),
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
    intermediate_size=32,
    markov_rank=8,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fuzzed")
    write_tiny_model(folder, kimi_k3_config(SHAPE), seed=21)
    return str(folder)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("fuzzed_draft")
    write_tiny_draft(folder, mla_draft_config(DRAFT_SHAPE), seed=22)
    return str(folder)


@pytest.fixture(scope="session")
def given(model: str, draft: str) -> Given:
    """Every layout of the small model."""
    layouts = tuple((stages, ranks) for stages in (1, 2, 3) for ranks in (1, 2))
    return Given(model, {}, layouts, draft, 160)


@pytest.fixture(scope="session")
def player() -> Player:
    """One for all tests: models stay loaded, and one-shot results known."""
    return Player()


@pytest.fixture(autouse=True)
def _subnormals_are_flushed() -> Iterator[None]:
    """As workers do; the setting is the thread's, and other tests need it off."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)
