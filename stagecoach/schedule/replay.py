"""What of the requests outlives the workers' memory: their tokens, and nothing else.

Owns how a request forgets what it holds and how far it was computed. A scheduler whose workers
have lost their memory is left, and another one computes its requests again: sampling depends on
the seed and the position alone, so that their tokens are the same. Knows no worker.
"""

from collections.abc import Iterable
from typing import NamedTuple

from stagecoach.cache.state_slots import ZERO_SLOT
from stagecoach.request import Request
from stagecoach.schedule.plan_draft import PlanInFlight


class Unfinished(NamedTuple):
    """What one scheduler leaves to the next."""

    requests: list[Request]  # of clients, by seniority
    in_flight: list[Request]  # those of them that a plan in flight computes
    next_step: int


def leave(
    requests: Iterable[Request], in_flight: Iterable[PlanInFlight], next_step: int
) -> Unfinished:
    """Take the requests of clients out of a scheduler that is not used any more.

    Args:
        requests: all that are alive; the engine's own are dropped.
        in_flight: plans whose results never come.
    """
    computing = {
        segment.request_id
        for launched in in_flight
        for request, segment in zip(launched.requests, launched.plan.segments, strict=True)
        if request.epoch == segment.epoch
    }
    left = sorted(
        (request for request in requests if not request.is_shadow),
        key=lambda request: request.arrival_index,
    )
    for request in left:
        # One that still waits for its first admission has lost nothing.
        if request.slot is not None:
            request.num_preemptions += 1
        forget_progress(request)
        del request.page_ids[:]
        request.slot = request.sampling_row = None
        request.read_slot = ZERO_SLOT
    return Unfinished(
        left, [request for request in left if request.request_id in computing], next_step
    )


def forget_progress(request: Request) -> None:
    """The end of an admission: only committed tokens stay, and results in flight are too old."""
    request.epoch += 1
    request.num_computed = request.num_replay = 0
    request.draft_token_ids = request.confidences = ()
    request.num_plans_in_flight = 0
    request.num_samples_in_flight = 0
