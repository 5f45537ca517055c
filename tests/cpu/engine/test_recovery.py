"""The loop brings lost workers back: what is said to whom, and that requests do not notice."""

import dataclasses
import time
from collections.abc import Callable

import pytest

from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import (
    Abort,
    EngineFailed,
    EngineReady,
    EngineStats,
    GetStats,
    GetTimeline,
    Hello,
    LinkBroken,
    LoadProgress,
    Meet,
    Outputs,
    Part,
    ProfileAnswer,
    RecoveryBegan,
    RecoveryEnded,
    RespawnWorkers,
    Shutdown,
    StartProfile,
    Timeline,
    WorkerApart,
    WorkerFailed,
    WorkersEnded,
)
from stagecoach.errors import CheckpointError, WorkerDiedError
from stagecoach.request import FinishReason
from stagecoach.schedule.step_plan import StepPlan
from tests.cpu.engine.fakes import (
    LoopRun,
    ScriptedPort,
    endings,
    expected_tokens,
    outputs,
    submit,
)

pytestmark = pytest.mark.cpu

GRID = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
ASKED = [submit(number, num_prompt_tokens=2 + number, max_tokens=6) for number in (1, 2, 3)]


def recovering(*events: Callable[[ScriptedPort], object], **options: object) -> LoopRun:
    """Three requests of which some tokens are known; then the events; then all the rest."""
    run = LoopRun(**{**GRID, "recover": True, **options})
    port = run.port

    def ask() -> None:
        for message in ASKED:
            port.say(message)

    port.then(ask, *[port.finish_plan] * 4)
    port.then(*[lambda event=event: event(port) for event in events], port.finish_all)
    return run


def check_answers(port: ScriptedPort) -> None:
    """Nobody noticed: every token came, and came once."""
    for message in ASKED:
        assert outputs(port, message.request_id) == expected_tokens(message)
        assert endings(port)[message.request_id] is FinishReason.LENGTH


def fail(port: ScriptedPort, rank: int, kind: str = "RuntimeError", reason: str = "boom") -> None:
    port.gone.add(rank)
    worker = port.topology.worker(rank).name
    generation = port.generations.get(rank, 0)
    port.reply(WorkerFailed(worker=worker, kind=kind, reason=reason, generation=generation), rank)


def break_link(port: ScriptedPort, rank: int) -> None:
    worker = port.topology.worker(rank).name
    port.reply(LinkBroken(worker=worker, reason="the link to a neighbour broke"), rank)


@pytest.mark.parametrize("rank", range(4))
def test_a_killed_worker_is_respawned_and_requests_go_on(rank: int) -> None:
    port = recovering(lambda port: port.lose(rank)).run()
    assert port.respawned == [(rank,)]
    check_answers(port)
    [began], [ended] = port.sent(RecoveryBegan), port.sent(RecoveryEnded)
    assert "was killed by SIGKILL" in began.reason and ended.seconds >= 0
    [part] = [message for message in port.to_workers if isinstance(message, Part)]
    [meet] = [message for message in port.to_workers if isinstance(message, Meet)]
    [respawn] = port.sent(RespawnWorkers)
    assert part.generation < respawn.generation < meet.generation
    assert meet.first_step == 6, "two plans were in flight behind the four that are answered"


def test_several_that_end_at_once_are_one_recovery() -> None:
    run = recovering(lambda port: port.lose(0, 3), max_recoveries=1)
    port = run.run()
    assert port.respawned == [(0, 3)]
    check_answers(port)


def test_a_worker_that_says_why_it_ends_is_respawned() -> None:
    port = recovering(lambda port: fail(port, 2)).run()
    assert port.respawned == [(2,)] and "RuntimeError: boom" in port.sent(RecoveryBegan)[0].reason
    check_answers(port)


def test_last_words_of_one_that_was_replaced_are_late() -> None:
    def speak_late(port: ScriptedPort) -> None:
        port.reply(WorkerFailed(worker="worker[1,0]", kind="RuntimeError", reason="late"), 2)

    port = recovering(lambda port: port.lose(2), speak_late).run()
    assert port.respawned == [(2,)] and len(port.sent(RecoveryBegan)) == 1
    check_answers(port)


def test_with_gpus_all_are_respawned() -> None:
    """None of them can part from one that is gone."""
    run = recovering(lambda port: fail(port, 2))
    config = dataclasses.replace(run.config, device="cuda")
    EngineLoop(config, run.port).run()
    assert run.port.respawned == [(0, 1, 2, 3)]
    assert not any(isinstance(message, Part) for message in run.port.to_workers)
    check_answers(run.port)


def test_a_broken_link_alone_costs_nobody_its_weights() -> None:
    port = recovering(lambda port: break_link(port, 1)).run()
    assert port.respawned == [] and len(port.sent(RecoveryEnded)) == 1
    check_answers(port)


