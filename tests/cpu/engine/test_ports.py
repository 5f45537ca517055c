"""The two carriers keep one contract: order, addresses, timeouts, and last words."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import zmq

from stagecoach.engine.contact import plan_channel_in
from stagecoach.engine.messages import (
    Abort,
    EngineFailed,
    FromWorker,
    GetStats,
    Hello,
    LoadProgress,
    Outputs,
    RunPlan,
    Shutdown,
    ToClient,
    ToEngine,
    TokenMasks,
    ToWorker,
    WorkerAllocated,
    WorkerFailed,
)
from stagecoach.engine.ports import (
    ClientPort,
    LoopPort,
    QueueHub,
    WorkerPort,
    ZmqClientPort,
    ZmqLoopPort,
    ZmqWorkerPort,
)
from stagecoach.schedule.commit import Progress
from tests.cpu.engine.fakes import in_threads, submit

pytestmark = pytest.mark.cpu

NUM_WORKERS = 3
_SECONDS = 20.0


class Carrier(Protocol):
    """All ports of one engine."""

    loop: LoopPort
    workers: list[WorkerPort]
    client: ClientPort

    def close(self) -> None: ...


class QueueCarrier:
    def __init__(self) -> None:
        hub = QueueHub(NUM_WORKERS)
        self.loop: LoopPort = hub
        self.client: ClientPort = hub
        self.workers: list[WorkerPort] = [hub.worker_port(rank) for rank in range(NUM_WORKERS)]

    def close(self) -> None:
        for port in (*self.workers, self.client, self.loop):
            port.close()


class ZmqCarrier:
    def __init__(self) -> None:
        # Short, because the path of an ipc socket is.
        self.folder = Path(tempfile.mkdtemp(prefix="ports-"))
        self.client: ClientPort = ZmqClientPort(self.folder, client=0)
        self.workers: list[WorkerPort] = [
            ZmqWorkerPort(plan_channel_in(self.folder), rank) for rank in range(NUM_WORKERS)
        ]
        # The last to come, as in an engine whose loop is the slowest to start.
        self.loop: LoopPort = ZmqLoopPort(self.folder, NUM_WORKERS)

    def close(self) -> None:
        for port in (*self.workers, self.client, self.loop):
            port.close()
        shutil.rmtree(self.folder)


@pytest.fixture(params=[QueueCarrier, ZmqCarrier], ids=["queues", "zmq"])
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    carrier = request.param()
    # A worker and a client can be reached once they have spoken.
    for rank, port in enumerate(carrier.workers):
        port.send(WorkerAllocated(worker=str(rank)))
    assert sorted(rank for rank, _ in from_workers(carrier.loop, NUM_WORKERS)) == [0, 1, 2]
    assert from_clients(carrier.loop, 1) == [(0, Hello())]
    yield carrier
    carrier.close()


@pytest.fixture
def zmq_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ports-"))
    yield folder
    shutil.rmtree(folder)


def from_clients(loop: LoopPort, count: int) -> list[tuple[int, ToEngine]]:
    received: list[tuple[int, ToEngine]] = []
    deadline = time.monotonic() + _SECONDS
    while len(received) < count:
        loop.wait(max(0.0, deadline - time.monotonic()))
        received += loop.receive_clients()
        assert len(received) >= count or time.monotonic() < deadline, f"only {len(received)} came"
    return received


def from_workers(loop: LoopPort, count: int) -> list[tuple[int, FromWorker]]:
    received: list[tuple[int, FromWorker]] = []
    deadline = time.monotonic() + _SECONDS
    while len(received) < count:
        loop.wait(max(0.0, deadline - time.monotonic()))
        while (item := loop.receive_worker()) is not None:
            received.append(item)
        assert len(received) >= count or time.monotonic() < deadline, f"only {len(received)} came"
    return received


def at_client(client: ClientPort) -> ToClient:
    message = client.receive(_SECONDS)
    assert message is not None, "nothing came"
    return message


def progress(worker: int, number: int) -> LoadProgress:
    return LoadProgress(worker=str(worker), done_bytes=number, total_bytes=1000)


def test_a_clients_messages_keep_their_order_and_kind(carrier: Carrier) -> None:
    sent: list[ToEngine] = []
    for number in range(100):
        sent += [submit(number), GetStats(query_id=number), Abort(request_ids=(number,))]
    for message in sent:
        carrier.client.send(message)
    assert from_clients(carrier.loop, len(sent)) == [(0, message) for message in sent]


def test_messages_to_a_client_keep_their_order(carrier: Carrier) -> None:
    sent = [Outputs(items=(Progress(request_id=number),)) for number in range(200)]
    for message in sent:
        carrier.loop.send_client(0, message)
    assert [at_client(carrier.client) for _ in sent] == sent


def test_every_worker_gets_every_message_in_order(carrier: Carrier) -> None:
    sent = [RunPlan(encoded_plan=bytes([number])) for number in range(100)]
    for message in sent:
        carrier.loop.send_workers(message)
    calls: list[Callable[[], list[object]]] = [
        lambda port=port: [port.receive() for _ in sent] for port in carrier.workers
    ]
    assert in_threads(calls) == [sent] * NUM_WORKERS


def test_what_is_for_one_worker_keeps_its_place_among_what_is_for_all(carrier: Carrier) -> None:
    plans = [RunPlan(encoded_plan=bytes([number])) for number in range(20)]
    masks = [TokenMasks(step=number, masks=bytes(64)) for number in range(20)]
    for plan, mask in zip(plans, masks, strict=True):
        carrier.loop.send_workers(plan)
        carrier.loop.send_worker(1, mask)
    expected: list[list[ToWorker]] = [list(plans) for _ in range(NUM_WORKERS)]
    expected[1] = [item for pair in zip(plans, masks, strict=True) for item in pair]
    calls: list[Callable[[], list[ToWorker]]] = [
        lambda port=port, items=items: [port.receive() for _ in items]
        for port, items in zip(carrier.workers, expected, strict=True)
    ]
    assert in_threads(calls) == expected


def test_any_thread_wakes_the_loop_once(carrier: Carrier) -> None:
    from_clients(carrier.loop, 0)

    def wait() -> float:
        began = time.monotonic()
        carrier.loop.wait(_SECONDS)
        return time.monotonic() - began

    def wake() -> float:
        time.sleep(0.05)
        carrier.loop.wake()
        return 0.0

    # While it waits; and a ring before the wait is not lost, nor are two of them two.
    assert in_threads([wait, wake])[0] < _SECONDS / 2
    carrier.loop.wake()
    carrier.loop.wake()
    assert wait() < _SECONDS / 2
    began = time.monotonic()
    carrier.loop.wait(0.05)
    assert time.monotonic() - began >= 0.04


def test_a_ring_behind_the_end_is_no_error(carrier: Carrier) -> None:
    carrier.loop.close()
    carrier.loop.wake()


def test_replies_carry_their_workers_rank_and_keep_its_order(carrier: Carrier) -> None:
    def speak(rank: int) -> None:
        for number in range(50):
            carrier.workers[rank].send(progress(rank, number))

    in_threads([lambda rank=rank: speak(rank) for rank in range(NUM_WORKERS)])
    received = from_workers(carrier.loop, 50 * NUM_WORKERS)
    for rank in range(NUM_WORKERS):
        assert [message for sender, message in received if sender == rank] == [
            progress(rank, number) for number in range(50)
        ]


def test_a_client_may_send_from_any_thread(carrier: Carrier) -> None:
    def ask(thread: int) -> None:
        for number in range(50):
            carrier.client.send(GetStats(query_id=1000 * thread + number))

    in_threads([lambda thread=thread: ask(thread) for thread in range(4)])
    received = [message.query_id for _, message in from_clients(carrier.loop, 200)]  # type: ignore[union-attr]
    for thread in range(4):
        mine = [query_id for query_id in received if query_id // 1000 == thread]
        assert mine == [1000 * thread + number for number in range(50)]


def test_big_messages_arrive_whole(carrier: Carrier) -> None:
    plan = RunPlan(encoded_plan=os.urandom(8 << 20))
    carrier.loop.send_workers(plan)
    calls = [port.receive for port in carrier.workers]
    assert in_threads(calls) == [plan] * NUM_WORKERS
    long_prompt = submit(1, num_prompt_tokens=300_000)
    carrier.client.send(long_prompt)
    assert from_clients(carrier.loop, 1) == [(0, long_prompt)]
    outputs = Outputs(items=(Progress(request_id=1, token_ids=tuple(range(300_000))),))
    carrier.loop.send_client(0, outputs)
    assert at_client(carrier.client) == outputs


def test_a_receive_without_a_message_ends_with_its_time(carrier: Carrier) -> None:
    began = time.monotonic()
    assert carrier.client.receive(0.05) is None
    assert time.monotonic() - began >= 0.04
    assert carrier.loop.receive_worker() is None
    assert carrier.loop.receive_clients() == []


def test_the_loop_waits_as_long_as_it_says(carrier: Carrier) -> None:
    began = time.monotonic()
    carrier.loop.wait(0.05)
    assert time.monotonic() - began >= 0.04


@pytest.mark.parametrize("speaker", ["client", "worker"])
def test_the_loop_wakes_for_whoever_speaks(carrier: Carrier, speaker: str) -> None:
    def wait() -> None:
        carrier.loop.wait(None)

    def speak() -> None:
        if speaker == "client":
            carrier.client.send(Shutdown())
        else:
            carrier.workers[1].send(progress(1, 1))

    in_threads([wait, speak])
    clients, worker = carrier.loop.receive_clients(), carrier.loop.receive_worker()
    assert clients == ([(0, Shutdown())] if speaker == "client" else [])
    assert worker == ((1, progress(1, 1)) if speaker == "worker" else None)


def test_a_waiting_message_ends_the_wait_at_once(carrier: Carrier) -> None:
    carrier.client.send(Shutdown())
    in_threads([lambda: carrier.loop.wait(None)])
    in_threads([lambda: carrier.loop.wait(None)])
    assert carrier.loop.receive_clients() == [(0, Shutdown())]


def test_a_send_in_the_middle_of_a_send_waits_for_nobody(
    zmq_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector runs in any thread at any moment, and may end a stream."""
    loop = ZmqLoopPort(zmq_folder, 0)
    client = ZmqClientPort(zmq_folder, 0)
    first, nested = GetStats(query_id=1), Abort(request_ids=(2,))
    send_multipart = zmq.Socket.send_multipart
    inside = [nested]

    def interrupted(socket: Any, parts: Any) -> Any:
        if inside:
            client.send(inside.pop())
        return send_multipart(socket, parts)

    try:
        assert from_clients(loop, 1) == [(0, Hello())]
        monkeypatch.setattr(zmq.Socket, "send_multipart", interrupted)
        in_threads([lambda: client.send(first)])
        assert from_clients(loop, 2) == [(0, first), (0, nested)]
    finally:
        client.close()
        loop.close()


