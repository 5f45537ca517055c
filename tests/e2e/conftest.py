"""A model for engines of real processes, and the proof that none of them leaves anything."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest

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
    resource_tracker.ensure_running()
    forkserver.ensure_running()


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
