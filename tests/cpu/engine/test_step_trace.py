"""Trace events and busy shares of a timeline whose every second is known."""

import json
from itertools import pairwise

import pytest

from stagecoach.engine.messages import PlanTrace, StageSpan
from stagecoach.engine.step_trace import decode_use, prefill_use, trace_events

pytestmark = pytest.mark.cpu

START = 100.0


def plan(step: int, *spans: StageSpan | None, num_windows: int = 0, **fields: float) -> PlanTrace:
    """A chunk of 7 tokens, or so many windows of two tokens each."""
    launched = fields.get("launched", START + step)
    return PlanTrace(
        step=step,
        launched=launched,
        committed=fields.get("committed", launched + 3),  # type: ignore[arg-type]
        num_windows=num_windows,
        num_chunks=0 if num_windows else 1,
        num_tokens=2 * num_windows or 7,
        num_draft_tokens=num_windows,
        num_accepted_tokens=0,
        spans=spans,
    )


def even_plans(num_plans: int) -> list[PlanTrace]:
    """Two stages, a second for each plan on each: the second stage waits for the first."""
    return [
        plan(
            step,
            StageSpan(START + step, START + step + 1, 0.0),
            StageSpan(START + step, START + step + 2, 1.0),
        )
        for step in range(num_plans)
    ]


@pytest.mark.parametrize("num_plans", [1, 3, 9])
def test_even_plans_reach_the_bound(num_plans: int) -> None:
    use = prefill_use(even_plans(num_plans))
    assert use is not None and use.num_plans == num_plans
    assert use.bound == num_plans / (num_plans + 1)
    assert use.busy_shares == pytest.approx((use.bound, use.bound))
    assert decode_use(even_plans(num_plans)) is None


def test_the_longest_run_of_a_kind_counts_and_only_what_every_stage_has_told() -> None:
    prefill = even_plans(2)
    decode = [
        plan(step, StageSpan(110 + step, 110.75 + step, 0.25), num_windows=2)
        for step in range(2, 6)
    ]
    assert decode_use(decode[:1]) is not None
    use = decode_use([*decode, plan(6, None, num_windows=1)])
    assert use is not None and (use.num_plans, use.bound) == (4, 1.0)
    assert use.busy_shares == pytest.approx((4 * 0.5 / 3.5,))
    used = prefill_use([*prefill, plan(2, *prefill[0].spans, num_windows=1), *even_plans(1)])
    assert used is not None and used.num_plans == 2
    assert prefill_use([]) is None and decode_use([]) is None


def test_every_moment_of_a_stage_is_one_slice() -> None:
    """Compute, hop and wait follow each other without a gap and without an overlap."""
    spans = [(0.5, 2.0, 0.25), (3.0, 4.0, 0.0), (4.0, 6.0, 1.0)]
    plans = [
        plan(step, StageSpan(START + arrived, START + ended, hop))
        for step, (arrived, ended, hop) in enumerate(spans)
    ]
    events = trace_events(plans)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in slices] == [
        ("hop", 0.5e6, 0.25e6),
        ("compute", 0.75e6, 1.25e6),
        ("wait", 2e6, 1e6),
        ("compute", 3e6, 1e6),
        ("hop", 4e6, 1e6),
        ("compute", 5e6, 1e6),
    ]
    for before, after in pairwise(slices):
        assert before["ts"] + before["dur"] == after["ts"]
    assert {event["tid"] for event in slices} == {1}


def test_a_plan_is_followed_from_its_launch_over_all_stages_to_its_commit() -> None:
    [first, second] = even_plans(2)
    open_plan = PlanTrace(2, START + 2, None, 1, 0, 2, 1, 0, (None, None))
    trace = trace_events([first, second, open_plan])
    assert json.loads(json.dumps(trace)) == trace
    events = trace["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["Stagecoach", "engine loop", "stage 0", "stage 1"]
    assert [(event["ph"], event["id"], event["ts"]) for event in events if event["ph"] in "be"] == [
        ("b", 0, 0.0),
        ("e", 0, 3e6),
        ("b", 1, 1e6),
        ("e", 1, 4e6),
        ("b", 2, 2e6),
    ]
    arrows = [(event["ph"], event["id"], event["tid"]) for event in events if event["ph"] in "sft"]
    assert arrows == [("s", 0, 1), ("f", 0, 2), ("s", 1, 1), ("f", 1, 2)]
    # An arrow must begin and end within a slice of its track.
    for event in events:
        if event["ph"] in "sft":
            assert any(
                other["ph"] == "X"
                and other["tid"] == event["tid"]
                and other["ts"] <= event["ts"] <= other["ts"] + other["dur"]
                for other in events
            )
    in_flight = [event["args"]["plans"] for event in events if event["name"] == "plans in flight"]
    assert in_flight == [1, 2, 3, 2, 1]
    tokens = [event["args"] for event in events if event["name"] == "tokens of a plan"]
    assert tokens == [{"windows": 0, "chunks": 7}] * 2 + [{"windows": 2, "chunks": 0}]


def test_nothing_gives_an_empty_trace() -> None:
    assert [event["ph"] for event in trace_events([])["traceEvents"]] == ["M", "M"]
