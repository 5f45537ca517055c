"""What must hold of the scheduler's queues between two of its calls.

Owns the proof only; the pools prove themselves. Runs in debug mode and throughout the tests.
"""

from collections.abc import Collection, Iterable, Mapping

from stagecoach.errors import PlanDivergenceError
from stagecoach.request import Request
from stagecoach.schedule.plan_draft import PlanInFlight
from stagecoach.schedule.queues import Queues
from stagecoach.schedule.step_plan import StepResult


def check_queues(queues: Queues, requests: Mapping[int, Request]) -> None:
    """Prove that every request is in the queues, in order, and once.

    Args:
        requests: all that are alive, by id.
    """
    waiting, running = queues.waiting, queues.running
    ids = [*(request.request_id for request in waiting), *running]
    assert sorted(ids) == sorted(requests), f"lost, or there twice: {ids}"
    assert {*queues.prefilling, *queues.ready} <= {*running}, f"not running: {queues}"
    _check_waiting(waiting)
    _check_running(queues)


def check_result(launched: PlanInFlight, result: StepResult) -> None:
    """Prove that a result answers the oldest plan in flight, segment by segment.

    Raises:
        PlanDivergenceError: the worker ran another plan than the head made.
    """
    plan = launched.plan
    assert result.step == plan.step, (
        f"results come in launch order: step {result.step} came, {plan.step} is the oldest"
    )
    digest = launched.digest
    if result.digest != digest:
        raise PlanDivergenceError(
            f"step {plan.step}: the worker ran plan {result.digest.hex()}, "
            f"the head made {digest.hex()}:\n{plan}"
        )
    assert len(result.rows) == len(plan.segments), f"a row a segment: {result}\n{plan}"
    for segment, row in zip(plan.segments, result.rows, strict=True):
        assert row.request_id == segment.request_id and row.epoch == segment.epoch, (
            f"row {row} answers another segment:\n{plan.marked(segment)}"
        )


def _check_waiting(waiting: Iterable[Request]) -> None:
    """Prove that the queue is in order of seniority and that nobody in it holds anything."""
    order = [request.arrival_index for request in waiting]
    assert order == sorted(order), f"the queue is out of order: {order}"
    for request in waiting:
        assert request.num_computed == request.num_plans_in_flight == 0, f"waits: {request}"
        assert not request.page_ids and not request.slot, f"waits and owns: {request}"
        assert not _has_drafts(request), f"waits with drafts: {request}"


def _check_running(queues: Queues) -> None:
    """Prove that each running request is between chunks, ready, or sampling: one of the three."""
    # A chunk that is not the last took the whole budget or the last page: nobody else starts.
    num_between = sum(not request.is_shadow for request in queues.prefilling.values())
    assert num_between <= 1, f"two requests between chunks: {queues.prefilling}"
    for request in queues.running.values():
        is_ready = request.request_id in queues.ready
        places = (request.request_id in queues.prefilling, is_ready, request.is_sample_in_flight)
        assert sum(places) == 1, f"in {places} of prefilling, ready, sampling: {request}"
        # They follow the newest token, and go into the plan that takes it.
        assert is_ready or not _has_drafts(request), f"drafts of another time: {request}"


def check_in_flight(running: Collection[Request], in_flight: Iterable[PlanInFlight]) -> None:
    """Prove that each running request counts its segments in flight rightly."""
    counts = {request.request_id: 0 for request in running}
    for entry in in_flight:
        for request, segment in zip(entry.requests, entry.plan.segments, strict=True):
            if request.epoch == segment.epoch:
                counts[request.request_id] += 1
    for request in running:
        assert counts[request.request_id] == request.num_plans_in_flight, f"{request}"


def _has_drafts(request: Request) -> bool:
    return bool(request.draft_token_ids or request.confidences or request.num_replay)
