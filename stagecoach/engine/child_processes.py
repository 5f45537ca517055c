"""The processes that one process starts for an engine on its host.

Owns their start, their lifelines and the news of their ends. Each child holds one end of a pipe,
so that it ends with its owner however that dies; none runs the caller's own code. Who is to blame
for what is judged elsewhere.
"""

import multiprocessing
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine import children
from stagecoach.engine.contact import Contact
from stagecoach.errors import WorkerDiedError
from stagecoach.pipeline.topology import Topology

# One at a time puts its main module aside: threads of one process may start children.
_APART = threading.RLock()
# How long a process that was ended by force may take: the system waits for what it is at.
_KILLED_SECONDS = 30.0


class Ending(NamedTuple):
    """A process of the engine ended, or a whole host."""

    name: str  # e.g. `worker[0,1]`
    rank: int | None  # None: it is no worker
    words: str  # how, e.g. `was killed by SIGKILL`
    is_killed: bool = False
    generation: int = 0  # that a worker was started for


class ChildProcesses:
    """Those of one owner; ends that it did not ask for are told to `on_end`."""

    def __init__(self, on_end: Callable[[Ending], None]) -> None:
        """`on_end` is called in a thread of its own, for one process after the other."""
        self._on_end = on_end
        self._lock = threading.Lock()
        self._processes: dict[str, BaseProcess] = {}
        self._ranks: dict[str, int | None] = {}
        self._generations: dict[str, int] = {}
        self._lifelines: dict[str, Connection] = {}
        self._untold: set[str] = set()
        self._servers: set[str] = set()
        self._bell, self._bell_rope = multiprocessing.Pipe(duplex=False)
        self._is_closed = False
        self._watcher = threading.Thread(target=self._watch, name="child watcher", daemon=True)
        self._watcher.start()

    @property
    def process_ids(self) -> dict[str, int]:
        """Process id by name."""
        with self._lock:
            return {
                name: process.pid
                for name, process in self._processes.items()
                if process.pid is not None
            }

    def start(
        self,
        name: str,
        process_class: Callable[..., BaseProcess],
        target: Callable[..., None],
        *arguments: object,
        rank: int | None = None,
        generation: int = 0,
        is_server: bool = False,
    ) -> None:
        """Start `target(*arguments, lifeline)`; a name can be used again once its process ended.

        Args:
            is_server: it is there for the others, and ends by itself when its lifeline is cut.
        """
        lifeline, owners_end = multiprocessing.Pipe(duplex=False)
        with apart_from_caller():
            process = process_class(
                target=target, args=(*arguments, lifeline), name=name, daemon=True
            )
            process.start()
        lifeline.close()
        with self._lock:
            if self._is_closed:
                # The end came while it was started.
                owners_end.close()
                return
            self._lifelines[name] = owners_end
            self._processes[name], self._ranks[name] = process, rank
            self._generations[name] = generation
            if is_server:
                self._servers.add(name)
            self._untold.add(name)
        self._bell_rope.send_bytes(b"!")

    def kill(self, names: Sequence[str]) -> None:
        """End these by force; returns when they have ended, which is not told.

        Raises:
            WorkerDiedError: one does not end even so; another in its place would find no room.
        """
        with self._lock:
            self._untold.difference_update(names)
            found = [self._processes[name] for name in names if name in self._processes]
        if stuck := end_processes(found, grace_seconds=0.0):
            listed = ", ".join(process.name for process in stuck)
            raise WorkerDiedError(f"{listed} cannot be ended: the system holds on to it")

    def stop(self, grace_seconds: float) -> None:
        """End all, by force after this time; nothing more is told."""
        with self._lock:
            self._untold.clear()
            items = self._processes.items()
            servers = [process for name, process in items if name in self._servers]
            processes = [process for name, process in items if name not in self._servers]
        end_processes(processes, grace_seconds)
        self.close()
        end_processes(servers, grace_seconds)

    def close(self) -> None:
        """Cut all lifelines, which ends whoever still runs."""
        with self._lock:
            self._is_closed = True
            for lifeline in self._lifelines.values():
                lifeline.close()
            self._lifelines.clear()
        self._bell_rope.send_bytes(b"!")
        if threading.current_thread() is not self._watcher:
            self._watcher.join()

    def _watch(self) -> None:
        while not self._is_closed:
            with self._lock:
                watched = {self._processes[name].sentinel: name for name in self._untold}
            ready = wait([self._bell, *watched])
            if self._bell in ready:
                self._bell.recv_bytes()
            for sentinel, name in watched.items():
                if sentinel in ready:
                    self._tell(name)

    def _tell(self, name: str) -> None:
        with self._lock:
            # Whoever ends it by force waits for it, too, which no two may do at once.
            if name not in self._untold or self._processes[name].is_alive():
                return
            self._untold.discard(name)
            code = self._processes[name].exitcode
            rank, generation = self._ranks[name], self._generations[name]
        is_killed = code is not None and code < 0
        self._on_end(Ending(name, rank, describe_ending(code), is_killed, generation))


def start_worker(
    processes: ChildProcesses, config: ResolvedConfig, rank: int, contact: Contact, generation: int
) -> None:
    """Start a rank of the engine on this host."""
    worker = Topology.of(config.engine).worker(rank)
    processes.start(
        worker.name,
        worker_context(config).Process,
        children.run_worker,
        config,
        worker,
        contact,
        generation,
        rank=rank,
        generation=generation,
    )


def worker_context(config: ResolvedConfig) -> ForkServerContext:
    """Workers fork from a server that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    preloaded = ["stagecoach.engine.worker"]
    if config.device == "cuda":
        # Imported once, for all workers; it touches no GPU, which no fork may have done.
        preloaded.append("triton")
    context.set_forkserver_preload(preloaded)
    return context


@contextmanager
def apart_from_caller() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C and SIGTERM, and import no main module of the caller.

    Signals are the owner's, who ends them in order: a terminal sends them to a whole group, and
    systemd to every process of a service. And without its main module, a script needs no
    `if __name__ == "__main__"` guard and is not run again by every child.
    """
    with _APART:
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


def end_processes(processes: list[BaseProcess], grace_seconds: float) -> list[BaseProcess]:
    """Join, then kill; returns when all have ended, or those that a device does not let end."""
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
    deadline = time.monotonic() + _KILLED_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process for process in processes if process.is_alive()]


def describe_ending(exit_code: int | None) -> str:
    """How a process ended, for a message."""
    if exit_code is None:
        return "hangs"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with status {exit_code}"