def test_several_clients_are_told_apart(zmq_folder: Path) -> None:
    loop = ZmqLoopPort(zmq_folder, 0)
    clients = {number: ZmqClientPort(zmq_folder, number) for number in (0, 1, 12)}
    try:
        assert {client for client, _ in from_clients(loop, 3)} == set(clients)
        for number, client in clients.items():
            client.send(GetStats(query_id=number))
        assert sorted((client, message) for client, message in from_clients(loop, 3)) == sorted(
            (number, GetStats(query_id=number)) for number in clients
        )
        for number in clients:
            loop.send_client(number, EngineFailed(kind="EngineDeadError", reason=str(number)))
        for number, client in clients.items():
            message = at_client(client)
            assert isinstance(message, EngineFailed) and message.reason == str(number)
            assert client.receive(0) is None
    finally:
        for client in clients.values():
            client.close()
        loop.close()


def test_the_loops_last_words_reach_everybody(carrier: Carrier) -> None:
    failed = EngineFailed(kind="EngineDeadError", reason="x" * (1 << 20))
    carrier.loop.send_client(0, failed)
    carrier.loop.send_workers(Shutdown())
    carrier.loop.close()
    assert at_client(carrier.client) == failed
    assert in_threads([port.receive for port in carrier.workers]) == [Shutdown()] * NUM_WORKERS