def test_neighbours_may_hear_of_a_death_before_the_owner_does() -> None:
    def broken_first(port: ScriptedPort) -> None:
        port.gone.add(2)
        break_link(port, 0)
        break_link(port, 3)

    port = recovering(broken_first, lambda port: port.lose(2)).run()
    assert port.respawned == [(2,)] and len(port.sent(RecoveryBegan)) == 1
    check_answers(port)


def test_what_was_on_its_way_does_not_count() -> None:
    """A result and an echo that arrive while the workers part."""
    lost_plans: list[StepPlan] = []

    def lose(port: ScriptedPort) -> None:
        lost_plans.extend(port.plans)
        port.answers_respawn = False
        port.lose(0)

    def late(port: ScriptedPort) -> None:
        port.result(lost_plans[0])
        port.echo(lost_plans[0], 2, digest=b"anything")
        port.gone.clear()
        port.apart([0], port.sent(RespawnWorkers)[-1].generation)

    port = recovering(lose, late).run()
    assert len(lost_plans) == 2 and port.respawned == [(0,)]
    check_answers(port)


def test_a_worker_that_says_why_it_ends_ends_once() -> None:
    """That its process has ended is told when another has taken its place."""

    def told_late(port: ScriptedPort) -> None:
        fail(port, 1)
        port.answers_respawn = False

    def load(port: ScriptedPort) -> None:
        port.say(WorkersEnded(ranks=(1,), generations=(0,), reason="it ended with status 1"))
        port.gone.clear()
        port.apart([1], port.generations[1])

    port = recovering(told_late, load, max_recoveries=1).run()
    assert port.respawned == [(1,)]
    check_answers(port)


def test_an_idle_engine_brings_its_worker_back_before_anybody_asks() -> None:
    run = LoopRun(recover=True, **GRID)
    port = run.port
    port.then(
        lambda: port.lose(1),
        lambda: port.say(ASKED[0]),
        port.finish_all,
    )
    run.run()
    assert port.respawned == [(1,)]
    assert outputs(port, 1) == expected_tokens(ASKED[0])


def test_clients_are_served_meanwhile() -> None:
    """New requests wait, others end, counts are told, and a profile is refused."""
    late = submit(9, max_tokens=4)

    def lose(port: ScriptedPort) -> None:
        port.answers_respawn = False
        port.lose(3)

    def ask(port: ScriptedPort) -> None:
        port.say(Hello(), client=1)
        port.say(late)
        port.say(Abort(request_ids=(2,)))
        port.say(GetStats(query_id=5))
        port.say(GetTimeline(query_id=7, first_step=0))
        port.say(StartProfile(query_id=6, folder="nowhere"))

    def load(port: ScriptedPort) -> None:
        port.gone.clear()
        port.apart([3], port.sent(RespawnWorkers)[-1].generation)

    port = recovering(lose, ask, load).run()
    told = [type(message) for client, message in port.to_clients if client == 1]
    assert told[:2] == [EngineReady, RecoveryBegan] and RecoveryEnded in told
    [stats] = port.sent(EngineStats)
    assert (stats.num_waiting, stats.num_running, stats.num_plans_in_flight) == (3, 0, 0)
    assert stats.num_recoveries == 1
    [timeline] = port.sent(Timeline)
    assert [plan.step for plan in timeline.plans] == [0, 1, 2, 3], "what was in flight is void"
    assert all(plan.committed is not None for plan in timeline.plans)
    [answer] = port.sent(ProfileAnswer)
    assert answer.is_refused and "brought back" in str(answer.error)
    for message in (ASKED[0], ASKED[2], late):
        assert outputs(port, message.request_id) == expected_tokens(message)
    assert 2 not in endings(port) or endings(port)[2] is FinishReason.ABORT
    assert outputs(port, 2) == expected_tokens(ASKED[1])[: len(outputs(port, 2))] != []


def test_a_second_death_while_it_loads_starts_it_once_more() -> None:
    def lose(port: ScriptedPort) -> None:
        port.answers_respawn = False
        port.lose(1)

    def again(port: ScriptedPort) -> None:
        # It had loaded when it died, and its word comes late.
        stale = WorkerApart(worker="w", generation=port.sent(RespawnWorkers)[-1].generation)
        port.answers_respawn = True
        port.lose(1)
        port.reply(stale, 1)

    port = recovering(lose, again).run()
    assert port.respawned == [(1,), (1,)]
    assert len(port.sent(RecoveryBegan)) == len(port.sent(RecoveryEnded)) == 1
    check_answers(port)


@pytest.mark.parametrize("how", [break_link, fail, ScriptedPort.lose])
def test_a_death_while_all_meet_makes_them_part_again(
    how: Callable[[ScriptedPort, int], None],
) -> None:
    def lose(port: ScriptedPort) -> None:
        port.answers_meet = False
        port.lose(1)

    def again(port: ScriptedPort) -> None:
        port.answers_meet = True
        how(port, 2)

    port = recovering(lose, again).run()
    assert port.respawned == [(1,)] + ([] if how is break_link else [(2,)])
    generations = [message.generation for message in port.to_workers if isinstance(message, Meet)]
    assert len(generations) == len(set(generations)) == 2
    check_answers(port)


