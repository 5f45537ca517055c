"""The way of plans and answers to workers of other hosts: over TCP, with keys."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from stagecoach.engine.contact import ChannelKeys, plan_channel_in
from stagecoach.engine.messages import RunPlan, Shutdown, WorkerAllocated
from stagecoach.engine.ports import ZmqLoopPort, ZmqWorkerPort
from stagecoach.errors import HostLostError
from tests.cpu.engine.fakes import in_threads

pytestmark = pytest.mark.cpu

_LIMIT_SECONDS = 10.0


@pytest.fixture
def keys() -> ChannelKeys:
    public, secret = zmq.curve_keypair()
    return ChannelKeys(server_public=public, server_secret=secret)


@pytest.fixture
def loop(tmp_path: Path, keys: ChannelKeys) -> Iterator[ZmqLoopPort]:
    loop = ZmqLoopPort(tmp_path, 2, "127.0.0.1", keys)
    yield loop
    loop.close()


def _first_word(loop: ZmqLoopPort) -> int:
    """The rank of the next worker that says anything."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while (received := loop.receive_worker()) is None:
        assert time.monotonic() < deadline, "no worker came"
        loop.wait(0.1)
    return received[0]


def test_one_worker_over_tcp_and_one_of_the_same_host(
    loop: ZmqLoopPort, keys: ChannelKeys, tmp_path: Path
) -> None:
    assert loop.plan_channel is not None and loop.plan_channel.startswith("tcp://127.0.0.1:")
    public = ChannelKeys(server_public=keys.server_public)
    workers = [
        ZmqWorkerPort(plan_channel_in(tmp_path), 0, public),
        ZmqWorkerPort(loop.plan_channel, 1, public),
    ]
    for rank, worker in enumerate(workers):
        worker.send(WorkerAllocated(worker=f"worker[{rank},0]"))
        assert _first_word(loop) == rank
    loop.send_workers(RunPlan(encoded_plan=b"plan"))
    loop.send_worker(1, Shutdown())
    assert [worker.receive() for worker in workers] == [RunPlan(encoded_plan=b"plan")] * 2
    assert workers[1].receive() == Shutdown()
    for worker in workers:
        worker.close()


def test_who_has_not_the_key_is_not_heard(loop: ZmqLoopPort) -> None:
    assert loop.plan_channel is not None
    wrong = ChannelKeys(server_public=zmq.curve_keypair()[0])
    strangers = [ZmqWorkerPort(loop.plan_channel, 1, keys) for keys in (None, wrong)]
    for stranger in strangers:
        # Who was turned away before it could speak has nobody to send to, and would wait for ever.
        stranger._socket.setsockopt(zmq.SNDTIMEO, 500)
        with contextlib.suppress(zmq.Again):
            stranger.send(WorkerAllocated(worker="worker[1,0]"))
    loop.wait(0.5)
    assert loop.receive_worker() is None
    # What they have not got rid of is tried for a while.
    in_threads([stranger.close for stranger in strangers])


def test_a_worker_that_is_started_again_takes_over_its_name(
    loop: ZmqLoopPort, keys: ChannelKeys
) -> None:
    assert loop.plan_channel is not None
    public = ChannelKeys(server_public=keys.server_public)
    workers = []
    for _ in range(2):
        workers.append(ZmqWorkerPort(loop.plan_channel, 1, public))
        workers[-1].send(WorkerAllocated(worker="worker[1,0]"))
        assert _first_word(loop) == 1
    first, second = workers
    loop.send_worker(1, Shutdown())
    assert second.receive() == Shutdown()
    first.close()
    second.close()


def test_a_worker_carries_out_what_came_and_then_notices_the_break(
    tmp_path: Path, keys: ChannelKeys
) -> None:
    loop = ZmqLoopPort(tmp_path, 1, "127.0.0.1", keys)
    assert loop.plan_channel is not None
    worker = ZmqWorkerPort(loop.plan_channel, 0, ChannelKeys(server_public=keys.server_public))
    worker.send(WorkerAllocated(worker="worker[0,0]"))
    assert _first_word(loop) == 0
    loop.send_worker(0, RunPlan(encoded_plan=b"last"))
    loop.close()
    assert worker.receive() == RunPlan(encoded_plan=b"last")
    with pytest.raises(HostLostError, match="the connection to the engine loop broke"):
        worker.receive()
    worker.close()
