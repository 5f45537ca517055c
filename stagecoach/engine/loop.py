"""The engine loop: admit, plan, launch, collect, commit.

Owns the scheduler and the plans in flight. Imports no torch: workers are reached through a
port, whether they are processes or threads. One result is committed per turn, so that what
is scheduled depends on the order of events and never on how fast they come.
"""

import time
from collections.abc import Callable

from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine import compiling
from stagecoach.engine.compiling import CompilePool, Job
from stagecoach.engine.intake import Intake
from stagecoach.engine.make_scheduler import make_scheduler
from stagecoach.engine.messages import (
    Abort,
    EngineFailed,
    EngineReady,
    EngineStats,
    ForgetClient,
    GetStats,
    GetTimeline,
    Hello,
    LinkBroken,
    Outputs,
    PlanDone,
    ProfileAnswer,
    RecoveryBegan,
    RecoveryEnded,
    ResetPrefixCache,
    RunPlan,
    Shutdown,
    StartProfile,
    StepEcho,
    StopProfile,
    Submit,
    ToClient,
    ToEngine,
    WorkerFailed,
    WorkersEnded,
)
from stagecoach.engine.mismatch_report import MismatchReporter
from stagecoach.engine.ports import CLIENT_SHIFT, LoopPort
from stagecoach.engine.profile_round import ProfileRounds
from stagecoach.engine.recovery import Recovery
from stagecoach.engine.start_up import StartUp, seconds_left, worker_error
from stagecoach.engine.step_profile import StepTimes
from stagecoach.engine.telemetry import Telemetry
from stagecoach.engine.token_masks import token_masks
from stagecoach.errors import (
    EngineDeadError,
    LethalRequestError,
    PlanDivergenceError,
    StagecoachError,
    WorkerDiedError,
)
from stagecoach.observe.log import get_logger
from stagecoach.pipeline.topology import Topology
from stagecoach.schedule.commit import Progress, end_with
from stagecoach.schedule.draft_policy import DraftPolicy
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.shadow import Verdict
from stagecoach.schedule.step_plan import StepPlan, StepResult
from stagecoach.schedule.suspects import Suspects

_LOG = get_logger(__name__)


