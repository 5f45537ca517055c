"""Chained windows: who is planned again while its newest token is still to be sampled.

Owns when a plan is made ahead, behind one whose result is not here, and for whom. A chained window
is of one token, the one that the request's sampling row chose last: the worker knows it, the head
does not. All else of it is known, since without drafts each row has one token. Nothing is guessed:
until its result is here no token list is longer.

    plan n      | anchor, index N - 1 | samples token N      |
    plan n + 1            chained: token N, index N | samples token N + 1 |

If the row of plan n ends the request, that of plan n + 1 is of an older epoch and dropped, like
any of an aborted one. What the request held may be handed out at once: workers run plans in their
order, so the chained window's accesses come before those of the next owner.
"""

from collections.abc import Sequence

from stagecoach.request import Request
from stagecoach.schedule.plan_draft import PlanInFlight
from stagecoach.schedule.queues import Queues
from stagecoach.schedule.request_memory import RequestMemory
from stagecoach.schedule.seniority import Seniority
from stagecoach.schedule.step_plan import Segment


class Chaining:
    """Asked before a plan is made ahead, of the queues and the memory as they are at that moment.

    Memory comes first: a plan is made ahead only if everybody gets a page who lacks one. So
    where memory is short all results come in, and those who have to give way are idle
    (`seniority.py`).
    """

    def __init__(
        self, num_stages: int, queues: Queues, memory: RequestMemory, seniority: Seniority
    ) -> None:
        self._num_stages = num_stages
        self._queues = queues
        self._memory = memory
        self._seniority = seniority

    def find(self, in_flight: Sequence[PlanInFlight]) -> list[Request] | None:
        """Whose windows may be chained to the newest plan, in its order.

        Nobody's while a stage is without a plan. None: no plan may be made ahead.

        A request that has to wait for its result joins the plan after this one, which has those
        that are chained as well. Not so if it had to wait every time: then it would only ever
        meet others like it, and each of their plans read all weights for a part of them. So
        nothing is planned ahead while such a request, one under a grammar, decodes.
        """
        if len(in_flight) < self._num_stages:
            return []
        newest = in_flight[-1]
        ready = self._queues.ready.values()
        if any(request.constraint is not None for request in ready):
            return None
        chained = []
        for request, segment in zip(newest.requests, newest.plan.segments, strict=True):
            if request.epoch != segment.epoch or segment.sampling_row is None:
                continue
            if request.constraint is not None:
                return None
            if self._can_chain(request, segment):
                chained.append(request)
        num_pages = self._memory.cache.num_free_pages - self._seniority.all_promised_pages()
        num_lacking = sum(
            self._memory.num_open_positions(request) <= 0 for request in (*ready, *chained)
        )
        return chained if num_lacking <= num_pages else None

    def _can_chain(self, request: Request, segment: Segment) -> bool:
        """Whether its next window needs nothing of the result but the token."""
        # One token is in flight already, and another one follows.
        has_room = request.num_left >= 2 and request.num_samples_in_flight == 1
        # A state is filed under the tokens before it.
        files_nothing = not self._memory.passes_rung(request, request.num_computed + 1)
        is_plain = not (segment.proposes or segment.num_draft_tokens or segment.reports_logits)
        return has_room and is_plain and files_nothing and not request.is_shadow
