"""Start, watch and stop the processes of one engine.

The process that calls `launch` owns the engine: it starts the loop and the workers, notices
within a second when one of them ends, and ends the others. Each child holds one end of a
lifeline pipe, so that it ends with its owner however that dies; none runs the caller's own code.

With the `uni` backend the same classes run as threads of the calling process.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from stagecoach.config import ResolvedConfig
from stagecoach.engine import children
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import Shutdown
from stagecoach.engine.ports import ClientPort, QueueHub, ZmqClientPort
from stagecoach.errors import EngineDeadError, WorkerDiedError
from stagecoach.pipeline.topology import Topology

_STOP_SECONDS = 5.0
# After the first sign of a failure, how long to look for the process that caused it.
_BLAME_SECONDS = 0.3
# How long what a worker has said of its end may take through the loop to the client.
_WORDS_SECONDS = 3.0
_MAX_PARENT_BYTES = 70


class RunningEngine(Protocol):
    """An engine as its user has it."""

    port: ClientPort
    client: int  # which of the engine's clients its port is

    def failure(self, timeout_seconds: float = 0.0) -> EngineDeadError | None:
        """Why the engine ended, once it did unasked; waits that long for it to become known."""

    def stop(self, *, in_order: bool = True) -> None:
        """End everything in order, then (or only) by force; returns when all have ended."""


def launch(config: ResolvedConfig) -> RunningEngine:
    """Start an engine with the backend that the config names."""
    if config.engine.distributed_executor_backend == "uni":
        return ThreadEngine(config)
    return ProcessEngine(config)


class ProcessEngine:
    """Engine loop and workers as processes on this host."""

    client = 0

    def __init__(self, config: ResolvedConfig) -> None:
        self._folder = _make_folder()
        self._failure: EngineDeadError | None = None
        self._has_failed = threading.Event()
        self._is_stopping = threading.Event()
        topology = Topology.of(config.engine)
        # The loop must not hold torch; workers fork from a server that has imported it.
        loop_context = multiprocessing.get_context("spawn")
        worker_context = multiprocessing.get_context("forkserver")
        preloaded = ["stagecoach.engine.worker"]
        if config.device == "cuda":
            # Imported once, for all workers; it touches no GPU, which no fork may have done.
            preloaded.append("triton")
        worker_context.set_forkserver_preload(preloaded)
        self._processes: dict[str, BaseProcess] = {}
        self._lifelines: list[Connection] = []
        try:
            with apart_from_caller():
                self._start("engine loop", loop_context.Process, children.run_loop, config)
                for worker in topology.workers:
                    self._start(
                        worker.name, worker_context.Process, children.run_worker, config, worker
                    )
            self.port: ClientPort = ZmqClientPort(self._folder, client=self.client)
        except BaseException:
            self._cut_lifelines()
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
        """Process id by name, e.g. `worker[0,1]`."""
        return {
            name: process.pid
            for name, process in self._processes.items()
            if process.pid is not None
        }

    def failure(self, timeout_seconds: float = 0.0) -> EngineDeadError | None:
        self._has_failed.wait(timeout_seconds)
        return self._failure

    def stop(self, *, in_order: bool = True) -> None:
        if not self._is_stopping.is_set():
            self._is_stopping.set()
            self.port.send(Shutdown())
        end_processes(
            list(self._processes.values()), grace_seconds=_STOP_SECONDS if in_order else 0.0
        )
        self._cut_lifelines()
        self._watcher.join()
        self.port.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(
        self,
        name: str,
        process_class: Callable[..., BaseProcess],
        target: Callable[..., None],
        *arguments: object,
    ) -> None:
        lifeline, owners_end = multiprocessing.Pipe(duplex=False)
        self._lifelines.append(owners_end)
        process = process_class(
            target=target, args=(*arguments, self._folder, lifeline), name=name, daemon=True
        )
        process.start()
        self._processes[name] = process
        lifeline.close()

    def _cut_lifelines(self) -> None:
        for lifeline in self._lifelines:
            lifeline.close()

    def _watch(self) -> None:
        ended = wait([process.sentinel for process in self._processes.values()])
        if self._is_stopping.is_set():
            return
        processes = list(self._processes.values())
        _join_all(processes, _BLAME_SECONDS)
        if not any((process.exitcode or 0) < 0 for process in processes):
            # Nobody was killed, so whoever ended first has said why.
            _join_all(processes, _WORDS_SECONDS)
        first_ended = [
            name for name, process in self._processes.items() if process.sentinel in ended
        ]
        self._failure = WorkerDiedError(self._describe(first_ended))
        self._has_failed.set()
        end_processes(list(self._processes.values()), grace_seconds=0.0)

    def _describe(self, first_ended: list[str]) -> str:
        """Who died, killed ones first: a neighbour's broken connection is only a consequence."""
        exit_codes = {name: process.exitcode for name, process in self._processes.items()}
        killed = [name for name, code in exit_codes.items() if code is not None and code < 0]
        names = killed or first_ended
        return "; ".join(f"{name} {describe_ending(exit_codes[name])}" for name in names)


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


@contextmanager
def apart_from_caller() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C and SIGTERM, and import no main module of the caller.

    Signals are the owner's, who ends them in order: a terminal sends them to a whole group, and
    systemd to every process of a service. And without its main module, a script needs no
    `if __name__ == "__main__"` guard and is not run again by every child.
    """
    # It unblocks both when it starts, so it must not start later.
    resource_tracker.ensure_running()
    main_module = sys.modules["__main__"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_processes(processes: list[BaseProcess], grace_seconds: float) -> None:
    """Join, then kill; returns when all have ended."""
    _join_all(processes, grace_seconds)
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _join_all(processes: list[BaseProcess], seconds: float) -> None:
    """Return when all have ended, or the time is over."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def describe_ending(exit_code: int | None) -> str:
    """How a process ended, for a message."""
    if exit_code is None:
        return "hangs"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with status {exit_code}"
