"""Start, watch and stop the processes of one engine.

The process that calls `launch` owns the engine: it starts the loop and the workers, notices
within a second when one of them ends, and ends the others. Workers of other hosts are started by
members of the engine there (`hosts/`), which tell of their ends and end with it.

With the `uni` backend the same classes run as threads of the calling process.
"""

import multiprocessing
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine import children
from stagecoach.engine.child_processes import (
    ChildProcesses,
    Ending,
    start_worker,
    worker_context,
)
from stagecoach.engine.contact import ChannelKeys, Contact, HostGate
from stagecoach.engine.hosts.head import Head
from stagecoach.engine.hosts.launchers import meeting_of
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import Shutdown
from stagecoach.engine.ports import ClientPort, QueueHub, ZmqClientPort
from stagecoach.errors import EngineDeadError, RendezvousError, WorkerDiedError
from stagecoach.pipeline.topology import Topology

_STOP_SECONDS = 5.0
# After the first sign of a failure, how long to look for the process that caused it.
_BLAME_SECONDS = 0.3
# How long what a worker has said of its end may take through the loop to the client.
_WORDS_SECONDS = 3.0
# How long members of other hosts are waited for at the end; they wait for their workers.
_MEMBER_SECONDS = 8.0
# For the loop's process to start and say where it listens.
_LOOP_SECONDS = 60.0
_MAX_PARENT_BYTES = 70

# Given workers that ended; True: it is taken care of.
EndingsHandler = Callable[[tuple[Ending, ...]], bool]


class RunningEngine(Protocol):
    """An engine as its user has it."""

    port: ClientPort
    client: int  # which of the engine's clients its port is

    def failure(self, timeout_seconds: float = 0.0) -> EngineDeadError | None:
        """Why the engine ended, once it did unasked; waits that long for it to become known."""

    def stop(self, *, in_order: bool = True) -> None:
        """End everything in order, then (or only) by force; returns when all have ended."""


def launch(config: ResolvedConfig) -> RunningEngine:
    """Start an engine with the backend and the launcher that the config names.

    Raises:
        ConfigError: this process is to run ranks of another one's engine, or cannot be found by
            other hosts.
    """
    if config.engine.distributed_executor_backend == "uni":
        return ThreadEngine(config)
    return ProcessEngine(config)


