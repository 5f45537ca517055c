"""How the engine loop starts and ends: memory, early questions, failures, shutdown."""

from collections.abc import Callable
from typing import Any

import pytest

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import (
    Abort,
    Allocate,
    EngineFailed,
    EngineReady,
    EngineStats,
    GetStats,
    Hello,
    LoadProgress,
    Outputs,
    PlanDone,
    Shutdown,
    WorkerFailed,
)
from stagecoach.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PlanDivergenceError,
    StagecoachError,
    StalledError,
    WorkerDiedError,
    error_class,
)
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.step_plan import StepResult, plan_digest
from tests.cpu.engine.fakes import LoopRun, ScriptedPort, expected_tokens, outputs, resolved, submit

pytestmark = pytest.mark.cpu


def test_start_plans_the_memory_and_tells_the_client() -> None:
    run = LoopRun(max_num_seqs=3, max_model_len=10, block_size=4, max_state_checkpoints=2)
    run.port.then(lambda: run.port.say(Shutdown()))
    port = run.run()
    plan = MemoryPlan(num_pages=1 + 3 * 3, num_slots=1 + 3 + 2)
    assert port.to_workers[0] == Allocate(memory=plan)
    [ready] = port.sent(EngineReady)
    assert (ready.num_pages, ready.num_slots) == (plan.num_pages, plan.num_slots)
    assert ready.load_seconds >= 0


def test_the_tightest_worker_decides_for_all() -> None:
    config = resolved(pipeline_parallel_size=2, max_state_checkpoints=0)
    port = ScriptedPort(config)
    port.say(Hello())
    # Room for the slots and twenty pages.
    port.ready(rank_1=5 * 128 + 20 * 64)
    port.then(lambda: port.say(Shutdown()))
    EngineLoop(config, port).run()
    assert port.to_workers == [Allocate(memory=MemoryPlan(num_pages=20, num_slots=5)), Shutdown()]


def test_load_progress_goes_to_every_client() -> None:
    config = resolved()
    port = ScriptedPort(config)
    port.say(Hello(), client=0)
    progress = LoadProgress(worker="worker[0,0]", done_bytes=3, total_bytes=9)
    port.then(
        lambda: port.say(Hello(), client=1),
        lambda: port.reply(progress),
        port.ready,
        lambda: port.say(Shutdown()),
    )
    EngineLoop(config, port).run()
    assert port.sent(LoadProgress, client=0) == port.sent(LoadProgress, client=1) == [progress]


def test_a_client_that_comes_later_is_told_at_once() -> None:
    run = LoopRun()
    port = run.port
    port.then(lambda: port.say(Hello(), client=1), lambda: port.say(Shutdown()))
    run.run()
    assert port.sent(EngineReady, client=0) == port.sent(EngineReady, client=1) != []


def test_what_is_asked_during_the_load_is_served_after_it() -> None:
    config = resolved(debug_poison=True)
    port = ScriptedPort(config)
    early = submit(1, max_tokens=3)

    def ask() -> None:
        port.say(GetStats(query_id=5))
        port.say(early)
        port.say(submit(2))
        port.say(Abort(request_ids=(2, 99)))
        port.say(GetStats(query_id=6))

    port.say(Hello())
    port.then(ask, port.ready, port.finish_all)
    EngineLoop(config, port).run()
    before, after = port.sent(EngineStats)
    assert (before.query_id, before.num_waiting) == (5, 0)
    assert (after.query_id, after.num_waiting) == (6, 1)
    assert isinstance(port.to_clients[0][1], EngineReady)
    assert outputs(port, 1) == expected_tokens(early)
    assert outputs(port, 2) == []


def test_too_little_memory_names_the_worker_however_the_workers_came() -> None:
    config = resolved(pipeline_parallel_size=2, tensor_parallel_size=2)
    port = ScriptedPort(config)
    port.say(Hello())
    port.ready(rank_2=100)
    with pytest.raises(CapacityError, match="the worker of rank 2 may use 100 bytes"):
        EngineLoop(config, port).run()
    [failed] = port.sent(EngineFailed)
    assert failed.kind == "CapacityError" and "rank 2" in failed.reason
    assert port.to_workers == [Shutdown()]


