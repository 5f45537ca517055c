"""Plans on their way through the stages, as a file for a trace viewer and as a few figures.

Owns both forms of what the engine's timeline holds: Chrome trace events, which Perfetto and
`chrome://tracing` open, and how much of the time each stage computed. Asks nobody; imports no
torch. Times are seconds of the machine's monotonic clock.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from stagecoach.engine.messages import PlanTrace, StageSpan

_PROCESS = 1
# Track 0 is the engine loop's; stage s has track s + 1.
_LOOP = 0


class StageUse(NamedTuple):
    """How busy the stages were over a run of plans."""

    num_plans: int
    busy_shares: tuple[float, ...]  # of each stage, from the run's beginning to its end
    bound: float  # what plans that take equally long on every stage would reach


def prefill_use(plans: Sequence[PlanTrace]) -> StageUse | None:
    """Of the longest run of plans with nothing but chunks; the bound is n / (n + p - 1).

    The pipeline is empty before it and runs dry after it. None without such plans.
    """
    run = _longest_run(plans, lambda plan: plan.num_windows == 0)
    if not run:
        return None
    num_stages = len(run[0].spans)
    return _use(run, len(run) / (len(run) + num_stages - 1))


def decode_use(plans: Sequence[PlanTrace]) -> StageUse | None:
    """Of the longest run of plans with nothing but windows; stages could always be busy."""
    run = _longest_run(plans, lambda plan: plan.num_chunks == 0)
    return _use(run, 1.0) if run else None


def trace_events(plans: Sequence[PlanTrace]) -> dict[str, Any]:
    """The JSON object format of Chrome's trace events, in microseconds since the first launch.

    A track a stage: `compute`, `hop` (it has a plan, and what the stage before makes of it is not
    here) and `wait` (it has none). Arrows follow a plan from stage to stage. The loop's track has
    every plan from its launch to its commit, and there are counters of tokens and of plans in
    flight.

    Args:
        plans: oldest first.
    """
    origin = plans[0].launched if plans else 0.0
    num_stages = len(plans[0].spans) if plans else 0
    names = ["engine loop", *(f"stage {stage}" for stage in range(num_stages))]
    events = [_metadata("process_name", _LOOP, "Stagecoach")]
    events += [_metadata("thread_name", track, name) for track, name in enumerate(names)]
    for plan in plans:
        events += _loop_events(plan, origin)
        events += _flow_events(plan, origin)
    for stage in range(num_stages):
        events += _stage_events(plans, stage, origin)
    events += _counter_events(plans, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _longest_run(
    plans: Sequence[PlanTrace], belongs: Callable[[PlanTrace], bool]
) -> list[PlanTrace]:
    """Consecutive plans of a kind that every stage has told of."""
    longest: list[PlanTrace] = []
    run: list[PlanTrace] = []
    for plan in plans:
        run = [*run, plan] if belongs(plan) and None not in plan.spans else []
        longest = max(longest, run, key=len)
    return longest


def _use(run: Sequence[PlanTrace], bound: float) -> StageUse:
    spans = [[span for span in plan.spans if span is not None] for plan in run]
    began = min(_computes_from(stages[0]) for stages in spans)
    elapsed = max(stages[-1].ended for stages in spans) - began
    busy_shares = tuple(
        sum(span.ended - _computes_from(span) for span in of_stage) / elapsed
        for of_stage in zip(*spans, strict=True)
    )
    return StageUse(len(run), busy_shares, bound)


def _computes_from(span: StageSpan) -> float:
    return span.arrived + span.hop_seconds


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _metadata(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _slice(name: str, track: int, start: float, end: float, **arguments: Any) -> dict[str, Any]:
    """`start` and `end` in seconds since the origin."""
    return {
        "ph": "X",
        "name": name,
        "pid": _PROCESS,
        "tid": track,
        "ts": _microseconds(start),
        "dur": _microseconds(max(0.0, end - start)),
        "args": arguments,
    }


def _loop_events(plan: PlanTrace, origin: float) -> Iterator[dict[str, Any]]:
    """Plans in flight overlap, so they are asynchronous slices."""
    common = {"cat": "plan", "name": f"plan {plan.step}", "id": plan.step, "pid": _PROCESS}
    arguments = {
        "windows": plan.num_windows,
        "chunks": plan.num_chunks,
        "tokens": plan.num_tokens,
        "drafts": plan.num_draft_tokens,
        "accepted drafts": plan.num_accepted_tokens,
    }
    launched = _microseconds(plan.launched - origin)
    yield {"ph": "b", "tid": _LOOP, "ts": launched, "args": arguments, **common}
    if plan.committed is not None:
        yield {"ph": "e", "tid": _LOOP, "ts": _microseconds(plan.committed - origin), **common}


def _flow_events(plan: PlanTrace, origin: float) -> Iterator[dict[str, Any]]:
    """Arrows from where a stage begins to compute to where the next one does."""
    told = [(stage, span) for stage, span in enumerate(plan.spans) if span is not None]
    for place, (stage, span) in enumerate(told):
        kind = "s" if place == 0 else "f" if place == len(told) - 1 else "t"
        if len(told) > 1:
            yield {
                "ph": kind,
                "bp": "e",
                "cat": "hand-off",
                "name": "hand-off",
                "id": plan.step,
                "pid": _PROCESS,
                "tid": stage + 1,
                "ts": _microseconds(_computes_from(span) - origin),
            }


def _stage_events(
    plans: Sequence[PlanTrace], stage: int, origin: float
) -> Iterator[dict[str, Any]]:
    track, free = stage + 1, None
    for plan in plans:
        span = plan.spans[stage]
        if span is None:
            continue
        arrived, ended = span.arrived - origin, span.ended - origin
        computes_from = _computes_from(span) - origin
        if free is not None and arrived > free:
            yield _slice("wait", track, free, arrived)
        if span.hop_seconds > 0:
            yield _slice("hop", track, arrived, computes_from, step=plan.step)
        yield _slice("compute", track, computes_from, ended, step=plan.step, tokens=plan.num_tokens)
        free = ended


def _counter_events(plans: Sequence[PlanTrace], origin: float) -> Iterator[dict[str, Any]]:
    changes: list[tuple[float, int]] = []
    for plan in plans:
        num_window_tokens = plan.num_windows + plan.num_draft_tokens
        tokens = {"windows": num_window_tokens, "chunks": plan.num_tokens - num_window_tokens}
        launched = plan.launched - origin
        yield _counter("tokens of a plan", launched, tokens)
        changes.append((launched, 1))
        if plan.committed is not None:
            changes.append((plan.committed - origin, -1))
    num_in_flight = 0
    for seconds, change in sorted(changes):
        num_in_flight += change
        yield _counter("plans in flight", seconds, {"plans": num_in_flight})


def _counter(name: str, seconds: float, values: dict[str, int]) -> dict[str, Any]:
    ts = _microseconds(seconds)
    return {"ph": "C", "name": name, "pid": _PROCESS, "tid": _LOOP, "ts": ts, "args": values}
