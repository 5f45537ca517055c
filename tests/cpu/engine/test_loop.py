"""The engine loop over scripted clients and workers, while it serves: order, refusals, aborts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.engine.messages import (
    Abort,
    EngineFailed,
    EngineStats,
    GetStats,
    Hello,
    Outputs,
    RequestRefused,
    RunPlan,
    Shutdown,
    Submit,
    ToClient,
    ToWorker,
)
from stagecoach.engine.ports import CLIENT_SHIFT
from stagecoach.request import FinishReason
from stagecoach.schedule.step_plan import StepPlan
from tests.cpu.engine.fakes import LoopRun, endings, expected_tokens, outputs, submit

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_one_plan_a_stage_is_in_flight_and_results_are_committed_in_order(
    num_stages: int,
) -> None:
    run = LoopRun(pipeline_parallel_size=num_stages, max_num_seqs=8, max_num_batched_tokens=8)
    port = run.port
    requests = [submit(number, num_prompt_tokens=5, max_tokens=4) for number in range(1, 9)]

    def ask() -> None:
        for request in requests:
            port.say(request)

    port.then(ask, port.finish_all)
    run.run()
    assert port.most_in_flight == num_stages
    steps = sorted(port.encoded)
    assert steps == list(range(len(steps)))
    for request in requests:
        assert outputs(port, request.request_id) == expected_tokens(request)
    assert set(endings(port).values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize(("num_stages", "most_in_flight"), [(1, 2), (2, 2)])
def test_with_one_stage_a_plan_may_be_sent_before_the_result_of_the_one_before(
    num_stages: int, most_in_flight: int
) -> None:
    run = LoopRun(pipeline_parallel_size=num_stages, async_scheduling=True)
    port = run.port
    requests = [submit(number, num_prompt_tokens=5, max_tokens=6) for number in (1, 2)]
    port.then(lambda: [port.say(request) for request in requests], port.finish_all)
    run.run()
    assert port.most_in_flight == most_in_flight
    for request in requests:
        assert outputs(port, request.request_id) == expected_tokens(request)
    plans = map(StepPlan.decode, port.encoded.values())
    chained = [segment.is_chained for plan in plans for segment in plan.segments]
    assert any(chained) == (num_stages == 1)


def test_a_plan_is_sent_to_the_workers_once_and_as_it_was_encoded() -> None:
    run = LoopRun()
    port = run.port
    port.then(lambda: port.say(submit(1)), port.finish_all)
    run.run()
    sent = [message.encoded_plan for message in port.to_workers if isinstance(message, RunPlan)]
    assert sent == list(port.encoded.values()) and len(sent) == 2
    assert port.to_workers[-1] == Shutdown()


def test_outputs_go_to_the_client_whose_request_it_is() -> None:
    run = LoopRun()
    port = run.port
    ids = [(client << CLIENT_SHIFT) | number for client in (0, 2) for number in (1, 2)]

    def ask() -> None:
        port.say(Hello(), client=2)
        for request_id in ids:
            port.say(submit(request_id), client=request_id >> CLIENT_SHIFT)

    port.then(ask, port.finish_all)
    run.run()
    for client in (0, 2):
        served = {
            progress.request_id
            for message in port.sent(Outputs, client)
            for progress in message.items
        }
        assert served == {id_ for id_ in ids if id_ >> CLIENT_SHIFT == client}


def test_a_request_that_cannot_be_served_is_refused_and_touches_nothing() -> None:
    run = LoopRun(max_model_len=16)
    port = run.port
    good = submit(1)

    def ask() -> None:
        port.say(submit(7, num_prompt_tokens=16))
        port.say(good)
        port.say(submit(8, temperature=float("nan")))
        port.say(GetStats(query_id=1))

    port.then(ask, port.finish_all)
    run.run()
    refused = port.sent(RequestRefused)
    assert [(message.request_id, message.field) for message in refused] == [
        (7, "prompt"),
        (8, "temperature"),
    ]
    assert all(message.reason for message in refused)
    [stats] = port.sent(EngineStats)
    assert (stats.num_waiting, stats.num_prompt_tokens) == (1, 3)
    assert outputs(port, 1) == expected_tokens(good)
    assert not port.sent(EngineFailed)


def test_an_abort_while_the_sample_is_in_flight_drops_its_result() -> None:
    run = LoopRun(pipeline_parallel_size=2, max_num_batched_tokens=3)
    port = run.port
    kept = submit(2, max_tokens=4)

    def ask() -> None:
        port.say(submit(1, max_tokens=9))
        port.say(kept)

    def abort() -> None:
        assert [segment.request_id for plan in port.plans for segment in plan.segments] == [1, 2]
        port.say(Abort(request_ids=(1,)))

    port.then(ask, abort, port.finish_all)
    run.run()
    assert outputs(port, 1) == [] and 1 not in endings(port)
    assert outputs(port, 2) == expected_tokens(kept)
    run.loop.scheduler.check_idle()


def test_aborting_what_is_not_there_is_ignored() -> None:
    run = LoopRun()
    port = run.port
    request = submit(1)

    def ask() -> None:
        port.say(Abort(request_ids=(1, 5)))
        port.say(request)

    port.then(ask, port.finish_plan, lambda: port.say(Abort(request_ids=(77,))), port.finish_all)
    run.run()
    assert outputs(port, 1) == expected_tokens(request)


def test_aborting_a_waiting_request_leaves_no_trace() -> None:
    run = LoopRun(max_num_seqs=1)
    port = run.port

    def ask() -> None:
        port.say(submit(1))
        port.say(submit(2))

    port.then(ask, lambda: port.say(Abort(request_ids=(2,))), port.finish_all)
    run.run()
    assert set(endings(port)) == {1}
    assert all(segment.request_id == 1 for plan in port.plans for segment in plan.segments)
    run.loop.scheduler.check_idle()


def test_stats_count_steps_tokens_and_time() -> None:
    run = LoopRun(pipeline_parallel_size=2, tensor_parallel_size=2)
    port = run.port
    port.then(
        lambda: port.say(submit(1, num_prompt_tokens=6, max_tokens=3)),
        port.finish_plan,
        port.finish_plan,
        port.finish_plan,
        lambda: port.say(GetStats(query_id=3)),
        lambda: port.say(Shutdown()),
    )
    run.run()
    [stats] = port.sent(EngineStats)
    assert (stats.query_id, stats.num_steps, stats.num_preemptions) == (3, 3, 0)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (6, 3)
    assert (stats.num_waiting, stats.num_running) == (0, 0)
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)
    assert (stats.forward_seconds, stats.step_seconds) == (1.5, 6.0)
    # Of each stage, rank 0 alone counts.
    assert stats.stage_busy_seconds == (0.75, 3.0)
    assert stats.loop_seconds > 0


@settings(max_examples=60, deadline=None)
@given(
    num_stages=st.integers(1, 3),
    budget=st.integers(1, 12),
    acts=st.lists(
        st.tuples(st.just("submit"), st.integers(1, 13), st.integers(1, 6))
        | st.tuples(st.just("abort"), st.integers(1, 12), st.just(0))
        | st.tuples(st.sampled_from(["finish", "stats"]), st.just(0), st.just(0)),
        min_size=20,
        max_size=60,
    ),
)
def test_whatever_comes_in_whatever_order_each_request_gets_its_own_tokens(
    num_stages: int, budget: int, acts: list[tuple[str, int, int]]
) -> None:
    """Also when pages are so few that requests are preempted."""
    run = LoopRun(
        pipeline_parallel_size=num_stages,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=8,
        max_model_len=24,
    )
    port = run.port
    requests: dict[int, Submit] = {}
    aborted: set[int] = set()

    def act(kind: str, first: int, second: int) -> None:
        if kind == "submit":
            request = submit(len(requests) + 1, num_prompt_tokens=first, max_tokens=second)
            requests[request.request_id] = request
            port.say(request)
        elif kind == "abort":
            if first in requests:
                aborted.add(first)
            port.say(Abort(request_ids=(first,)))
        elif kind == "finish" and port.plans:
            port.finish_plan()
        elif kind == "stats":
            port.say(GetStats(query_id=1))

    port.then(*[lambda drawn=drawn: act(*drawn) for drawn in acts], port.finish_all)
    run.run()
    assert port.most_in_flight <= num_stages
    for request in requests.values():
        got, expected = outputs(port, request.request_id), expected_tokens(request)
        if request.request_id in aborted:
            assert got == expected[: len(got)]
        else:
            assert got == expected
            assert endings(port)[request.request_id] is FinishReason.LENGTH
    run.loop.scheduler.check_idle()


def test_an_idle_engine_is_checked_in_debug_mode() -> None:
    run = LoopRun()
    port = run.port

    def leak() -> None:
        run.loop.scheduler._cache.take_pages(1)
        port.say(GetStats(query_id=1))

    port.then(lambda: port.say(submit(1)), port.finish_plan, port.finish_plan, leak)
    with pytest.raises(AssertionError):
        run.run()


def test_a_result_is_told_behind_the_plan_that_it_makes_possible() -> None:
    """Nobody waits for a plan while clients are told; the last result is told at once."""
    run = LoopRun()
    port, order = run.port, []
    send_workers, send_client = port.send_workers, port.send_client

    def note_plan(message: ToWorker) -> None:
        order.extend(["plan"] * isinstance(message, RunPlan))
        send_workers(message)

    def note_outputs(client: int, message: ToClient) -> None:
        order.extend(["outputs"] * isinstance(message, Outputs))
        send_client(client, message)

    port.send_workers, port.send_client = note_plan, note_outputs
    port.then(lambda: port.say(submit(1, max_tokens=3)), port.finish_all)
    run.run()
    assert order == ["plan", "plan", "outputs", "plan", "outputs", "outputs"]


def test_who_asks_for_counts_is_told_of_every_result_that_came_before() -> None:
    """The result and the question are there in one turn."""
    run = LoopRun()
    port = run.port

    def finish_and_ask() -> None:
        port.finish_plan()
        port.say(GetStats(query_id=3))

    port.then(lambda: port.say(submit(1, max_tokens=1)), finish_and_ask, port.finish_all)
    run.run()
    [stats] = port.sent(EngineStats)
    assert (stats.num_steps, stats.num_generated_tokens) == (1, 1)
    kinds = [type(message) for _, message in port.to_clients]
    assert kinds.index(Outputs) < kinds.index(EngineStats)