def failed_run(run: LoopRun, error_class: type[Exception], match: str) -> EngineFailed:
    """What the clients of a run that must fail are told; the workers are told to end."""
    port = run.port
    with pytest.raises(error_class, match=match) as caught:
        run.run()
    assert port.to_workers[-1] == Shutdown()
    told = {
        client: message for client, message in port.to_clients if isinstance(message, EngineFailed)
    }
    assert set(told) == {client for client, _ in port.to_clients}
    assert len({(message.kind, message.reason) for message in told.values()}) == 1
    failed = told[0]
    assert port.to_clients[-1][1] == failed
    if isinstance(caught.value, StagecoachError):
        assert (failed.kind, failed.reason) == (type(caught.value).__name__, str(caught.value))
    return failed


def serving(*events: Callable[[ScriptedPort], object], **options: Any) -> LoopRun:
    """Two clients; one request whose first plan is in flight, then the events."""
    run = LoopRun(**options)
    port = run.port

    def ask() -> None:
        port.say(Hello(), client=1)
        port.say(submit(1, max_tokens=4))

    port.then(ask, *[lambda event=event: event(port) for event in events])
    return run


def test_a_result_of_another_plan_names_step_and_worker() -> None:
    run = serving(lambda port: port.result(port.plans[0], digest=b"another."))
    failed = failed_run(run, PlanDivergenceError, r"worker\[0,0\].*step 0")
    assert failed.kind == "PlanDivergenceError"


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_an_echo_of_another_plan_names_step_and_worker(rank: int) -> None:
    run = serving(
        lambda port: port.finish_plan(),
        lambda port: port.echo(port.plans[0], rank, digest=b"another."),
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
    )
    stage, tp_rank = divmod(rank, 2)
    failed_run(run, PlanDivergenceError, rf"worker\[{stage},{tp_rank}\].*step 1")


def test_an_echo_of_a_plan_that_nobody_made_names_step_and_worker() -> None:
    def echo(port: ScriptedPort) -> None:
        plan = port.plans[0]
        port.finish_plan()
        # All echoes of this step are in: nothing more is owed.
        port.echo(plan, rank=0)

    run = serving(echo, pipeline_parallel_size=2)
    failed_run(run, PlanDivergenceError, r"worker\[0,0\].*step 0")


def test_a_late_echo_is_checked_after_the_result() -> None:
    def result_first(port: ScriptedPort) -> None:
        port.result(port.plans[0])

    def late(port: ScriptedPort) -> None:
        port.echo(port.plans.popleft(), rank=0, digest=b"another.")

    run = serving(result_first, late, pipeline_parallel_size=2)
    failed_run(run, PlanDivergenceError, r"worker\[0,0\].*step 0")


def test_results_out_of_order_are_fatal() -> None:
    def second_first(port: ScriptedPort) -> None:
        assert len(port.plans) == 2
        port.result(port.plans[1])

    run = LoopRun(pipeline_parallel_size=2, max_num_batched_tokens=3)
    port = run.port

    def ask() -> None:
        port.say(submit(1))
        port.say(submit(2))

    port.then(ask, lambda: second_first(port))
    failed = failed_run(run, AssertionError, "step 1 came, 0 is the oldest")
    assert failed.kind == "EngineDeadError"


def test_rows_of_another_request_are_fatal() -> None:
    def swapped(port: ScriptedPort) -> None:
        plan = port.plans[0]
        port.result(plan)
        rank, message = port.receive_worker() or (0, None)
        assert isinstance(message, PlanDone)
        rows = tuple(reversed(message.result.rows))
        digest = plan_digest(port.encoded[plan.step])
        port.reply(
            PlanDone(
                worker=message.worker, result=StepResult(step=plan.step, digest=digest, rows=rows)
            ),
            rank,
        )

    run = LoopRun()
    port = run.port

    def ask() -> None:
        port.say(submit(1))
        port.say(submit(2))

    port.then(ask, lambda: swapped(port))
    failed_run(run, AssertionError, "answers another segment")


