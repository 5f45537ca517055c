"""Where messages leave and enter: one port for the loop, one a worker, one a client.

Two carriers with one contract: ZeroMQ between processes (ipc sockets in a private folder),
and queues between threads of one process. Messages to one receiver keep their order.
Knows nothing of what the messages mean.
"""

import contextlib
import queue
import threading
from collections import deque
from pathlib import Path
from socket import socketpair
from typing import Protocol

import zmq

from stagecoach.engine import messages
from stagecoach.engine.contact import ChannelKeys, plan_channel_in
from stagecoach.engine.messages import FromWorker, ToClient, ToEngine, ToWorker
from stagecoach.errors import HostLostError

# A request id is client index << CLIENT_SHIFT | a number of that client.
CLIENT_SHIFT = 40

_MOST_RINGS = 1 << 16
# Between hosts. A lost host is noticed earlier, by those who wait for all of them.
_MOST_COLONS_OF_IPV4 = 2  # tcp://10.0.0.1:5555
_HEARTBEAT_MS = 5_000
_SILENCE_MS = 60_000


class LoopPort(Protocol):
    """The engine loop's side."""

    def wait(self, timeout_seconds: float | None) -> None:
        """Return when a message is there, or `wake` was called, or the time is over; None waits
        for ever."""

    def wake(self) -> None:
        """End the present `wait`, or else the next; from any thread, also after `close`."""

    def receive_clients(self) -> list[tuple[int, ToEngine]]:
        """All messages that are there, with the index of the client."""

    def receive_worker(self) -> tuple[int, FromWorker] | None:
        """The next worker message that is there, with the worker's rank."""

    def send_workers(self, message: ToWorker) -> None:
        """To every worker."""

    def send_worker(self, rank: int, message: ToWorker) -> None:
        """To one worker."""

    def send_client(self, client: int, message: ToClient) -> None: ...

    def close(self) -> None: ...


class WorkerPort(Protocol):
    """One worker's side."""

    def receive(self) -> ToWorker: ...

    def receive_now(self) -> ToWorker | None:
        """The next message if it is there."""

    def send(self, message: FromWorker) -> None: ...


class ClientPort(Protocol):
    """One client's side: `send` from any thread, `receive` from one."""

    def send(self, message: ToEngine) -> None: ...

    def receive(self, timeout_seconds: float) -> ToClient | None: ...

    def close(self) -> None: ...