def test_the_last_words_of_a_worker_and_a_client_reach_the_loop(carrier: Carrier) -> None:
    failed = WorkerFailed(worker="1", kind="RuntimeError", reason="x" * (1 << 20))
    carrier.workers[1].send(failed)
    carrier.workers[1].close(has_last_words=True)
    carrier.client.send(Shutdown())
    carrier.client.close()
    assert from_workers(carrier.loop, 1) == [(1, failed)]
    assert from_clients(carrier.loop, 1) == [(0, Shutdown())]


def test_ports_close_though_nobody_ever_listened(zmq_folder: Path) -> None:
    client, worker = ZmqClientPort(zmq_folder, 0), ZmqWorkerPort(plan_channel_in(zmq_folder), 0)
    client.send(Shutdown())
    worker.send(WorkerAllocated(worker="0"))
    in_threads([worker.close], timeout_seconds=2)
    in_threads([client.close], timeout_seconds=10)
    # A late submitter finds the port closed and says nothing.
    client.send(Shutdown())


def test_a_client_that_is_gone_disturbs_nobody(zmq_folder: Path) -> None:
    loop = ZmqLoopPort(zmq_folder, 0)
    gone, stays = ZmqClientPort(zmq_folder, 0), ZmqClientPort(zmq_folder, 1)
    try:
        from_clients(loop, 2)
        gone.close()
        for client in (0, 1, 7):
            loop.send_client(client, Outputs(items=()))
        assert at_client(stays) == Outputs(items=())
    finally:
        stays.close()
        loop.close()
