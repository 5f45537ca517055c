"""Processes of one owner: their ends are told once, unless they were asked for."""

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

import pytest

from stagecoach.engine.child_processes import ChildProcesses, Ending, apart_from_caller
from stagecoach.errors import WorkerDiedError

pytestmark = pytest.mark.cpu

_LIMIT_SECONDS = 20.0


def _wait_for_owner(lifeline: Connection) -> None:
    wait([lifeline])


def _end_with(status: int, lifeline: Connection) -> None:
    raise SystemExit(status)


class _Stuck(multiprocessing.get_context("forkserver").Process):
    """As one that waits for a device inside the system."""

    def kill(self) -> None:
        """Comes to nothing."""


@pytest.fixture
def told() -> "queue.SimpleQueue[Ending]":
    return queue.SimpleQueue()


@pytest.fixture
def children(told: "queue.SimpleQueue[Ending]") -> Iterator[ChildProcesses]:
    children = ChildProcesses(told.put)
    yield children
    children.stop(0.0)


def _start(children: ChildProcesses, name: str, rank: int | None = None) -> int:
    context = multiprocessing.get_context("forkserver")
    children.start(name, context.Process, _wait_for_owner, rank=rank)
    return children.process_ids[name]


def test_an_end_is_told_with_its_rank_and_how(
    children: ChildProcesses, told: "queue.SimpleQueue[Ending]"
) -> None:
    process_id = _start(children, "worker[0,1]", rank=1)
    os.kill(process_id, signal.SIGKILL)
    ending = told.get(timeout=_LIMIT_SECONDS)
    assert ending == Ending("worker[0,1]", 1, "was killed by SIGKILL", is_killed=True)
    context = multiprocessing.get_context("forkserver")
    children.start("engine loop", context.Process, _end_with, 3)
    assert told.get(timeout=_LIMIT_SECONDS) == Ending("engine loop", None, "ended with status 3")
    assert told.empty()


def test_an_end_that_was_asked_for_is_not_told_and_the_name_is_free_again(
    children: ChildProcesses, told: "queue.SimpleQueue[Ending]"
) -> None:
    first = _start(children, "worker[0,0]", rank=0)
    children.kill(["worker[0,0]", "worker[9,9]"])
    second = _start(children, "worker[0,0]", rank=0)
    assert first != second and told.empty()
    # Which is the owner's to obey.
    os.kill(second, signal.SIGTERM)
    os.kill(second, signal.SIGKILL)
    assert told.get(timeout=_LIMIT_SECONDS).words == "was killed by SIGKILL"


def test_one_that_cannot_be_ended_is_named(
    children: ChildProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagecoach.engine.child_processes._KILLED_SECONDS", 0.1)
    children.start("worker[0,0]", _Stuck, _wait_for_owner, rank=0)
    with pytest.raises(WorkerDiedError, match=r"worker\[0,0\] cannot be ended"):
        children.kill(["worker[0,0]"])
    os.kill(children.process_ids["worker[0,0]"], signal.SIGKILL)


def test_they_end_with_their_lifelines(
    children: ChildProcesses, told: "queue.SimpleQueue[Ending]"
) -> None:
    _start(children, "worker[0,0]")
    began = time.monotonic()
    children.close()
    children.stop(_LIMIT_SECONDS)
    assert time.monotonic() - began < _LIMIT_SECONDS / 2
    assert told.empty()
    # What comes after the end does not stay.
    context = multiprocessing.get_context("forkserver")
    children.start("late", context.Process, _wait_for_owner)
    assert "late" not in children.process_ids


def test_one_that_serves_the_others_ends_after_them_and_is_not_waited_for(
    children: ChildProcesses, told: "queue.SimpleQueue[Ending]"
) -> None:
    context = multiprocessing.get_context("forkserver")
    children.start("store", context.Process, _wait_for_owner, is_server=True)
    children.start("worker[0,0]", context.Process, _end_with, 0, rank=0)
    [store] = [item for item in multiprocessing.active_children() if item.name == "store"]
    began = time.monotonic()
    children.stop(_LIMIT_SECONDS)
    assert time.monotonic() - began < _LIMIT_SECONDS / 2
    assert store.exitcode == 0, "in order, not by force"


def test_the_callers_main_module_is_put_aside_and_back() -> None:
    import sys

    main_module = sys.modules["__main__"]
    with apart_from_caller():
        assert sys.modules["__main__"] is not main_module
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert sys.modules["__main__"] is main_module
