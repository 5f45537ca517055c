"""How workers that were lost are brought back, and how often.

Owns the order of a recovery as the loop sees it, its limits in number and time, and which workers
are lost. Knows requests only as what was computed when workers died; the owner of the processes
starts those that it is told to.

    part      the others let go of their links, the lost are respawned and load  --> all apart
              (with GPUs, where none can let go, all are respawned)
    meet      all link under a new generation, and report                        --> all ready
    allocate  new pages and slots in place of the old                            --> plans again
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.messages import (
    Allocate,
    FromWorker,
    LinkBroken,
    Meet,
    Part,
    RespawnWorkers,
    WorkerAllocated,
    WorkerApart,
    WorkerFailed,
    WorkerReady,
    WorkersEnded,
)
from stagecoach.engine.ports import LoopPort
from stagecoach.engine.start_up import worker_error
from stagecoach.errors import StagecoachError, WorkerDiedError
from stagecoach.observe.log import get_logger
from stagecoach.pipeline.topology import Topology

_LOG = get_logger(__name__)

# The client that started the engine's processes.
OWNER = 0
# How long a worker that is well may take to part: it may be in the middle of a step.
_PART_SECONDS = 30.0
# And to link with others who are all there, or to report and allocate: kernels may be compiled.
_MEET_SECONDS = 300.0
# How long those that load may say nothing: they tell of their progress.
_SILENT_SECONDS = 300.0


class _MeetingError(Exception):
    """The workers did not come together; they part, and try once more."""


@dataclass(slots=True)
class _Gathering:
    """Who is apart, of all ranks."""

    # What each one's answer must say: a process that is respawned gets a number of its own.
    awaited: dict[int, int]
    apart: set[int] = field(default_factory=set)
    respawned: set[int] = field(default_factory=set)
    last_heard: float = 0.0  # of those that are respawned, in monotonic seconds

    @property
    def loading(self) -> set[int]:
        return self.respawned - self.apart


class Recovery:
    """The recoveries of one engine, one after the other."""

    def __init__(
        self,
        config: ResolvedConfig,
        port: LoopPort,
        serve_clients: Callable[[], bool],
    ) -> None:
        """`serve_clients` takes what clients have sent; False once a Shutdown came."""
        engine = config.engine
        self._port = port
        self._serve_clients = serve_clients
        self._topology = Topology.of(engine)
        # What a GPU has begun waits for a neighbour that is gone, and cannot be called back.
        self._keeps_weights = config.device == "cpu"
        self._max_recoveries = engine.max_recoveries
        self._window_seconds = engine.recovery_window_seconds
        self._part_seconds = min(_PART_SECONDS, float(engine.execute_model_timeout_seconds))
        self._begun: deque[float] = deque()  # monotonic seconds, of attempts within the window
        self._lost: set[int] = set()
        self._reasons: list[str] = []  # why, of those that were lost since the last attempt
        self._generation = 0
        self._started = dict.fromkeys(range(engine.num_workers), 0)  # generation of each process
        self.num_recoveries = 0
        self.seconds = 0.0  # that all of them took

    def note_ended(self, message: WorkersEnded) -> None:
        """The owner says that processes ended, which may have been replaced by now."""
        pairs = zip(message.ranks, message.generations, strict=True)
        lost = {rank for rank, generation in pairs if generation == self._started[rank]}
        if lost:
            self._lost |= lost
            self._reasons.append(message.reason)

    def note_failed(self, rank: int, failed: WorkerFailed) -> bool:
        """A worker has said that it ends; False if it has been replaced by now."""
        if failed.generation != self._started[rank]:
            return False
        self._lost.add(rank)
        self._reasons.append(str(worker_error(failed)))
        return True

    def check(self) -> None:
        """
        Raises:
            WorkerDiedError: workers were lost and nobody has brought them back.
        """
        if self._lost:
            raise self._death()

    def spend(self, error: StagecoachError) -> None:
        """One more attempt begins.

        Raises:
            WorkerDiedError: there were as many as may be.
        """
        now = time.monotonic()
        while self._begun and now - self._begun[0] > self._window_seconds:
            self._begun.popleft()
        if len(self._begun) >= self._max_recoveries:
            raise WorkerDiedError(
                f"{error}; workers were brought back {len(self._begun)} times within "
                f"{self._window_seconds} s (--max-recoveries, --recovery-window-seconds)"
            )
        self._begun.append(now)
        self.num_recoveries += 1
        _LOG.warning("recovering: %s", error)

    def bring_back(self, memory: MemoryPlan, first_step: int) -> bool:
        """Return when all workers serve again with empty memory; False once a Shutdown came.

        Args:
            first_step: number of the next plan.

        Raises:
            WorkerDiedError: workers were lost again and again.
            ConfigError, CheckpointError: why a respawned worker refuses to load.
        """
        began = time.monotonic()
        try:
            while True:
                try:
                    return self._gather() and self._meet(memory, first_step)
                except _MeetingError as error:
                    self.spend(WorkerDiedError(str(error)))
        finally:
            self.seconds += time.monotonic() - began

    def _gather(self) -> bool:
        """Have everybody apart and loaded."""
        everybody = set(range(self._topology.num_workers))
        # Last words of the lost, and results of the others.
        while self._port.receive_worker() is not None:
            pass
        self._generation += 1
        gathering = _Gathering(dict.fromkeys(everybody, self._generation))
        if self._keeps_weights:
            self._port.send_workers(Part(generation=self._generation))
        else:
            self._lost |= everybody
        deadline = time.monotonic() + self._part_seconds
        while gathering.apart != everybody:
            self._respawn_lost(gathering)
            awaiting = everybody - gathering.apart - gathering.respawned
            silence = gathering.last_heard + _SILENT_SECONDS
            if not self._wait(deadline if awaiting else silence):
                return False
            self._note_answers(gathering)
            awaiting -= gathering.apart
            if awaiting and time.monotonic() > deadline:
                self._lost |= self._hanging(awaiting)
                deadline = time.monotonic() + self._part_seconds
            if gathering.loading and time.monotonic() > gathering.last_heard + _SILENT_SECONDS:
                self._reasons.append(f"it said nothing for {_SILENT_SECONDS:g} s of its load")
                self._lost |= gathering.loading
        return True

    def _respawn_lost(self, gathering: _Gathering) -> None:
        if not self._lost:
            return
        lost, self._lost = self._lost, set()
        if lost & gathering.respawned:
            self.spend(self._death())
        gathering.respawned |= lost
        gathering.apart -= lost
        gathering.awaited |= dict.fromkeys(lost, self._respawn(lost))
        gathering.last_heard = time.monotonic()

    def _note_answers(self, gathering: _Gathering) -> None:
        while (received := self._port.receive_worker()) is not None:
            rank, message = received
            if rank in gathering.respawned:
                gathering.last_heard = time.monotonic()
            match message:
                case WorkerApart(generation=generation):
                    if generation == gathering.awaited[rank]:
                        gathering.apart.add(rank)
                case WorkerFailed() if rank in gathering.respawned:
                    self._note_refusal(rank, message)

    def _meet(self, memory: MemoryPlan, first_step: int) -> bool:
        """Have everybody linked, and ready for a first plan.

        Raises:
            _MeetingError: one was lost, or did not come in time.
        """
        self._generation += 1
        self._port.send_workers(Meet(generation=self._generation, first_step=first_step))
        if not self._await_all(WorkerReady):
            return False
        self._port.send_workers(Allocate(memory=memory))
        return self._await_all(WorkerAllocated)

    def _await_all(self, kind: type[FromWorker]) -> bool:
        """Until every worker has said this."""
        said: set[int] = set()
        deadline = time.monotonic() + _MEET_SECONDS
        while len(said) < self._topology.num_workers:
            if not self._wait(deadline):
                return False
            while (received := self._port.receive_worker()) is not None:
                rank, message = received
                match message:
                    case WorkerFailed():
                        self._note_refusal(rank, message)
                    case LinkBroken(worker=worker, reason=reason):
                        raise _MeetingError(f"{worker}: {reason}")
                    case _ if isinstance(message, kind):
                        said.add(rank)
            if self._lost:
                raise _MeetingError(str(self._death()))
            if time.monotonic() > deadline:
                raise _MeetingError(f"the workers did not meet within {_MEET_SECONDS:g} s")
        return True

    def _wait(self, deadline: float | None) -> bool:
        """Serve clients until a message may be there; False once a Shutdown came."""
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._lost:
            self._port.wait(seconds)
        return self._serve_clients()

    def _note_refusal(self, rank: int, failed: WorkerFailed) -> None:
        """A worker ends; one that refuses what it is asked for would refuse it again.

        Raises:
            ConfigError, CheckpointError: its refusal.
        """
        error = worker_error(failed)
        if self.note_failed(rank, failed) and not isinstance(error, WorkerDiedError):
            raise error

    def _hanging(self, ranks: Collection[int]) -> set[int]:
        """Of those that do not answer, the ones that may hold up the rest.

        Ranks wait for the stage before and for their own, never for a later one.
        """
        first = min(self._topology.worker(rank).stage for rank in ranks)
        return {rank for rank in ranks if self._topology.worker(rank).stage == first}

    def _respawn(self, ranks: Collection[int]) -> int:
        self._generation += 1
        self._started |= dict.fromkeys(ranks, self._generation)
        reasons = "; ".join(self._reasons) or "it hangs"
        _LOG.warning("starting %s anew: %s", self._names(ranks), reasons)
        self._reasons.clear()
        message = RespawnWorkers(ranks=tuple(sorted(ranks)), generation=self._generation)
        self._port.send_client(OWNER, message)
        return self._generation

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError("; ".join(self._reasons) or "a worker ended")

    def _names(self, ranks: Collection[int]) -> str:
        return ", ".join(self._topology.worker(rank).name for rank in sorted(ranks))
