"""The small model, and an engine on it that the tests of a module share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecoach import LLM
from tests.small_engine import assert_idle, thread_engine, write_small_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody writes into it."""
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLM]:
    with thread_engine(folder) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    yield engine
    assert_idle(engine)
