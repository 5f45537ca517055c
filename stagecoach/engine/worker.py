"""One rank: take a plan, run the stage, reply.

Owns the order of a worker's life: load, report memory, allocate, then plans until Shutdown. On a
device further plans are taken while older ones run; answers go out in the plans' order. Where the
engine recovers, a worker whose neighbour is gone parts, and meets all others again when it is told
to. The same class runs as a process or as a thread; it knows neither.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.messages import (
    Allocate,
    CaptureProgress,
    LinkBroken,
    LoadProgress,
    Meet,
    Part,
    PlanDone,
    ProfileAnswer,
    RunPlan,
    Shutdown,
    StartProfile,
    StepEcho,
    StopProfile,
    TokenMasks,
    ToWorker,
    WorkerAllocated,
    WorkerApart,
    WorkerReady,
)
from stagecoach.engine.ports import WorkerPort
from stagecoach.engine.worker_profile import WorkerProfile
from stagecoach.errors import EngineDeadError, RendezvousError, WorkerDiedError
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.renewable_links import RenewableLinks
from stagecoach.pipeline.topology import WorkerId
from stagecoach.runner.stage_runner import Loaders, StageRunner
from stagecoach.runner.step_outcome import StepInFlight
from stagecoach.schedule.step_plan import StepPlan, StepResult, plan_digest

_PROGRESS_INTERVAL_SECONDS = 0.1


class _Launched(NamedTuple):
    """A plan whose answer is still due."""

    step: int
    digest: bytes
    arrived: float  # monotonic seconds of the loop's clock
    in_flight: StepInFlight


class Worker:
    """A StageRunner at the end of a port."""

    def __init__(
        self,
        config: ResolvedConfig,
        worker: WorkerId,
        links: Links,
        port: WorkerPort,
        loaders: Loaders | None = None,
        after_load: Callable[[], None] = lambda: None,
        renewable: RenewableLinks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            after_load: called before the worker looks at what memory is left.
            renewable: what `links` are of; None: a neighbour's end is also this worker's.
            clock: the loop's, in monotonic seconds, which all times are told in.
        """
        self._clock = clock
        self._renewable = renewable
        self._is_apart = False
        self._after_load = after_load
        self._name = worker.name
        self._port = port
        self._runner = StageRunner(config, worker, links, loaders)
        self._profile = WorkerProfile(worker)
        self._next_step = 0
        self._launched: deque[_Launched] = deque()

    def run(self, generation: int = 0) -> None:
        """Serve until Shutdown; an exception ends the worker and is its caller's to report.

        Args:
            generation: above 0 of one that was respawned, and is apart from the others.
        """
        if generation:
            self._is_apart = True
            self._runner.load(self._progress_reporter(self._load_progress), is_apart=True)
            self._port.send(WorkerApart(worker=self._name, generation=generation))
        else:
            self.start()
        self._serve()

    def _serve(self) -> None:
        while True:
            try:
                while self._carry_out(self._next_message()):
                    self._answer_what_is_ready()
            except (WorkerDiedError, RendezvousError) as error:
                if self._renewable is None or not self._renewable.can_part:
                    raise
                reason = str(error)
            else:
                break
            # Not inside the handler: the error's frames hold transfers.
            self._part(self._renewable)
            self._port.send(LinkBroken(worker=self._name, reason=reason))
        if not self._is_apart:
            self._runner.finish()

    def start(self) -> None:
        """Load, and report what memory is needed."""
        self._runner.load(self._progress_reporter(self._load_progress))
        self._after_load()
        self._port.send(WorkerReady(worker=self._name, needs=self._runner.memory_needs()))

    def handle(self, message: ToWorker) -> bool:
        """Carry out one message, and wait until it is answered; False once it is Shutdown."""
        goes_on = self._carry_out(message)
        self._answer_all()
        return goes_on

    def _next_message(self) -> ToWorker:
        """Waits for it, and answers meanwhile what becomes ready."""
        while self._launched:
            message = self._port.receive_now()
            if message is not None:
                return message
            # Nothing tells of a device's work and of messages alike. Other threads get their turn.
            time.sleep(0)
            self._answer_what_is_ready()
        return self._port.receive()

    def _carry_out(self, message: ToWorker) -> bool:
        match message:
            case Part() | Meet():
                assert self._renewable is not None, f"not of an engine that recovers: {message}"
                self._renew(message, self._renewable)
            case RunPlan() | TokenMasks() | Allocate() | StartProfile() | StopProfile() if (
                self._is_apart
            ):
                # It was on its way before the loop knew.
                return True
            case RunPlan(encoded_plan=encoded_plan):
                self._launch(encoded_plan)
            case Allocate(memory=memory):
                self._runner.allocate(memory, self._progress_reporter(self._capture_progress))
                self._port.send(WorkerAllocated(worker=self._name))
            case StartProfile() | StopProfile():
                self._port.send(self._recorded(message))
            case _:
                return False
        return True

    def _renew(self, message: Part | Meet, renewable: RenewableLinks) -> None:
        if isinstance(message, Part):
            self._part(renewable)
            self._port.send(WorkerApart(worker=self._name, generation=message.generation))
            return
        assert self._is_apart, f"meets nobody before it has parted: {message}"
        # From here on there is something to part from.
        self._is_apart = False
        self._next_step = message.first_step
        self._runner.meet(renewable.meet(message.generation))
        self._after_load()
        self._port.send(WorkerReady(worker=self._name, needs=self._runner.memory_needs()))

    def _part(self, renewable: RenewableLinks) -> None:
        if self._is_apart:
            return
        self._is_apart = True
        self._launched.clear()
        self._runner.part()
        renewable.part()

    def _recorded(self, message: StartProfile | StopProfile) -> ProfileAnswer:
        paths: tuple[str, ...] = ()
        try:
            if isinstance(message, StartProfile):
                self._profile.start(message.folder)
            else:
                paths = (str(self._profile.stop()),)
        except (OSError, RuntimeError) as error:
            return ProfileAnswer(query_id=message.query_id, error=f"{self._name}: {error}")
        return ProfileAnswer(query_id=message.query_id, paths=paths)

    def _launch(self, encoded_plan: bytes) -> None:
        arrived = self._clock()
        plan = StepPlan.decode(encoded_plan)
        assert plan.step == self._next_step, f"expected step {self._next_step}:\n{plan}"
        self._next_step += 1
        digest = plan_digest(encoded_plan)
        in_flight = self._runner.launch(
            plan, lambda: self._receive_masks(plan.step), self._answer_all
        )
        self._launched.append(_Launched(plan.step, digest, arrived, in_flight))

    def _answer_what_is_ready(self) -> None:
        while self._launched and self._launched[0].in_flight.is_ready():
            self._answer(self._launched.popleft())

    def _answer_all(self) -> None:
        """Waits for all that was launched."""
        while self._launched:
            self._answer(self._launched.popleft())

    def _answer(self, launched: _Launched) -> None:
        outcome = launched.in_flight.outcome()
        now, arrived, step_seconds = self._clock(), launched.arrived, outcome.device_seconds
        if step_seconds is None:
            step_seconds = now - arrived
        else:
            # Before that the plan waited for those ahead of it.
            arrived = now - step_seconds
        busy_seconds = step_seconds - outcome.wait_seconds
        if outcome.rows is None:
            self._port.send(
                StepEcho(
                    worker=self._name,
                    step=launched.step,
                    digest=launched.digest,
                    busy_seconds=busy_seconds,
                    arrived=arrived,
                    hop_seconds=outcome.wait_seconds,
                    differences=outcome.differences,
                )
            )
            return
        result = StepResult(
            step=launched.step,
            digest=launched.digest,
            rows=outcome.rows,
            forward_seconds=outcome.forward_seconds,
            step_seconds=step_seconds,
            busy_seconds=busy_seconds,
            arrived=arrived,
            hop_seconds=outcome.wait_seconds,
            differences=outcome.differences,
        )
        self._port.send(PlanDone(worker=self._name, result=result))

    def _receive_masks(self, step: int) -> bytes:
        """What stands behind the plan for the worker that samples.

        Raises:
            EngineDeadError: the loop ended in between.
        """
        message = self._port.receive()
        if isinstance(message, Shutdown):
            raise EngineDeadError(f"the engine loop ended before the masks of step {step}")
        assert isinstance(message, TokenMasks), f"step {step} waits for its masks: {message}"
        assert message.step == step, f"masks of step {message.step} behind step {step}"
        return message.masks

    def _progress_reporter(
        self, message: Callable[[int, int], LoadProgress | CaptureProgress]
    ) -> Callable[[int, int], None]:
        """Tells what is done and what there is in all, not too often."""
        last = 0.0

        def report(done: int, in_all: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done < in_all and now - last < _PROGRESS_INTERVAL_SECONDS:
                return
            last = now
            self._port.send(message(done, in_all))

        return report

    def _load_progress(self, done: int, in_all: int) -> LoadProgress:
        return LoadProgress(worker=self._name, done_bytes=done, total_bytes=in_all)

    def _capture_progress(self, done: int, in_all: int) -> CaptureProgress:
        return CaptureProgress(worker=self._name, num_captured=done, num_graphs=in_all)
