"""A model for engines of real processes, and the proof that none of them leaves anything."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

from stagecoach import LLM
from stagecoach.engine.child_processes import apart_from_caller
from tests.e2e.server_process import ServerProcess, serving
from tests.small_engine import write_small_draft, write_small_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For that model; untrained."""
    return write_small_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="session", autouse=True)
def servers() -> None:
    """What Python itself keeps running beside engines: started now, so that it is no news."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stagecoach.engine.worker"])
    # As an engine does it: what forks from it is the engine's to end.
    with apart_from_caller():
        resource_tracker.ensure_running()
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def demo_server(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The bundled model, which always drafts; for all tests that leave the server as it was."""
    folder = tmp_path_factory.mktemp("demo_server")
    draft = '{"model": "demo-draft", "confidence_schedule": false, "watchdog": false}'
    with serving("demo", folder, "--speculative-config", draft) as server:
        yield server


@pytest.fixture(scope="session")
def demo_llm() -> Iterator[LLM]:
    """The same model without a server, and without drafts."""
    options: dict[str, Any] = {"distributed_executor_backend": "uni", "num_threads": 1}
    with LLM("demo", show_progress=False, log_level="warning", max_model_len=512, **options) as llm:
        yield llm


@pytest.fixture
def temporary_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "t"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(
    servers: None, temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Processes and folders that a test makes are gone when it ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_folder))
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left
    assert not list(temporary_folder.glob("stagecoach-*"))
