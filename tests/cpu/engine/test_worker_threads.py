"""Workers that are threads of one process: those that share a GPU wait for each other's weights."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stagecoach.engine import children, worker
from stagecoach.engine.messages import WorkerFailed
from stagecoach.engine.ports import QueueHub
from stagecoach.errors import CheckpointError
from stagecoach.pipeline.topology import Topology, WorkerId
from tests.cpu.engine.fakes import resolved

pytestmark = pytest.mark.cpu


def start(monkeypatch: pytest.MonkeyPatch, load: Callable[[WorkerId], None]) -> list[WorkerFailed]:
    """What two stages report of which each ends once all have loaded."""

    class Loading:
        def __init__(self, _: Any, worker: WorkerId, *__: Any, after_load: Any) -> None:
            self.worker, self.after_load = worker, after_load

        def run(self) -> None:
            load(self.worker)
            self.after_load()

    monkeypatch.setattr(worker, "Worker", Loading)
    monkeypatch.setattr(children, "_use_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(children, "_use_threads", lambda *_: None)
    config = dataclasses.replace(resolved(pipeline_parallel_size=2), device="cuda")
    topology = Topology.of(config.engine)
    hub = QueueHub(topology.num_workers)
    for thread in children.start_worker_threads(config, topology, hub):
        thread.join(timeout=10.0)
        assert not thread.is_alive()
    failed = []
    while (reply := hub.receive_worker()) is not None:
        assert isinstance(reply[1], WorkerFailed)
        failed.append(reply[1])
    return failed


def test_nobody_goes_on_before_all_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    first_waits, loaded = threading.Event(), []

    def load(worker: WorkerId) -> None:
        if worker.stage:
            assert first_waits.wait(10.0)
        loaded.append(worker.stage)

    wait = threading.Barrier.wait

    def noted(self: threading.Barrier, timeout: float | None = None) -> int:
        assert len(loaded) == 2 or not first_waits.is_set()
        first_waits.set()
        return wait(self, timeout)

    monkeypatch.setattr(threading.Barrier, "wait", noted)
    assert start(monkeypatch, load) == []
    assert loaded == [0, 1]


def test_one_that_cannot_load_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(worker: WorkerId) -> None:
        if worker.stage:
            raise CheckpointError("no such file")

    failed = start(monkeypatch, load)
    assert [item.kind for item in failed] == ["CheckpointError", "WorkerDiedError"]
    assert [item.worker for item in failed] == ["worker[1,0]", "worker[0,0]"]
