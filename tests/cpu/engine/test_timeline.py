"""The timeline of the plans: what the loop tells of them, of requests and of slots."""

import time
from itertools import pairwise
from typing import Any

import pytest

from stagecoach import LLM, SamplingParams
from stagecoach.engine.messages import (
    MAX_PLANS,
    MAX_REQUESTS,
    Abort,
    EngineStats,
    GetStats,
    GetTimeline,
    StageSpan,
    StepEcho,
    Timeline,
)
from stagecoach.engine.telemetry import Telemetry
from stagecoach.engine.timeline import PlanRing
from stagecoach.errors import EngineDeadError
from stagecoach.schedule.step_plan import RowResult, Segment, StepPlan, StepResult
from tests.cpu.engine.fakes import LoopRun, submit
from tests.small_engine import thread_engine, write_small_model

pytestmark = pytest.mark.cpu


def window(request_id: int, num_drafts: int) -> Segment:
    return Segment(
        request_id=request_id,
        epoch=0,
        start=5,
        token_ids=tuple(range(1 + num_drafts)),
        num_draft_tokens=num_drafts,
        read_slot=request_id,
        write_slot=request_id,
        page_table=b"",
        sampling_row=0,
    )


def chunk(request_id: int, num_tokens: int) -> Segment:
    return Segment(
        request_id=request_id,
        epoch=0,
        start=0,
        token_ids=tuple(range(num_tokens)),
        read_slot=0,
        write_slot=request_id,
        page_table=b"",
    )


def result(step: int, *rows: tuple[int, ...], **fields: Any) -> StepResult:
    return StepResult(
        step=step,
        digest=b"",
        rows=tuple(
            RowResult(request_id=number, epoch=0, token_ids=row)
            for number, row in enumerate(rows, start=1)
        ),
        **fields,
    )


def test_a_plan_tells_its_windows_its_chunks_and_what_was_accepted() -> None:
    ring = PlanRing(2)
    plan = StepPlan(step=3, segments=(window(1, 2), window(2, 0), window(3, 3), chunk(4, 9)))
    ring.note_launched(plan, 10.0)
    [trace] = ring.traces(0)
    assert (trace.step, trace.launched, trace.committed) == (3, 10.0, None)
    assert (trace.num_windows, trace.num_chunks) == (3, 1)
    assert (trace.num_tokens, trace.num_draft_tokens) == (3 + 1 + 4 + 9, 5)
    assert trace.spans == (None, None) and trace.num_accepted_tokens == 0
    # The third is not finite, and has no tokens.
    ring.note_committed(result(3, (5, 6), (7,), (), (8,)), 12.0)
    [trace] = ring.traces(3)
    assert (trace.committed, trace.num_accepted_tokens) == (12.0, 1)
    assert ring.traces(4) == ()


def test_spans_come_in_any_order_and_each_at_its_stage() -> None:
    ring = PlanRing(3)
    ring.note_launched(StepPlan(step=0, segments=(chunk(1, 4),)), 1.0)
    last = StageSpan(1.5, 2.0, 0.25)
    ring.note_span(0, 2, last)
    assert ring.traces(0)[0].spans == (None, None, last)


def test_the_ring_holds_the_latest_and_forgets_what_comes_too_late() -> None:
    ring = PlanRing(1)
    first = 40  # steps before were measurements
    for step in range(first, first + MAX_PLANS + 7):
        ring.note_launched(StepPlan(step=step, segments=(chunk(1, 4),)), float(step))
    ring.note_span(first, 0, StageSpan(0.0, 1.0, 0.0))
    ring.note_committed(result(first, ()), 1.0)
    traces = ring.traces(0)
    assert [trace.step for trace in traces] == list(range(first + 7, first + 7 + MAX_PLANS))
    assert all(trace.committed is None and trace.spans == (None,) for trace in traces)
    assert [trace.step for trace in ring.traces(first + MAX_PLANS + 5)] == [
        first + MAX_PLANS + 5,
        first + MAX_PLANS + 6,
    ]


def test_busy_and_hop_seconds_add_up_by_stage() -> None:
    telemetry = Telemetry(2)
    telemetry.begin()
    for step in range(3):
        telemetry.note_launched(StepPlan(step=step, segments=(window(1, 4),)), 1.0)
        echo = StepEcho(
            worker="", step=step, digest=b"", busy_seconds=0.5, arrived=float(step), hop_seconds=0
        )
        telemetry.note_stage(0, echo)
        done = result(step, (1, 2), arrived=float(step), busy_seconds=0.25, hop_seconds=0.5)
        telemetry.note_stage(1, done)
        telemetry.note_committed(done)
    run = LoopRun()
    run.loop.start()
    stats = telemetry.stats(
        7, run.loop.scheduler, num_compiling=2, speculation=None, cache_needs=None
    )
    assert stats.stage_busy_seconds == (1.5, 0.75)
    assert stats.stage_hop_seconds == (0.0, 1.5)
    assert (stats.num_steps, stats.num_windows, stats.num_window_tokens) == (3, 3, 15)
    timeline = telemetry.timeline(7, 1, run.loop.scheduler, ())
    assert [plan.spans for plan in timeline.plans] == [
        (StageSpan(step, step + 0.5, 0.0), StageSpan(step, step + 0.75, 0.5)) for step in (1.0, 2.0)
    ]


