"""Which requests' tokens go into the plan being made: windows, then chunks, then new requests.

Owns the order in which a plan is filled and what each segment takes of budget and memory. Keeps
nothing from plan to plan, and neither launches a plan nor ends a request.
"""

from collections.abc import Callable

from stagecoach.cache.prefix_cache import Hit, PrefixCache
from stagecoach.request import Request
from stagecoach.schedule.chunking import chunk_length, cohort_size
from stagecoach.schedule.drafting import Drafting, WindowRoom
from stagecoach.schedule.plan_draft import PlanDraft
from stagecoach.schedule.queues import Queues
from stagecoach.schedule.request_memory import RequestMemory
from stagecoach.schedule.seniority import Seniority
from stagecoach.schedule.shadow import Shadows


class PlanFilling:
    """What the scheduler's parts have to give, put into a draft."""

    def __init__(  # noqa: PLR0913 -- the parts of a scheduler, each by name
        self,
        *,
        requests: dict[int, Request],
        queues: Queues,
        memory: RequestMemory,
        cache: PrefixCache,
        seniority: Seniority,
        drafting: Drafting,
        shadows: Shadows,
        num_stages: int,
        block_size: int,
        preempt: Callable[[Request], None],
    ) -> None:
        """All are the scheduler's own.

        Args:
            requests: all that are alive; shadows join them when they start.
            preempt: takes a request's place and memory away.
        """
        self._requests = requests
        self._queues = queues
        self._memory = memory
        self._cache = cache
        self._seniority = seniority
        self._drafting = drafting
        self._shadows = shadows
        self._num_stages = num_stages
        self._block_size = block_size
        self._preempt = preempt

    def fill(
        self,
        draft: PlanDraft,
        step: int,
        chained: list[Request],
        *,
        num_seats: int,
        now: float | None,
    ) -> None:
        """Put into the draft what fits.

        Args:
            step: number of the plan.
            chained: whose windows follow one that is in flight.
            num_seats: most requests that may run.
            now: what the requests that begin with this plan note as their `first_planned`.
        """
        self._plan_windows(draft, chained, num_seats)
        self._plan_chunks(draft, step)
        self._admit(draft, step, num_seats, now)

    def _plan_windows(self, draft: PlanDraft, chained: list[Request], num_seats: int) -> None:
        cohort = self._pick_cohort(draft.budget, chained)
        lengths = self._drafting.choose_lengths(
            cohort,
            budget=draft.budget - len(cohort),
            # One free page stays for the next anchor of each of the others, who would else
            # preempt.
            num_spare_pages=max(0, self._cache.num_free_pages - len(self._queues.running) + 1),
            num_chunk_tokens=lambda: self._queues.num_open_tokens(self._find_start(num_seats)),
            room=lambda request: WindowRoom(
                self._memory.num_open_positions(request) - 1,
                self._seniority.promised_pages(request),
            ),
        )
        for request, num_drafts in zip(cohort, lengths, strict=True):
            end = request.num_computed + 1
            if num_drafts:
                self._memory.cover(request, end + num_drafts)
            saves = self._memory.file(request, end, is_window=True)
            proposes = self._drafting.proposes(request)
            draft.add_window(request, num_drafts, saves=saves, proposes=proposes)

    def _pick_cohort(self, budget: int, chained: list[Request]) -> list[Request]:
        """Requests whose anchors go into the plan, each with a page for it: ready ones first."""
        num_decoding = len(self._queues.running) - len(self._queues.prefilling)
        room = min(cohort_size(num_decoding, self._num_stages), budget)
        cohort: list[Request] = []
        for request in list(self._queues.ready.values()):
            if len(cohort) == room:
                break
            # An earlier one of this loop may have preempted it.
            if request.request_id not in self._queues.ready:
                continue
            if self._memory.num_open_positions(request) <= 0 and not self._make_room(request, 1):
                continue
            self._memory.cover(request, request.num_computed + 1)
            del self._queues.ready[request.request_id]
            cohort.append(request)
        for request in chained[: room - len(cohort)]:
            self._memory.cover(request, request.num_computed + 1)
            cohort.append(request)
        return cohort

    def _plan_chunks(self, draft: PlanDraft, step: int) -> None:
        for request in self._queues.chunk_order():
            # An earlier one may have taken the memory of a shadow.
            if draft.has_chunk_room and request.request_id in self._queues.prefilling:
                self._plan_chunk(request, draft, step)

    def _plan_chunk(self, request: Request, draft: PlanDraft, step: int) -> None:
        """Plan as much of the next chunk as the budget and the pages allow."""
        start = request.num_computed
        remaining = request.num_tokens - start
        num_open = self._memory.num_open_positions(request)
        if num_open <= 0 and not self._make_room(request, 1):
            return
        length = chunk_length(
            num_remaining=remaining,
            budget=draft.budget,
            num_free_positions=num_open + self._cache.num_free_pages * self._block_size,
        )
        length = self._shadows.cut(request, draft.share.cut(start, length))
        comparison = self._shadows.compare(request, step)
        if comparison is not None:
            draft.comparisons.append(comparison)
        self._memory.cover(request, start + length)
        saves = self._memory.file(request, start + length, is_window=length == 1)
        is_final = length == remaining
        proposes = is_final and self._drafting.proposes(request)
        draft.add_chunk(
            request,
            length,
            saves=saves,
            proposes=proposes,
            reports_logits=is_final and self._shadows.wants_logits(request),
        )
        if is_final:
            del self._queues.prefilling[request.request_id]

    def _admit(self, draft: PlanDraft, step: int, num_seats: int, now: float | None) -> None:
        self._start_shadows(draft, step, num_seats)
        while draft.has_chunk_room and (hit := self._find_start(num_seats)) is not None:
            request = self._queues.waiting[0]
            self._queues.start(request)
            self._memory.admit(request, hit)
            if not request.num_preemptions:
                request.first_planned = now
            if hit.checkpoint is not None and not request.num_preemptions:
                self._shadows.note_hit(request, hit.checkpoint)
            self._plan_chunk(request, draft, step)

    def _start_shadows(self, draft: PlanDraft, step: int, num_seats: int) -> None:
        """Give shadows their seats; one for which memory is short is given up."""
        waiting = self._shadows.waiting
        while waiting and draft.has_chunk_room and len(self._queues.running) < num_seats:
            shadow = waiting[0]
            if not self._seniority.may_shadow_start(shadow):
                self._shadows.note_release(shadow)
                continue
            waiting.popleft()
            self._requests[shadow.request_id] = shadow
            self._queues.start_shadow(shadow)
            self._memory.start_shadow(shadow)
            self._plan_chunk(shadow, draft, step)

    def _find_start(self, num_seats: int) -> Hit | None:
        """Behind what the head of the queue may start now; None if it has to wait."""
        if not self._queues.waiting or len(self._queues.running) >= num_seats:
            return None
        return self._seniority.find_start()

    def _make_room(self, request: Request, num_pages: int) -> bool:
        """See to it that `num_pages` are free for this request; preempt younger ones if need be.

        False if it must wait for results; then nobody was preempted.
        """
        victims = self._seniority.find_victims(request, num_pages)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        return True
