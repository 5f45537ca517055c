"""Several API processes in front of one engine.

Owns the engine, the sockets that listen, and the life of the API processes: one that ends
unasked is replaced under a new client number, after the engine has forgotten what it had open;
one that ends before it ever served ends the server. Answers nothing itself.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NamedTuple

from stagecoach.api.open_counts import OpenCounts, shared_numbers
from stagecoach.api.processes.api_process import SERVING, Place, run_api
from stagecoach.api.processes.listeners import listening
from stagecoach.api.processes.server import (
    DEATH_LINE,
    ENDING_LINE,
    LAST_WORDS_SECONDS,
    SUPERVISOR_SIGNAL,
)
from stagecoach.api.settings import ServerSettings
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.attach import tell_failure
from stagecoach.engine.child_processes import (
    apart_from_caller,
    describe_ending,
    end_processes,
)
from stagecoach.engine.client import EngineClient
from stagecoach.engine.launch import ProcessEngine
from stagecoach.errors import ConfigError, EngineDeadError
from stagecoach.observe.log import get_logger

_log = get_logger(__name__)

# How soon the death of the engine is passed on.
_POLL_SECONDS = 0.2
# Beyond what its event loop allows itself, for a process to end.
_END_SECONDS = 5


def supervise(config: ResolvedConfig, settings: ServerSettings, version: str) -> None:
    """Serve with `settings.api_server_count` processes until a signal comes.

    Raises:
        ConfigError: the address cannot be listened on, or the engine is none of processes.
        ConfigError, CheckpointError, EngineDeadError: why the engine did not load.
        EngineDeadError: an API process ended before it served.
    """
    if config.engine.distributed_executor_backend == "uni":
        raise ConfigError(
            f"--api-server-count={settings.api_server_count} and "
            "--distributed-executor-backend=uni: refused: an engine of threads can only be "
            "reached from its own process"
        )
    with listening(settings, settings.api_server_count) as listeners:
        client = EngineClient(config, is_awaited=False)
        supervisor = _Supervisor(client, settings, version, listeners)
        try:
            with _signals() as signals:
                supervisor.run(signals)
        finally:
            supervisor.end_all()
            client.close(in_order=not supervisor.is_forced)


class _Child(NamedTuple):
    place: Place
    process: BaseProcess
    line: Connection


class _Supervisor:
    """Starts, watches and ends the API processes of one engine."""

    def __init__(
        self,
        client: EngineClient,
        settings: ServerSettings,
        version: str,
        listeners: Sequence[socket.socket],
    ) -> None:
        assert isinstance(client.engine, ProcessEngine), "checked before it was started"
        self._client = client
        self._folder = client.engine.folder
        self._settings = settings
        self._version = version
        self._listeners = listeners
        self._children: dict[int, _Child] = {}  # by the number of their place
        self._serving: set[int] = set()
        self._numbers = shared_numbers(settings.api_server_count)
        self._last_client = 0
        self._has_told = False
        self._deadline: float | None = None  # once it drains
        self.is_forced = False
        _share_metrics(self._folder)

    def run(self, signals: socket.socket) -> None:
        """Start all and return when all have ended, which a signal asks them to.

        Raises:
            StagecoachError: as of `supervise`.
        """
        for number in range(self._settings.api_server_count):
            self._start(number)
        while self._children:
            children = list(self._children.values())
            sources: list[socket.socket | Connection | int] = [signals]
            for child in children:
                sources += [child.line, child.process.sentinel]
            ready = wait(sources, _POLL_SECONDS)
            if signals in ready:
                for _ in signals.recv(16):
                    self._obey()
            for child in children:
                if child.line in ready:
                    self._listen(child)
                if child.process.sentinel in ready:
                    self._note_end(child)
            self._check_engine()
            if self._deadline is not None and time.monotonic() > self._deadline:
                return

    def _start(self, number: int) -> None:
        self._last_client += 1
        place = Place(
            number,
            self._last_client,
            self._folder,
            self._numbers,
            is_loaded=self._client.ready is not None,
        )
        line, childs_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=run_api,
            args=(
                self._client.config,
                self._settings,
                self._version,
                place,
                self._listeners[number],
                childs_end,
            ),
            name=f"api[{number}]",
            daemon=True,
        )
        with apart_from_caller():
            process.start()
        childs_end.close()
        self._children[number] = _Child(place, process, line)
        if self._has_told and self._client.failure is not None:
            tell_failure(line, self._client.failure)

    def _listen(self, child: _Child) -> None:
        with contextlib.suppress(EOFError, OSError):
            if child.line.recv() == SERVING:
                self._serving.add(child.place.client)
                if len(self._serving) == self._settings.api_server_count:
                    names = ", ".join(self._settings.served_model_names)
                    _log.info("serving %s with %d API processes", names, len(self._serving))

    def _note_end(self, child: _Child) -> None:
        """
        Raises:
            EngineDeadError: it had not served yet, so another one would not either.
        """
        number, client, *_ = child.place
        child.process.join()
        child.line.close()
        self._client.forget_client(client)
        OpenCounts(self._numbers, number).clear()
        del self._children[number]
        if self._deadline is not None:
            return
        ending = f"api[{number}] {describe_ending(child.process.exitcode)}"
        self._check_engine()
        if client not in self._serving and self._client.failure is None:
            raise EngineDeadError(f"{ending} before it served")
        _log.error("%s; another one takes its place", ending)
        self._start(number)

    def _check_engine(self) -> None:
        """
        Raises:
            StagecoachError: why the engine did not load.
        """
        failure = self._client.failure
        if failure is None or self._has_told:
            return
        if self._client.ready is None and self._deadline is None:
            raise failure
        self._has_told = True
        _log.error(DEATH_LINE, type(failure).__name__, failure)
        for child in self._children.values():
            tell_failure(child.line, failure)

    def _obey(self) -> None:
        """A signal: the first drains, the second ends."""
        self.is_forced = self._deadline is not None
        seconds = self._settings.shutdown_timeout_seconds + LAST_WORDS_SECONDS + _END_SECONDS
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds
            num_open = OpenCounts(self._numbers, 0).num_requests
            _log.info(ENDING_LINE, num_open, self._settings.shutdown_timeout_seconds)
        # Nobody new is to wait for a server that ends.
        for listener in self._listeners:
            listener.close()
        for child in self._children.values():
            if child.process.is_alive() and child.process.pid is not None:
                os.kill(child.process.pid, SUPERVISOR_SIGNAL)

    def end_all(self) -> None:
        """End what is left by force."""
        end_processes([child.process for child in self._children.values()], grace_seconds=0.0)
        for child in self._children.values():
            child.line.close()


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Where a byte arrives for each SIGTERM and SIGINT."""
    receiver, sender = socket.socketpair()
    sender.settimeout(0.0)

    def tell(number: int, frame: FrameType | None) -> None:
        sender.send(b"s")

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield receiver
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        receiver.close()
        sender.close()


def _share_metrics(folder: os.PathLike[str]) -> None:
    """Have the API processes keep their metrics in files there, so that any of them tells all.

    The library looks for the variable when it is first imported, in each of them.
    """
    path = os.path.join(folder, "metrics")
    os.mkdir(path)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = path  # noqa: TID251
