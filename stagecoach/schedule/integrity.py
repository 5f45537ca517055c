"""What must hold of the scheduler's queues between two of its calls.

Owns the proof only; the pools prove themselves. Runs in debug mode and throughout the tests.
"""

from collections.abc import Collection, Iterable, Mapping

from stagecoach.request import Request
from stagecoach.schedule.plan_draft import PlanInFlight


def check_waiting(waiting: Iterable[Request]) -> None:
    """Prove that the queue is in order of seniority and that nobody in it holds anything."""
    order = [request.arrival_index for request in waiting]
    assert order == sorted(order), f"the queue is out of order: {order}"
    for request in waiting:
        assert request.num_computed == request.num_plans_in_flight == 0, f"waits: {request}"
        assert not request.page_ids and not request.slot, f"waits and owns: {request}"
        assert not _has_drafts(request), f"waits with drafts: {request}"


def check_running(
    running: Collection[Request], prefilling: Mapping[int, Request], ready: Mapping[int, Request]
) -> None:
    """Prove that each running request is between chunks, ready, or sampling: one of the three."""
    # A chunk that is not the last took the whole budget or the last page: nobody else starts.
    assert len(prefilling) <= 1, f"two requests between chunks: {prefilling}"
    for request in running:
        is_ready = request.request_id in ready
        places = (request.request_id in prefilling, is_ready, request.is_sample_in_flight)
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
