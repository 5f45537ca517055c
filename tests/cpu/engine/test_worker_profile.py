"""What a worker records, and that it goes on whatever becomes of a recording."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stagecoach.engine.messages import (
    PlanDone,
    ProfileAnswer,
    Shutdown,
    StartProfile,
    StopProfile,
)
from stagecoach.engine.worker_profile import WorkerProfile
from stagecoach.pipeline.topology import Topology
from tests.cpu.engine.test_worker import ALLOCATE, dummy, plan, run_plan, serve

WORKER = Topology(num_stages=2, tp_size=3).worker(5)


def names_in(path: str | Path) -> set[str]:
    trace: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return {event["name"] for event in trace["traceEvents"] if "name" in event}


def test_what_runs_between_start_and_stop_is_in_the_file(tmp_path: Path) -> None:
    profile = WorkerProfile(WORKER)
    torch.ones(3).cumsum(0)
    profile.start(str(tmp_path / "a" / "b"))
    torch.ones(3).cumprod(0)
    path = profile.stop()
    assert path == tmp_path / "a" / "b" / "worker-1-2.pt.trace.json"
    assert "aten::cumprod" in names_in(path)
    assert "aten::cumsum" not in names_in(path)


def test_nothing_to_stop_is_an_error(tmp_path: Path) -> None:
    profile = WorkerProfile(WORKER)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nothing is recorded"):
            profile.stop()
        profile.start(str(tmp_path))
        profile.stop()


def test_a_file_that_cannot_be_written_is_named_and_leaves_no_part(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    profile = WorkerProfile(WORKER)
    profile.start(str(folder))
    recording = profile._recording
    assert recording is not None

    def fill_the_disk(path: str) -> None:
        Path(f"{path}.tmp").write_text("{")

    recording.export_chrome_trace = fill_the_disk  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"worker-1-2\.pt\.trace\.json could not be written"):
        profile.stop()
    assert not list(folder.iterdir())
    profile.start(str(folder))
    assert profile.stop().is_file()


def test_plans_run_in_order_whatever_becomes_of_profiles(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = [
        ALLOCATE,
        StartProfile(query_id=1, folder=str(tmp_path / "file")),
        run_plan(plan(0)),
        StopProfile(query_id=2),
        StartProfile(query_id=3, folder=str(tmp_path)),
        run_plan(plan(1, start=3, length=2, samples=True)),
        StopProfile(query_id=4),
        Shutdown(),
    ]
    [sent] = serve(dummy(), script)
    failed, first, unstarted, started, second, stopped = [
        message for message in sent if isinstance(message, ProfileAnswer | PlanDone)
    ]
    assert isinstance(failed, ProfileAnswer) and failed.error is not None
    assert failed.error.startswith("worker[0,0]: [Errno 17]")
    assert unstarted == ProfileAnswer(query_id=2, error="worker[0,0]: nothing is recorded")
    assert started == ProfileAnswer(query_id=3)
    assert [item.result.step for item in (first, second) if isinstance(item, PlanDone)] == [0, 1]
    assert isinstance(stopped, ProfileAnswer) and stopped.error is None
    [path] = stopped.paths
    assert "aten::mm" in names_in(path) or "aten::matmul" in names_in(path)
