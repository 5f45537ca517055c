"""Whether requests get on, and a report of what blocks each of them when they do not.

Owns the count of plans since anything last came of one, its bound, and the text of a StalledError.
Changes nothing: who gets memory is the scheduler's choice, and its order of seniority is why
neither case can occur. This is what notices when that reasoning, or the code behind it, is wrong.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stagecoach.request import Request
from stagecoach.schedule.queues import Queues
from stagecoach.schedule.request_memory import RequestMemory
from stagecoach.schedule.seniority import Seniority

# A report must stay readable with thousands of requests in the queue.
_MOST_LINES = 20


class ProgressWatch:
    """Counts plans in a row of which nothing came: no token, and no request that ended or, what
    it does once at most, started over.

    One prompt at a time is between chunks, and a chunk has a token at least; behind its last
    chunk it samples. So fewer than `max_model_len` plans bring no token, those in flight beside;
    twice as many if the second copy of a prompt that verifies a hit is computed in between.
    """

    def __init__(self, *, max_model_len: int, most_in_flight: int) -> None:
        self.limit = 2 * (max_model_len + most_in_flight)
        self.num_plans = 0

    @property
    def is_over(self) -> bool:
        """More plans in a row were for nothing than any traffic explains."""
        return self.num_plans > self.limit

    def note_plan(self) -> None:
        """One more plan was made."""
        self.num_plans += 1

    def note_progress(self) -> None:
        """A request got a token, started over, or ended."""
        self.num_plans = 0


class Blocked(NamedTuple):
    """A request and what it cannot get on without."""

    request: Request
    place: str  # which queue it is in
    num_wanted_pages: int = 0
    wants_slot: bool = False


def blocked_requests(queues: Queues, seniority: Seniority, memory: RequestMemory) -> list[Blocked]:
    """All requests that are alive, those that run first, with what each waits for."""
    blocked = []
    for request in queues.running.values():
        place = "sampling"
        if request.request_id in queues.prefilling:
            place = "between chunks"
        elif request.request_id in queues.ready:
            place = "ready to decode"
        needs_page = memory.num_open_positions(request) <= 0
        blocked.append(Blocked(request, place, num_wanted_pages=int(needs_page)))
    for request in queues.waiting:
        blocked.append(
            Blocked(request, "waiting", seniority.pages_to_start(request), wants_slot=True)
        )
    return blocked


def stall_report(head: str, blocked: Sequence[Blocked]) -> str:
    """Who waits for what and what each holds meanwhile, a line a request.

    Args:
        head: what was noticed, and the totals.
    """
    lines = [head, *(f"  {_line(item)}" for item in blocked[:_MOST_LINES])]
    if len(blocked) > _MOST_LINES:
        lines.append(f"  and {len(blocked) - _MOST_LINES} more")
    return "\n".join(lines)


def _line(blocked: Blocked) -> str:
    request = blocked.request
    wants = [_count(blocked.num_wanted_pages, "page")] if blocked.num_wanted_pages else []
    wants += ["a state slot"] if blocked.wants_slot else []
    if request.num_plans_in_flight:
        wants.append(f"the results of {_count(request.num_plans_in_flight, 'plan')}")
    holds = [_count(len(request.page_ids), "page")] if request.page_ids else []
    holds += [] if request.slot is None else [f"slot {request.slot}"]
    return (
        f"request {request.request_id}.{request.epoch} ({blocked.place}) at "
        f"{request.num_computed} of {request.num_tokens} tokens wants "
        f"{', '.join(wants) or 'nothing'}; it holds {', '.join(holds) or 'nothing'}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
