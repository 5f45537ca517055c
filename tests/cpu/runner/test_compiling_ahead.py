"""When a worker looks for forms of kernels, what it has compiled, and what it says of it."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stagecoach.config.engine import EngineConfig
from stagecoach.kernels import compile_ahead
from stagecoach.kernels.compile_ahead import Compiled
from stagecoach.model.tiny import TinyShape, kimi_linear_config, write_tiny_model
from stagecoach.resolve import resolve
from stagecoach.runner import device_budget
from stagecoach.runner.device_budget import Rehearsal

pytestmark = pytest.mark.cpu

FORMS = ["a", "b", "c", "d"]


class Server:
    """Notes what it is given."""

    given: list[list[Any]]
    num_closed = 0
    failures: tuple[str, ...] = ()
    error: Exception | None = None

    def __init__(self, num_processes: int) -> None:
        assert num_processes >= 1

    def compile(self, forms: Sequence[Any]) -> Compiled:
        Server.given.append(list(forms))
        if Server.error is not None:
            raise Server.error
        return Compiled(1.5, 3, Server.failures)

    def close(self) -> None:
        Server.num_closed += 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was gone over without a launch; the cache is empty."""
    seen: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    Server.given, Server.num_closed, Server.failures, Server.error = [], 0, (), None

    @contextlib.contextmanager
    def found_forms() -> Iterator[list[str]]:
        seen.append("begin")
        yield list(FORMS)
        seen.append("end")

    monkeypatch.setattr(compile_ahead, "CompileServer", Server)
    monkeypatch.setattr(compile_ahead, "found_forms", found_forms)
    monkeypatch.setattr(device_budget, "_collect", lambda device: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="a GPU")
    )
    return seen


def compile_ahead_of(
    folder: Path, seen: list[str], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    if not folder.exists():
        folder.mkdir()
        write_tiny_model(folder, kimi_linear_config(TinyShape()), seed=1)
    engine = EngineConfig(model=str(folder), device="cpu", tensor_parallel_size=2, **options)
    graphs = SimpleNamespace(launch=lambda buckets, memory: seen.append(f"graphs {buckets}"))
    steps: Any = SimpleNamespace(buckets=(8, 1), new_graphs=lambda: graphs)
    shapes: Any = "shapes"
    device = torch.device("cuda", 1)
    rehearsal = Rehearsal(resolve(engine), steps, shapes, device, bytes_in_flight=0)
    monkeypatch.setattr(rehearsal, "_meet_forms", lambda *_: seen.append("steps"))
    none: Any = None
    rehearsal._compile(none, none, none)


def test_each_rank_begins_elsewhere(
    tmp_path: Path, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ahead_of(tmp_path / "model", seen, monkeypatch)
    assert seen == ["begin", "steps", "graphs (8, 1)", "end"]
    assert Server.given == [["c", "d", "a", "b"]]
    assert Server.num_closed == 1


def test_the_next_start_does_not_look_again(
    tmp_path: Path, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ahead_of(tmp_path / "model", seen, monkeypatch)
    compile_ahead_of(tmp_path / "model", seen, monkeypatch)
    assert len(Server.given) == 1
    # Other options may need other forms.
    compile_ahead_of(tmp_path / "model", seen, monkeypatch, max_num_seqs=5)
    assert len(Server.given) == 2


def test_without_the_process_kernels_are_compiled_one_by_one(
    tmp_path: Path,
    seen: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Server.error = RuntimeError("the process that compiles kernels has ended")
    with caplog.at_level(logging.WARNING):
        compile_ahead_of(tmp_path / "model", seen, monkeypatch)
    assert "has ended: kernels are compiled one by one" in caplog.text
    assert Server.num_closed == 1
    Server.error = None
    compile_ahead_of(tmp_path / "model", seen, monkeypatch)
    assert len(Server.given) == 2


def test_a_form_that_cannot_be_compiled_is_named(
    tmp_path: Path,
    seen: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Server.failures = ("some_kernel: no room",)
    with caplog.at_level(logging.INFO):
        compile_ahead_of(tmp_path / "model", seen, monkeypatch)
    assert "some_kernel: no room" in caplog.text
    assert "found 4 forms" in caplog.text and "1.5 s with 3 processes" in caplog.text