def test_a_worker_that_fails_while_serving_ends_the_engine() -> None:
    run = serving(
        lambda port: port.reply(
            WorkerFailed(worker="worker[0,0]", kind="AssertionError", reason="slot race")
        )
    )
    failed = failed_run(run, WorkerDiedError, r"worker\[0,0\] failed: AssertionError: slot race")
    assert failed.kind == "WorkerDiedError"


def test_a_stall_reaches_the_callers_with_what_blocks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stalled(_: Scheduler, now: float | None = None) -> None:
        raise StalledError("request 1.0 (waiting) wants 3 pages")

    run = LoopRun()
    run.port.then(lambda: monkeypatch.setattr(Scheduler, "plan", stalled))
    run.port.then(lambda: run.port.say(submit(1)))
    failed = failed_run(run, StalledError, "wants 3 pages")
    assert error_class(failed.kind) is StalledError
    assert issubclass(StalledError, EngineDeadError)


LOAD_ERRORS = [
    ("CheckpointError", CheckpointError),
    ("ConfigError", ConfigError),
    ("CapacityError", CapacityError),
    ("RuntimeError", WorkerDiedError),
    ("RequestError", WorkerDiedError),
    ("WorkerDiedError", WorkerDiedError),
]


@pytest.mark.parametrize(("kind", "raised"), LOAD_ERRORS)
@pytest.mark.parametrize("is_before_hello", [False, True])
def test_a_worker_that_cannot_load_keeps_the_class_of_its_error(
    kind: str, raised: type[StagecoachError], is_before_hello: bool
) -> None:
    config = resolved(pipeline_parallel_size=2)
    port = ScriptedPort(config)
    failure = WorkerFailed(worker="worker[1,0]", kind=kind, reason="no tensor x.weight")
    if is_before_hello:
        port.reply(failure, rank=1)
        port.say(Hello())
    else:
        port.say(Hello())
        port.then(lambda: port.reply(failure, rank=1))
    with pytest.raises(raised, match=r"worker\[1,0\].*no tensor x.weight") as caught:
        EngineLoop(config, port).run()
    assert type(caught.value) is raised
    [failed] = port.sent(EngineFailed)
    assert (failed.kind, failed.reason) == (raised.__name__, str(caught.value))
    assert port.to_workers == [Shutdown()]


@pytest.mark.parametrize(
    "when", ["at once", "before the hello", "loading", "half loaded", "allocating"]
)
def test_a_shutdown_during_the_load_ends_in_order(when: str) -> None:
    config = resolved(pipeline_parallel_size=2)
    port = ScriptedPort(config)

    def loading() -> None:
        port.say(submit(1))
        port.say(Shutdown())

    def half_loaded() -> None:
        port.ready(ranks=[1])
        port.then(lambda: port.say(Shutdown()))

    def allocating() -> None:
        port.ready()
        port.answers_allocate = False
        port.then(lambda: port.say(Shutdown()))

    if when == "before the hello":
        port.then(lambda: port.say(Shutdown()))
    else:
        port.say(Hello())
        port.then(
            {
                "at once": lambda: port.say(Shutdown()),
                "loading": loading,
                "half loaded": half_loaded,
                "allocating": allocating,
            }[when]
        )
    EngineLoop(config, port).run()
    assert port.to_workers[-1] == Shutdown()
    assert port.to_clients == []


def test_a_shutdown_while_busy_ends_without_waiting_for_results() -> None:
    run = serving(lambda port: port.say(Shutdown()), pipeline_parallel_size=2)
    port = run.run()
    assert len(port.plans) == 1
    assert port.to_workers[-1] == Shutdown()
    assert not port.sent(EngineFailed) and not port.sent(Outputs)