class ProcessEngine:
    """Engine loop and workers as processes, of this host and of others.

    Attributes:
        endings_handler: asked, in the watcher's thread, before the end of workers is the end of
            the engine; that of the loop or of a host always is.
    """

    client = 0

    def __init__(self, config: ResolvedConfig) -> None:
        self._config = config
        self.endings_handler: EndingsHandler | None = None
        self._failure: EngineDeadError | None = None
        self._has_failed = threading.Event()
        self._is_stopping = threading.Event()
        # What was not asked for: processes that ended, what else is fatal; None: nothing more.
        self._news: queue.SimpleQueue[Ending | EngineDeadError | None] = queue.SimpleQueue()
        self._ranks: tuple[int, ...] = tuple(range(config.engine.num_workers))
        self._contact: Contact | None = None
        meeting = meeting_of(config)
        self._head = Head(config, meeting, self._news.put) if meeting is not None else None
        self._folder = _make_folder()
        self._children = ChildProcesses(self._news.put)
        try:
            if self._head is None:
                self._start_loop(None)
                self._contact = Contact.on_one_host(
                    self._folder,
                    config.engine.num_workers,
                    config.engine.distributed_timeout_seconds,
                )
                self._start_workers(self._ranks, 0)
            else:
                self._ranks = self._head.ranks
                self._begin_meeting(self._head)
            self.port: ClientPort = ZmqClientPort(self._folder, client=self.client)
        except BaseException:
            self._children.close()
            if self._head is not None:
                self._head.end("the engine could not be started")
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._watcher = threading.Thread(target=self._watch, name="engine watcher", daemon=True)
        self._watcher.start()

    @property
    def folder(self) -> Path:
        """Private to this engine: its sockets are there, and it goes when the engine does."""
        return self._folder

    @property
    def process_ids(self) -> dict[str, int]:
        """Process id by name, e.g. `worker[0,1]`, of those on this host."""
        return self._children.process_ids

    def failure(self, timeout_seconds: float = 0.0) -> EngineDeadError | None:
        self._has_failed.wait(timeout_seconds)
        return self._failure

    def stop(self, *, in_order: bool = True) -> None:
        if not self._is_stopping.is_set():
            self._is_stopping.set()
            self.port.send(Shutdown())
        self._news.put(None)
        if self._head is not None:
            # Members wait for their workers, which hear of the end from the loop.
            self._head.end(
                "the engine was stopped",
                in_order=True,
                wait_seconds=_MEMBER_SECONDS if in_order else 1.0,
            )
        self._children.stop(_STOP_SECONDS if in_order else 0.0)
        self._watcher.join()
        self.port.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def respawn(self, ranks: Sequence[int], generation: int) -> None:
        """End what is left of these workers by force, and start them anew for this generation.

        That they were ended is not told. From any thread; returns when those of this host are
        started.

        Raises:
            WorkerDiedError: one of this host cannot be ended.
        """
        own = [rank for rank in ranks if rank in self._ranks]
        topology = Topology.of(self._config.engine)
        self._children.kill([topology.worker(rank).name for rank in own])
        if self._head is not None:
            self._head.start_workers(ranks, generation)
        self._start_workers(own, generation)

    def _start_loop(self, gate: HostGate | None) -> None:
        # The loop must not hold torch.
        context = multiprocessing.get_context("spawn")
        self._children.start(
            "engine loop", context.Process, children.run_loop, self._config, self._folder, gate
        )

    def _start_workers(self, ranks: Sequence[int], generation: int) -> None:
        assert self._contact is not None, "workers are told where to find each other"
        for rank in ranks:
            start_worker(self._children, self._config, rank, self._contact, generation)

    def _begin_meeting(self, head: Head) -> None:
        """Start the loop, and the workers once all hosts are there."""
        public, secret = zmq.curve_keypair()
        keys = ChannelKeys(server_public=public, server_secret=secret)
        told, tells = multiprocessing.Pipe(duplex=False)
        self._start_loop(HostGate(head.interface.address, keys, tells))
        tells.close()

        def meet() -> None:
            try:
                if not told.poll(_LOOP_SECONDS):
                    raise WorkerDiedError("the engine loop did not start")
                contact = head.gather(told.recv(), keys)
                context = worker_context(self._config)
                self._children.start(
                    "store",
                    context.Process,
                    children.run_store,
                    head.store_listener,
                    is_server=True,
                )
                head.store_listener.close()
                self._contact = contact
                self._start_workers(self._ranks, 0)
            except EngineDeadError as error:
                self._news.put(error)
            except EOFError:
                # The loop's end is told by itself.
                return
            except Exception as error:  # noqa: BLE001 - the thread ends here; who waits is told
                self._news.put(RendezvousError(str(error) or repr(error)))

        threading.Thread(target=meet, name="meeting", daemon=True).start()

    def _watch(self) -> None:
        while True:
            news = self._news.get()
            endings: list[Ending] = []
            handler = self.endings_handler
            # Who handles ends needs none to be blamed for the others.
            fatal = self._collect(news, endings, _BLAME_SECONDS if handler is None else 0.0)
            if self._is_stopping.is_set():
                return
            is_only_workers = fatal is None and all(item.rank is not None for item in endings)
            if is_only_workers and handler is not None:
                if handler(tuple(endings)):
                    continue
                fatal = self._collect(None, endings, _BLAME_SECONDS)
            names = [item.name for item in endings]
            if fatal is None and not any(item.is_killed for item in endings):
                # Nobody was killed, so whoever ended first has said why.
                fatal = self._collect(None, endings, _WORDS_SECONDS)
            self._fail(fatal or WorkerDiedError(_describe(endings, names[:1])))
            return

    def _collect(
        self, first: Ending | EngineDeadError | None, endings: list[Ending], seconds: float
    ) -> EngineDeadError | None:
        """Add what has ended within the time; what else is fatal is returned at once."""
        deadline = time.monotonic() + seconds
        news = first
        num_processes = len(self._children.process_ids)
        while not self._is_stopping.is_set():
            if isinstance(news, EngineDeadError):
                return news
            if news is not None:
                endings.append(news)
            if len(endings) >= num_processes:
                return None
            try:
                news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
        return None

    def _fail(self, failure: EngineDeadError) -> None:
        self._failure = failure
        self._has_failed.set()
        self._children.stop(0.0)
        if self._head is not None:
            self._head.end(str(failure), wait_seconds=_MEMBER_SECONDS)
        # Who has this engine may be killed before it asks for a stop.
        shutil.rmtree(self._folder, ignore_errors=True)


def _describe(endings: Sequence[Ending], first_ended: Sequence[str]) -> str:
    """Who died, killed ones first: a neighbour's broken connection is only a consequence."""
    killed = [item for item in endings if item.is_killed]
    blamed = killed or [item for item in endings if item.name in first_ended]
    return "; ".join(f"{item.name} {item.words}" for item in blamed)


class ThreadEngine:
    """Engine loop and workers as threads of this process."""

    client = 0

    def __init__(self, config: ResolvedConfig) -> None:
        self._failure: EngineDeadError | None = None
        self._has_failed = threading.Event()
        topology = Topology.of(config.engine)
        hub = QueueHub(topology.num_workers)
        self.port: ClientPort = hub
        self._threads = children.start_worker_threads(config, topology, hub)
        loop_thread = threading.Thread(
            target=self._run_loop, args=(EngineLoop(config, hub),), name="engine loop", daemon=True
        )
        loop_thread.start()
        self._threads.append(loop_thread)

    def failure(self, timeout_seconds: float = 0.0) -> EngineDeadError | None:
        self._has_failed.wait(timeout_seconds)
        return self._failure

    def stop(self, *, in_order: bool = True) -> None:
        self.port.send(Shutdown())
        deadline = time.monotonic() + (_STOP_SECONDS if in_order else 0.0)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run_loop(self, loop: EngineLoop) -> None:
        try:
            loop.run()
        except EngineDeadError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - the loop ends here; clients get the cause
            self._failure = EngineDeadError(str(error) or repr(error))
        if self._failure is not None:
            self._has_failed.set()


def _make_folder() -> Path:
    """A private folder for sockets, whose paths must not be longer than about 100 bytes."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="stagecoach-", dir=parent))