class ZmqLoopPort:
    """Binds the sockets in `folder`, and that for workers also at an address of this host."""

    def __init__(
        self,
        folder: Path,
        num_workers: int,
        address: str | None = None,
        keys: ChannelKeys | None = None,
    ) -> None:
        """`address`: where workers of other hosts come in; they must have the keys."""
        self._context = zmq.Context()
        self._commands = _socket(self._context, zmq.PULL)
        self._commands.bind(_address(folder, "commands"))
        self._clients = _socket(self._context, zmq.ROUTER)
        self._clients.bind(_address(folder, "clients"))
        self._workers = _socket(self._context, zmq.ROUTER)
        # A worker that is started again takes over the name of the one that ended.
        self._workers.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.plan_channel: str | None = None
        if keys is not None:
            assert keys.server_secret is not None, "the loop has the secret key"
            self._workers.curve_server = True
            self._workers.curve_publickey = keys.server_public
            self._workers.curve_secretkey = keys.server_secret
        self._workers.bind(plan_channel_in(folder))
        if address is not None:
            _reach_hosts(self._workers, address)
            self._workers.bind(f"tcp://{_bracketed(address)}:*")
            self.plan_channel = self._workers.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        self._worker_names = [_identity(rank) for rank in range(num_workers)]
        # ZeroMQ's own sockets belong to one thread.
        self._bell, self._bell_rope = socketpair()
        for end in (self._bell, self._bell_rope):
            end.settimeout(0.0)
        self._poller = zmq.Poller()
        for socket in (self._commands, self._clients, self._workers, self._bell):
            self._poller.register(socket, zmq.POLLIN)

    def wait(self, timeout_seconds: float | None) -> None:
        self._poller.poll(None if timeout_seconds is None else round(timeout_seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(_MOST_RINGS)

    def wake(self) -> None:
        # A full buffer wakes as well as one ring more; and after `close` nobody sleeps.
        with contextlib.suppress(OSError):
            self._bell_rope.send(b"!")

    def receive_clients(self) -> list[tuple[int, ToEngine]]:
        received = []
        for socket in (self._clients, self._commands):
            while (parts := _receive_now(socket)) is not None:
                client, data = parts
                received.append((int(client), messages.decode_to_engine(data)))
        return received

    def receive_worker(self) -> tuple[int, FromWorker] | None:
        parts = _receive_now(self._workers)
        if parts is None:
            return None
        return int(parts[0]), messages.decode_from_worker(parts[1])

    def send_workers(self, message: ToWorker) -> None:
        data = messages.encode(message)
        for name in self._worker_names:
            self._workers.send_multipart([name, data])

    def send_worker(self, rank: int, message: ToWorker) -> None:
        self._workers.send_multipart([self._worker_names[rank], messages.encode(message)])

    def send_client(self, client: int, message: ToClient) -> None:
        self._clients.send_multipart([_identity(client), messages.encode(message)])

    def close(self) -> None:
        # Last words (EngineFailed, Shutdown) may still be on their way.
        self._context.destroy(linger=1000)
        self._bell.close()
        self._bell_rope.close()


class ZmqWorkerPort:
    """Connects worker `rank` to the loop."""

    def __init__(self, plan_channel: str, rank: int, keys: ChannelKeys | None = None) -> None:
        """`plan_channel`: where the loop's socket is."""
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.DEALER, _identity(rank))
        self._monitor: zmq.Socket[bytes] | None = None
        if keys is not None:
            self._socket.curve_serverkey = keys.server_public
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        if plan_channel.startswith("tcp:"):
            _reach_hosts(self._socket, plan_channel)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(plan_channel)

    def receive(self) -> ToWorker:
        """
        Raises:
            HostLostError: the connection to the loop's host broke, so messages may be lost.
        """
        if self._monitor is not None:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
            # What came before the break is still carried out.
            if self._socket not in dict(poller.poll()):
                raise HostLostError("the connection to the engine loop broke")
        return messages.decode_to_worker(self._socket.recv())

    def receive_now(self) -> ToWorker | None:
        try:
            return messages.decode_to_worker(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def send(self, message: FromWorker) -> None:
        self._socket.send(messages.encode(message))

    def close(self, *, has_last_words: bool = False) -> None:
        """With last words (WorkerFailed): wait some seconds for the loop to take them."""
        # They may be for a loop that is still starting; other answers nobody may wait for.
        self._context.destroy(linger=3000 if has_last_words else 0)


class ZmqClientPort:
    """Connects client number `client` to the loop."""

    def __init__(self, folder: Path, client: int) -> None:
        self._name = _identity(client)
        self._context = zmq.Context()
        self._outgoing: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._commands = _socket(self._context, zmq.PUSH)
        self._commands.connect(_address(folder, "commands"))
        self._outputs = _socket(self._context, zmq.DEALER, self._name)
        self._outputs.connect(_address(folder, "clients"))
        # The loop can only answer a client that spoke on this socket first.
        hello = messages.encode(messages.Hello())
        self._outputs.send(hello)

    def send(self, message: ToEngine) -> None:
        self._outgoing.append(messages.encode(message))
        # The garbage collector may end a stream, which sends an abort, in the middle of a send
        # of the same thread. So nobody waits: whoever is sending takes the message along.
        while self._outgoing and self._lock.acquire(blocking=False):
            try:
                while self._outgoing:
                    data = self._outgoing.popleft()
                    if not self._commands.closed:
                        self._commands.send_multipart([self._name, data])
            finally:
                self._lock.release()

    def receive(self, timeout_seconds: float) -> ToClient | None:
        if not self._outputs.poll(timeout_seconds * 1000):
            return None
        return messages.decode_to_client(self._outputs.recv())

    def close(self) -> None:
        with self._lock:
            self._context.destroy(linger=200)


class QueueHub:
    """The three kinds of ports for threads of one process."""

    def __init__(self, num_workers: int) -> None:
        self._arrived = threading.Condition()
        self._commands: deque[tuple[int, ToEngine]] = deque()
        self._replies: deque[tuple[int, FromWorker]] = deque()
        self._to_worker: list[queue.SimpleQueue[ToWorker]] = [
            queue.SimpleQueue() for _ in range(num_workers)
        ]
        self._to_client: queue.SimpleQueue[ToClient] = queue.SimpleQueue()
        self._is_woken = False
        self._commands.append((0, messages.Hello()))

    def worker_port(self, rank: int) -> "QueueWorkerPort":
        return QueueWorkerPort(self, rank, self._to_worker[rank])

    def wait(self, timeout_seconds: float | None) -> None:
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._commands or self._replies or self._is_woken, timeout_seconds
            )
            self._is_woken = False

    def wake(self) -> None:
        with self._arrived:
            self._is_woken = True
            self._arrived.notify()

    def receive_clients(self) -> list[tuple[int, ToEngine]]:
        with self._arrived:
            # One by one: the collector may run a `send` of this very thread in between.
            received = []
            while self._commands:
                received.append(self._commands.popleft())
        return received

    def receive_worker(self) -> tuple[int, FromWorker] | None:
        with self._arrived:
            return self._replies.popleft() if self._replies else None

    def send_workers(self, message: ToWorker) -> None:
        for box in self._to_worker:
            box.put(message)

    def send_worker(self, rank: int, message: ToWorker) -> None:
        self._to_worker[rank].put(message)

    def send_client(self, client: int, message: ToClient) -> None:
        assert client == 0, f"one process has one client, not {client}"
        self._to_client.put(message)

    def send(self, message: ToEngine) -> None:
        with self._arrived:
            self._commands.append((0, message))
            self._arrived.notify()

    def receive(self, timeout_seconds: float) -> ToClient | None:
        try:
            return self._to_client.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def reply(self, rank: int, message: FromWorker) -> None:
        with self._arrived:
            self._replies.append((rank, message))
            self._arrived.notify()

    def close(self) -> None:
        return


class QueueWorkerPort:
    """One worker thread's side of a QueueHub."""

    def __init__(self, hub: QueueHub, rank: int, box: "queue.SimpleQueue[ToWorker]") -> None:
        self._hub = hub
        self._rank = rank
        self._box = box

    def receive(self) -> ToWorker:
        return self._box.get()

    def receive_now(self) -> ToWorker | None:
        try:
            return self._box.get_nowait()
        except queue.Empty:
            return None

    def send(self, message: FromWorker) -> None:
        self._hub.reply(self._rank, message)

    def close(self, *, has_last_words: bool = False) -> None:
        """Nothing is on its way: what was said is there."""


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, identity: bytes | None = None):  # type: ignore[no-untyped-def]
    socket = context.socket(kind)
    socket.set_hwm(0)  # nothing is dropped; what is in flight is bounded by the scheduler
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    return socket


def _reach_hosts(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Ready for an address of another host, and to notice when it is gone without a word."""
    if address.count(":") > _MOST_COLONS_OF_IPV4:
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"


def _identity(number: int) -> bytes:
    return str(number).encode()


def _receive_now(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