def test_one_that_says_nothing_while_it_loads_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = time.monotonic
    passed = 0.0
    monkeypatch.setattr("stagecoach.engine.recovery.time.monotonic", lambda: clock() + passed)

    def lose(port: ScriptedPort) -> None:
        port.answers_respawn = False
        port.lose(1)

    def progress(port: ScriptedPort) -> None:
        nonlocal passed
        passed += 200.0
        port.reply(LoadProgress(worker="worker[0,1]", done_bytes=1, total_bytes=2), 1)

    def silence(port: ScriptedPort) -> None:
        nonlocal passed
        assert port.respawned == [(1,)], "it got on"
        passed += 301.0
        port.answers_respawn = True

    run = recovering(
        lose, progress, progress, silence, max_recoveries=2, execute_model_timeout_seconds=1000
    )
    port = run.run()
    assert port.respawned == [(1,), (1,)]
    check_answers(port)


def test_there_are_only_so_many_recoveries() -> None:
    run = recovering(*[lambda port: port.lose(0)] * 3, max_recoveries=2)
    with pytest.raises(WorkerDiedError, match=r"SIGKILL; .* 2 times within 600 s"):
        run.run()
    port = run.port
    assert len(port.respawned) == 2
    [failed] = port.sent(EngineFailed)
    assert failed.kind == "WorkerDiedError" and "--max-recoveries" in failed.reason
    assert port.to_workers[-1] == Shutdown()


def test_old_recoveries_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from stagecoach.engine import recovery

    run = recovering(
        lambda port: port.lose(0),
        lambda port: monkeypatch.setattr(recovery.time, "monotonic", lambda: clock() + 11.0),
        lambda port: port.lose(0),
        max_recoveries=1,
        recovery_window_seconds=10,
        execute_model_timeout_seconds=1000,
    )
    clock = recovery.time.monotonic
    port = run.run()
    assert len(port.respawned) == 2
    check_answers(port)


def test_a_worker_that_refuses_to_load_ends_the_engine() -> None:
    """The file is gone, and it would be the next time."""

    def lose(port: ScriptedPort) -> None:
        port.answers_respawn = False
        port.lose(1)

    run = recovering(lose, lambda port: fail(port, 1, "CheckpointError", "no such file"))
    with pytest.raises(CheckpointError, match=r"worker\[0,1\]: no such file"):
        run.run()


def test_a_death_at_the_start_is_the_end() -> None:
    run = LoopRun(recover=True)
    run.port.to_workers.clear()
    port = ScriptedPort(run.config)
    port.say(ASKED[0])
    port.then(lambda: fail(port, 0), lambda: port.say(Shutdown()))
    with pytest.raises(WorkerDiedError, match="boom"):
        EngineLoop(run.config, port).run()
    assert not port.respawned


def test_without_recover_a_broken_worker_is_the_end() -> None:
    run = recovering(lambda port: fail(port, 0), recover=False)
    with pytest.raises(WorkerDiedError, match="boom"):
        run.run()
    assert not run.port.sent(RecoveryBegan) and not run.port.respawned


def test_a_shutdown_ends_a_recovery() -> None:
    def lose(port: ScriptedPort) -> None:
        port.answers_respawn = False
        port.lose(1)

    run = LoopRun(recover=True, **GRID)
    run.port.then(lambda: lose(run.port), lambda: run.port.say(Shutdown()))
    port = run.run()
    assert not port.sent(RecoveryEnded) and port.to_workers[-1] == Shutdown()


@pytest.mark.parametrize("victim", [1, 3])
def test_a_request_that_kills_workers_ends_and_the_others_do_not(victim: int) -> None:
    run = LoopRun(recover=True, max_recoveries=4, **GRID)
    port = run.port

    def execute() -> None:
        if not port.plans:
            port.say(Shutdown())
            return
        port.events.appendleft(execute)
        # It is lethal once a token of it is known.
        if any(s.request_id == victim and s.start > 3 for s in port.plans[0].segments):
            fail(port, 1)
        else:
            port.finish_plan()

    def ask() -> None:
        for message in ASKED:
            port.say(message)

    port.then(ask, execute)
    run.run()
    assert 2 <= len(port.respawned) <= 3
    assert endings(port)[victim] is FinishReason.ERROR
    [told] = [
        progress.error
        for message in port.sent(Outputs)
        for progress in message.items
        if progress.finish_reason is FinishReason.ERROR
    ]
    assert told is not None and told.startswith("LethalRequestError: workers died each time: ")
    for message in ASKED:
        if message.request_id != victim:
            assert outputs(port, message.request_id) == expected_tokens(message)
            assert endings(port)[message.request_id] is FinishReason.LENGTH