class EngineLoop:
    """Serves the clients of one engine until a Shutdown or a failure."""

    def __init__(
        self,
        config: ResolvedConfig,
        port: LoopPort,
        make_policy: Callable[..., DraftPolicy] = DraftPolicy,
        report_verdict: Callable[[Verdict], None] | None = None,
        start_compile: Callable[[Job], None] | None = None,
        *,
        prepares_grammars: bool = False,
    ) -> None:
        """`start_compile` is a CompilePool's `start`; `prepares_grammars` while weights load."""
        self._config = config
        self._sampler_rank = Topology.of(config.engine).sampler_rank
        self._make_policy = make_policy
        self._port = port
        self._clients: set[int] = set()
        self._gone_clients: set[int] = set()
        self._ready: EngineReady | None = None
        # What clients asked for before there was a scheduler, in order.
        self._early: list[tuple[int, ToEngine]] = []
        self._is_stopping = False
        # When the oldest plan in flight became the oldest.
        self._last_answer = 0.0
        # A result that was committed, and what it made known, until somebody has time to tell.
        self._untold: list[tuple[StepResult, list[Progress]]] = []
        # Digests that workers which do not sample still owe, by step.
        self._unechoed: dict[int, tuple[bytes, int]] = {}
        self._cache_needs: list[MemoryNeeds] | None = None  # by rank; None: nothing is cached
        self._scheduler: Scheduler | None = None
        self._intake: Intake | None = None
        self._compile_pool = CompilePool(
            lambda: compiling.load_compiler(config), port.wake, start_compile
        )
        if prepares_grammars:
            self._compile_pool.prepare()
        self._policy: DraftPolicy | None = None
        # Told to the policy when workers are busy: that can wait.
        self._times = StepTimes(config.engine.pipeline_parallel_size)
        self._telemetry = Telemetry(config.engine.pipeline_parallel_size)
        self._profiles = ProfileRounds(port, config.engine.num_workers)
        self._memory: MemoryPlan | None = None
        self._recovery: Recovery | None = None
        if config.engine.recover:
            self._recovery = Recovery(config, port, self._serve_clients)
        self._present_recovery: RecoveryBegan | None = None
        self._suspects = Suspects()
        self._report_verdict = report_verdict or MismatchReporter(config.engine).report

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "start() comes first"
        return self._scheduler

    def run(self) -> None:
        """Start, then step until the end; the last message to clients says how it ended."""
        try:
            self.start()
            while not self._is_stopping:
                try:
                    self.step()
                except WorkerDiedError as error:
                    self._recover(error)
            self.tell()
            self._port.send_workers(Shutdown())
        except Exception as error:
            self._announce_failure(error)
            raise
        finally:
            self._compile_pool.close()

    def start(self) -> None:
        """Wait for the weights, plan the memory, have it allocated; or until a Shutdown comes.

        Where lengths of windows depend on what steps cost, that is measured in between.

        Raises:
            CapacityError: the configuration does not fit the workers' memory.
            ConfigError, CheckpointError: why a worker refused to load.
            WorkerDiedError: a worker could not load, or hangs while steps are measured.
            PlanDivergenceError: a worker executed another plan while steps were measured.
        """
        began = time.monotonic()
        start_up = StartUp(self._config, self._port, self._serve_clients, self._broadcast)
        started = start_up.run()
        if started is None:
            return
        needs, memory, profile = started
        self._cache_needs = needs if self._config.engine.enable_prefix_caching else None
        if self._config.speculation is not None:
            self._policy = self._make_policy(
                self._config.speculation,
                profile.cost if profile else None,
                num_stages=self._config.engine.pipeline_parallel_size,
            )
        self._memory = memory
        self._begin_scheduling(memory, profile.num_steps if profile else 0)
        self._ready = EngineReady(
            num_pages=memory.num_pages,
            num_slots=memory.num_slots,
            load_seconds=time.monotonic() - began,
        )
        self._telemetry.begin()
        self._broadcast(self._ready)
        for client, early in self._early:
            self._serve(client, early)
        self._early.clear()

    def _begin_scheduling(self, memory: MemoryPlan, first_step: int) -> None:
        """Without requests, over empty memory."""
        self._scheduler = make_scheduler(self._config, memory, self._policy, first_step)
        self._intake = Intake(
            self._config,
            self._scheduler,
            self._compile_pool,
            self._telemetry,
            self._port.send_client,
        )

    def step(self) -> None:
        """One turn; blocks only when there is nothing to launch.

        From a result's arrival until the next plan is out, a worker may be idle. So all that
        can wait is done behind that plan: what clients, the policy and the statistics are told.
        """
        self._admit()
        if self._is_stopping:
            return
        if self._recovery is not None:
            self._recovery.check()
            self._seat()
        began = time.perf_counter()
        while self.scheduler.can_launch:
            plan = self.scheduler.plan(time.monotonic())
            if plan is None:
                break
            self._launch(plan)
        self.tell()
        self._learn()
        self._telemetry.loop_seconds += time.perf_counter() - began
        done = self._collect()
        if done is not None:
            began = time.perf_counter()
            self._commit(done)
            self._telemetry.loop_seconds += time.perf_counter() - began
        elif not self.scheduler.has_work and self._config.engine.debug_poison:
            self.scheduler.check_idle()

    def tell(self) -> None:
        """Tell clients, and the statistics, what the latest result made known."""
        untold, self._untold = self._untold, []
        for result, committed in untold:
            self._telemetry.note_committed(result)
            outputs: dict[int, list[Progress]] = {}
            for progress in committed:
                self._telemetry.num_generated_tokens += len(progress.token_ids)
                outputs.setdefault(progress.request_id >> CLIENT_SHIFT, []).append(progress)
            for client, items in outputs.items():
                self._port.send_client(client, Outputs(items=tuple(items)))

    def _admit(self) -> None:
        for client, message in self._port.receive_clients():
            match message:
                case Hello():
                    self._clients.add(client)
                    if self._ready is not None:
                        self._port.send_client(client, self._ready)
                    if self._present_recovery is not None:
                        self._port.send_client(client, self._present_recovery)
                case Shutdown():
                    self._is_stopping = True
                case _ if client in self._gone_clients:
                    # It was sent before its process ended, over a connection of its own.
                    continue
                case _ if self._ready is None:
                    self._early.append((client, message))
                case _:
                    self._serve(client, message)
        if self._intake is not None:
            self._intake.queue_compiled()

    def _serve(self, client: int, message: ToEngine) -> None:
        assert self._intake is not None, "start() comes first"
        match message:
            case Submit():
                self._intake.submit(client, message)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._intake.abort(request_id)
            case ForgetClient(client=gone):
                self._clients.discard(gone)
                self._gone_clients.add(gone)
                self._intake.forget_client(gone)
            case GetStats(query_id=query_id):
                self.tell()
                self._port.send_client(client, self._stats(query_id))
            case StartProfile() | StopProfile():
                self._profiles.begin(client, message)
            case GetTimeline(query_id=query_id, first_step=first_step):
                self.tell()
                timeline = self._telemetry.timeline(
                    query_id, first_step, self.scheduler, self._intake.traces()
                )
                self._port.send_client(client, timeline)
            case ResetPrefixCache():
                self.scheduler.reset_prefix_cache()
            case WorkersEnded():
                assert self._recovery is not None, "told where nobody recovers"
                self._recovery.note_ended(message)

    def _serve_clients(self) -> bool:
        """Take what they have sent; False once a Shutdown came."""
        self._admit()
        return not self._is_stopping

    def _recover(self, error: WorkerDiedError) -> None:
        """Bring the workers back; what they had computed is computed again.

        Raises:
            StagecoachError: nobody is to be brought back, or it did not do.
        """
        recovery, memory = self._recovery, self._memory
        if recovery is None or memory is None:
            raise error
        recovery.spend(error)
        self.tell()
        self._present_recovery = RecoveryBegan(reason=str(error))
        self._broadcast(self._present_recovery)
        self._profiles.suspend()
        self._start_over(memory, str(error))
        seconds = recovery.seconds
        if recovery.bring_back(memory, self.scheduler.next_step):
            self._present_recovery = None
            self._profiles.resume()
            self._broadcast(RecoveryEnded(seconds=recovery.seconds - seconds))

    def _start_over(self, memory: MemoryPlan, reason: str) -> None:
        """Go on with all requests from their tokens, but for one that is why workers die."""
        self._telemetry.carry(self.scheduler)
        unfinished = self.scheduler.leave()
        lethal = self._suspects.note_death(unfinished.in_flight)
        self._unechoed.clear()
        self._times = StepTimes(self._config.engine.pipeline_parallel_size)
        self._begin_scheduling(memory, unfinished.next_step)
        for request in unfinished.requests:
            if request is not lethal:
                self.scheduler.add(request)
        if lethal is not None:
            ended = end_with(lethal, LethalRequestError, f"workers died each time: {reason}")
            self._port.send_client(lethal.request_id >> CLIENT_SHIFT, Outputs(items=(ended,)))

    def _seat(self) -> None:
        """Requests that may be why workers die run one by one."""
        most, num_seats = self._config.engine.max_num_seqs, self._suspects.num_seats()
        self.scheduler.limit_seats(most if num_seats is None else min(num_seats, most))

    def _launch(self, plan: StepPlan) -> None:
        launched = time.monotonic()
        if self.scheduler.num_in_flight == 1:
            self._last_answer = launched
        in_flight = self.scheduler.plan_in_flight(plan.step)
        self._port.send_workers(RunPlan(encoded_plan=in_flight.encoded))
        masks = token_masks(in_flight, self._config.model.vocab_size)
        if masks is not None:
            self._port.send_worker(self._sampler_rank, masks)
        digest, num_echoes = in_flight.digest, self._config.engine.num_workers - 1
        if num_echoes:
            self._unechoed[plan.step] = (digest, num_echoes)
        if self._policy is not None:
            self._times.note_launched(plan)
        self._telemetry.note_launched(plan, launched)

    def _collect(self) -> PlanDone | None:
        """The oldest plan's result, or None when a client wants something first.

        Raises:
            WorkerDiedError: a worker reported its failure, or none answers.
            PlanDivergenceError: a worker echoed another digest.
        """
        while True:
            received = self._port.receive_worker()
            if received is None:
                self._port.wait(self._seconds_to_answer())
                received = self._port.receive_worker()
            if received is None:
                return None
            match received[1]:
                case PlanDone() as done:
                    self._last_answer = time.monotonic()
                    return done
                case StepEcho() as echo:
                    self._check_echo(received[0], echo)
                case ProfileAnswer() as answer:
                    self._profiles.note(received[0], answer)
                    self._last_answer = time.monotonic()
                case LinkBroken(worker=worker, reason=reason):
                    raise WorkerDiedError(f"{worker}: {reason}")
                case WorkerFailed() as failed:
                    recovery = self._recovery
                    if recovery is None or recovery.note_failed(received[0], failed):
                        raise worker_error(failed)

    def _seconds_to_answer(self) -> float | None:
        """How long the oldest plan in flight may still take; None if there is none.

        Also None while workers write profiles, which may take any time.

        Raises:
            WorkerDiedError: its time is over.
        """
        if not self.scheduler.num_in_flight or self._profiles.is_open:
            return None
        return seconds_left(self._config, self._last_answer)

    def _commit(self, done: PlanDone) -> None:
        result = done.result
        self._note_stage(self._config.engine.pipeline_parallel_size - 1, result)
        try:
            committed = self.scheduler.commit(result)
        except PlanDivergenceError as error:
            raise PlanDivergenceError(f"{done.worker}: {error}") from None
        self._untold.append((result, committed))
        self._report_verdicts()

    def _check_echo(self, rank: int, echo: StepEcho) -> None:
        stage, tp_rank = divmod(rank, self._config.engine.tensor_parallel_size)
        if tp_rank == 0:
            self._note_stage(stage, echo)
        digest, num_missing = self._unechoed.get(echo.step, (b"", 0))
        if echo.digest != digest:
            raise PlanDivergenceError(f"{echo.worker} ran another plan as step {echo.step}")
        if num_missing == 1:
            del self._unechoed[echo.step]
        else:
            self._unechoed[echo.step] = (digest, num_missing - 1)
        if echo.differences:
            self.scheduler.shadows.note_differences(echo.step, echo.differences)
            self._report_verdicts()

    def _report_verdicts(self) -> None:
        for verdict in self.scheduler.shadows.take_verdicts():
            self._report_verdict(verdict)

    def _note_stage(self, stage: int, report: StepEcho | StepResult) -> None:
        self._telemetry.note_stage(stage, report)
        self._times.note(report.step, stage, report.busy_seconds)

    def _learn(self) -> None:
        if self._policy is not None:
            for shape, stage_seconds in self._times.take():
                self._policy.note_step(shape, stage_seconds)

    def _stats(self, query_id: int) -> EngineStats:
        return self._telemetry.stats(
            query_id,
            self.scheduler,
            num_compiling=self._intake.num_compiling if self._intake else 0,
            num_recoveries=self._recovery.num_recoveries if self._recovery else 0,
            recovery_seconds=self._recovery.seconds if self._recovery else 0.0,
            speculation=None if self._policy is None else self._policy.stats(),
            cache_needs=self._cache_needs,
        )

    def _announce_failure(self, error: Exception) -> None:
        self.tell()
        # A worker can fail before the client that starts the engine has said hello.
        while not self._clients and not self._is_stopping:
            self._port.wait(None)
            self._admit()
        kind = type(error).__name__
        if not isinstance(error, StagecoachError):
            kind = EngineDeadError.__name__
        self._broadcast(EngineFailed(kind=kind, reason=str(error) or repr(error)))
        self._port.send_workers(Shutdown())

    def _broadcast(self, message: ToClient) -> None:
        for client in self._clients:
            self._port.send_client(client, message)
