"""One rank: take a plan, run the stage, reply.

Owns the order of a worker's life: load, report memory, allocate, then plans until Shutdown.
The same class runs as a process or as a thread; it knows neither.
"""

import time
from collections.abc import Callable

from stagecoach.config import ResolvedConfig
from stagecoach.engine.messages import (
    Allocate,
    LoadProgress,
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
    WorkerReady,
)
from stagecoach.engine.ports import WorkerPort
from stagecoach.engine.worker_profile import WorkerProfile
from stagecoach.errors import EngineDeadError
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.topology import WorkerId
from stagecoach.runner.stage_runner import Loaders, StageRunner
from stagecoach.schedule.step_plan import StepPlan, StepResult, plan_digest

_PROGRESS_INTERVAL_SECONDS = 0.1


class Worker:
    """A StageRunner at the end of a port."""

    def __init__(
        self,
        config: ResolvedConfig,
        worker: WorkerId,
        links: Links,
        port: WorkerPort,
        loaders: Loaders | None = None,
    ) -> None:
        self._name = worker.name
        self._port = port
        self._runner = StageRunner(config, worker, links, loaders)
        self._profile = WorkerProfile(worker)
        self._next_step = 0

    def run(self) -> None:
        """Serve until Shutdown; an exception ends the worker and is its caller's to report."""
        self.start()
        while self.handle(self._port.receive()):
            pass
        self._runner.finish()

    def start(self) -> None:
        """Load, and report what memory is needed."""
        self._runner.load(self._progress_reporter())
        self._port.send(WorkerReady(worker=self._name, needs=self._runner.memory_needs()))

    def handle(self, message: ToWorker) -> bool:
        """Carry out one message; False once it is Shutdown."""
        match message:
            case RunPlan(encoded_plan=encoded_plan):
                self._run_plan(encoded_plan)
            case Allocate(memory=memory):
                self._runner.allocate(memory)
                self._port.send(WorkerAllocated(worker=self._name))
            case StartProfile() | StopProfile():
                self._port.send(self._recorded(message))
            case _:
                return False
        return True

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

    def _run_plan(self, encoded_plan: bytes) -> None:
        arrived = time.monotonic()
        plan = StepPlan.decode(encoded_plan)
        assert plan.step == self._next_step, f"expected step {self._next_step}:\n{plan}"
        self._next_step += 1
        digest = plan_digest(encoded_plan)
        outcome = self._runner.run(plan, lambda: self._receive_masks(plan.step))
        step_seconds = time.monotonic() - arrived
        busy_seconds = step_seconds - outcome.wait_seconds
        if outcome.rows is None:
            self._port.send(
                StepEcho(
                    worker=self._name,
                    step=plan.step,
                    digest=digest,
                    busy_seconds=busy_seconds,
                    arrived=arrived,
                    hop_seconds=outcome.wait_seconds,
                    differences=outcome.differences,
                )
            )
            return
        result = StepResult(
            step=plan.step,
            digest=digest,
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

    def _progress_reporter(self) -> Callable[[int, int], None]:
        last = 0.0

        def report(done_bytes: int, total_bytes: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done_bytes < total_bytes and now - last < _PROGRESS_INTERVAL_SECONDS:
                return
            last = now
            self._port.send(
                LoadProgress(worker=self._name, done_bytes=done_bytes, total_bytes=total_bytes)
            )

        return report