def test_idle_seconds_never_shrink_and_plans_are_counted_by_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    telemetry = Telemetry(1)
    telemetry.begin()
    run = LoopRun()
    run.loop.start()

    def stats() -> EngineStats:
        return telemetry.stats(
            7, run.loop.scheduler, num_compiling=0, speculation=None, cache_needs=None
        )

    idle_seconds = []
    # A plan that takes 4 s, one of them on the way, is still there when it is asked again.
    for second, busy_seconds in ((2.0, 0.0), (5.0, 0.0), (6.0, 3.0), (8.0, 0.0), (11.0, 0.0)):
        now = 100.0 + second
        done = result(0, busy_seconds=busy_seconds, hop_seconds=busy_seconds / 3)
        telemetry.note_stage(0, done)
        idle_seconds += stats().stage_idle_seconds
    assert idle_seconds == [2.0, 5.0, 5.0, 5.0, 7.0]
    for segment in (window(1, 0), window(1, 4), chunk(2, 40)):
        telemetry.note_launched(StepPlan(step=0, segments=(segment,)), 1.0)
    counted = stats().iteration_tokens
    assert counted is not None and counted.total == 1 + 5 + 40
    assert counted.bounds[:5] == (1.0, 8.0, 16.0, 32.0, 64.0)
    assert counted.cumulative()[:5] == [1, 2, 2, 2, 3]


def test_the_loop_tells_what_is_in_flight_and_who_is_alive() -> None:
    run = LoopRun(pipeline_parallel_size=2, max_num_seqs=2, max_num_batched_tokens=8)
    port = run.port
    port.then(
        lambda: [port.say(submit(number, num_prompt_tokens=12)) for number in (1, 2, 3, 4)],
        lambda: port.say(Abort(request_ids=(4,))),
        lambda: [port.say(GetTimeline(query_id=1, first_step=0)), port.say(GetStats(query_id=2))],
        port.finish_all,
        lambda: None,
    )
    run.run()
    [timeline] = port.sent(Timeline)
    [stats] = port.sent(EngineStats)
    assert [plan.committed for plan in timeline.plans] == [None, None]
    assert stats.num_plans_in_flight == 2
    assert [(trace.request_id, trace.state) for trace in timeline.requests] == [
        (1, "sampling"),
        (2, "prefilling"),
        (3, "waiting"),
    ]
    running, _, waiting = timeline.requests
    assert (running.num_prompt_tokens, running.num_computed_tokens) == (12, 12)
    assert running.slot is not None and running.num_pages == 3
    assert (waiting.slot, waiting.num_pages, waiting.num_computed_tokens) == (None, 0, 0)
    assert len(timeline.slot_states) == stats.num_slots
    slots = {trace.slot for trace in timeline.requests} - {None}
    assert {slot for slot in slots if slot and timeline.slot_states[slot - 1] == 1} == slots


def test_a_long_queue_is_cut() -> None:
    run = LoopRun(max_num_seqs=2)
    run.loop.start()
    port = run.port
    for number in range(MAX_REQUESTS + 9):
        port.say(submit(number))
    port.say(GetTimeline(query_id=1, first_step=0))
    port.then(run.port.finish_all)
    run.loop.step()
    [timeline] = port.sent(Timeline)
    assert [trace.request_id for trace in timeline.requests] == list(range(MAX_REQUESTS))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_small_model(tmp_path_factory.mktemp("model"))
    with thread_engine(folder, pipeline_parallel_size=2) as llm:
        yield llm


def whole_timeline(engine: LLM) -> Timeline:
    """An early stage may be heard of after the answer."""
    deadline = time.monotonic() + 20
    while True:
        timeline = engine.client.timeline()
        if not any(None in plan.spans for plan in timeline.plans):
            return timeline
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_engine_draws_its_plans_in_order(engine: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.generate([[65] * 40, [66] * 30], params)
    timeline = whole_timeline(engine)
    stats = engine.stats()
    assert len(timeline.plans) == stats.num_steps > 10
    assert [plan.step for plan in timeline.plans] == sorted(plan.step for plan in timeline.plans)
    for plan in timeline.plans:
        assert plan.committed is not None and plan.launched <= plan.committed <= timeline.now
        for span in plan.spans:
            assert span is not None
            assert plan.launched <= span.arrived <= span.arrived + span.hop_seconds <= span.ended
        assert plan.spans[-1] is not None and plan.spans[-1].ended <= plan.committed
    for stage in range(2):
        spans = [plan.spans[stage] for plan in timeline.plans]
        # A stage executes one plan after the other.
        for before, after in pairwise(spans):
            assert before is not None and after is not None and before.ended <= after.arrived
        hop_seconds = sum(span.hop_seconds for span in spans if span is not None)
        assert stats.stage_hop_seconds[stage] == pytest.approx(hop_seconds)
        busy_seconds = sum(span.ended - span.arrived for span in spans if span) - hop_seconds
        assert stats.stage_busy_seconds[stage] == pytest.approx(busy_seconds)
        assert busy_seconds + hop_seconds < stats.uptime_seconds
    # The first stage waits for nobody, the other for the first.
    assert stats.stage_hop_seconds[0] < stats.stage_hop_seconds[1]
    assert timeline.requests == ()
    assert sum(plan.num_tokens for plan in timeline.plans) >= 70 + 2 * 11
    assert stats.num_windows == sum(plan.num_windows for plan in timeline.plans)
    latest = engine.client.timeline(timeline.plans[-3].step)
    assert latest.plans == timeline.plans[-3:]


def test_checkpoints_are_seen_in_their_slots(engine: LLM) -> None:
    timeline = engine.client.timeline()
    stats = engine.stats()
    assert stats.prefix_cache is not None and stats.prefix_cache.num_checkpoints > 0
    assert timeline.slot_states.count(2) == stats.prefix_cache.num_checkpoints
    assert timeline.slot_states.count(0) == stats.num_slots - timeline.slot_states.count(2)


def test_a_dead_engine_has_no_timeline_and_says_so(engine: LLM) -> None:
    client = engine.client
    engine.close()
    with pytest.raises(EngineDeadError):
        client.timeline()
