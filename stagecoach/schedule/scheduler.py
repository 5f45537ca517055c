"""Which requests compute which tokens in which step.

Owns the queues, the order, preemption, and all pools, by number; the only writer of a Request.
Two verbs join deciding and doing: `plan()` makes the next step plan, `commit(result)` applies
the oldest plan's result. Knows no tensor, no clock and no process.

    waiting --admit--> prefilling --last chunk--> sampling --commit--> ready --window--> sampling
       ^                    |                  (in flight)               |
       +---- preempt -------+--------------------------------------------+   commit, abort: gone
"""

from collections import deque
from typing import NamedTuple

from stagecoach.cache.id_pool import IdPool
from stagecoach.cache.page_pool import PagePool
from stagecoach.cache.state_slots import StateSlots
from stagecoach.errors import PlanDivergenceError
from stagecoach.request import FinishReason, Request, check_prompt
from stagecoach.schedule.admission import (
    check_fits_pool,
    check_min_tokens,
    may_start,
    pages_to_start,
    resolve_max_tokens,
)
from stagecoach.schedule.chunking import chunk_length, cohort_size
from stagecoach.schedule.commit import Progress, apply_row
from stagecoach.schedule.plan_draft import PlanDraft
from stagecoach.schedule.step_plan import StepPlan, StepResult, plan_digest


class PlanInFlight(NamedTuple):
    """A launched plan whose result is not here yet."""

    plan: StepPlan
    encoded: bytes  # what goes to the workers; they echo its digest
    requests: tuple[Request, ...]  # of each segment


class Scheduler:
    """Turns requests into step plans and results into progress.

    Pages, slots and sampling rows that are freed may be handed out in the very next plan,
    although plans that use them are still in flight: every stage runs plans in the order they
    were made, so the old owner's last access comes before the new owner's first.

    Seniority is the order of `add`. A request takes pages from younger ones only, from those
    with nothing in flight, and never those promised to an older one; so the oldest running
    request gets what it needs, at the latest when the others' results are in, and pages do not
    go back and forth.
    """

    def __init__(  # noqa: PLR0913 -- the limits of an engine, each by name
        self,
        *,
        num_stages: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        max_model_len: int,
        num_pages: int,
        num_slots: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        debug_poison: bool = False,
    ) -> None:
        """`num_pages` and `num_slots` count the reserved page 0 and slot 0, as in MemoryPlan."""
        self._num_stages = num_stages
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._debug_poison = debug_poison

        self._pages = PagePool(num_pages)
        self._slots = StateSlots(num_slots)
        self._rows = IdPool("sampling row", 0, max_num_seqs)
        self._dirty_pages: list[int] = []  # freed since the last plan; debug mode only
        self._dirty_slots: list[int] = []

        # A request is in `_waiting` or in `_running`; a running one is in `_prefilling` (chunks
        # left to plan), in `_ready` (its next window can be planned), or has a sample in flight.
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()  # by seniority
        self._running: dict[int, Request] = {}  # in order of admission
        self._prefilling: dict[int, Request] = {}
        self._ready: dict[int, Request] = {}  # in order of readiness
        self._in_flight: deque[PlanInFlight] = deque()
        self._num_added = 0
        self._num_preemptions = 0
        self._next_step = 0

    @property
    def has_work(self) -> bool:
        """A request is alive, or a result is still to come."""
        return bool(self._requests or self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out: all but the null page."""
        return self._pages.num_total

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    @property
    def num_slots(self) -> int:
        """State slots that can be handed out: all but the zero slot."""
        return self._slots.num_total

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._num_preemptions

    @property
    def num_in_flight(self) -> int:
        """Plans launched and not committed."""
        return len(self._in_flight)

    @property
    def can_launch(self) -> bool:
        """One plan a stage may be in flight; a further one could only queue."""
        return len(self._in_flight) < self._num_stages

    def plan_in_flight(self, step: int) -> PlanInFlight:
        """The launched plan of that number, with its encoded form."""
        return self._in_flight[step - self._in_flight[0].plan.step]

    def add(self, request: Request) -> None:
        """Queue a fresh request behind all others, with `max_tokens` capped to what fits.

        Raises:
            RequestError: it could never be served; names the field. Nothing has changed then.
        """
        assert request.request_id not in self._requests, f"id in use: {request.request_id}"
        num_prompt_tokens = request.num_prompt_tokens
        check_prompt(
            request.prompt_token_ids, vocab_size=self._vocab_size, limit=self._max_model_len - 1
        )
        request.params.check(vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        max_tokens = resolve_max_tokens(request.max_tokens, num_prompt_tokens, self._max_model_len)
        check_min_tokens(min_tokens=request.params.min_tokens, max_tokens=max_tokens)
        check_fits_pool(
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            block_size=self._block_size,
            num_pages=self._pages.num_total,
        )
        request.max_tokens = max_tokens
        request.arrival_index = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: int) -> Progress | None:
        """End a request at once, whatever it is doing; None if it is not (or no longer) here.

        Results that are still to come for it are dropped.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request_id not in self._running:
            self._waiting.remove(request)
        request.finish_reason = FinishReason.ABORT
        self._forget(request)
        return Progress(
            request_id=request_id,
            finish_reason=FinishReason.ABORT,
            steps=request.num_steps,
            preemptions=request.num_preemptions,
        )

    def plan(self) -> StepPlan | None:
        """The next step plan, launched: windows, then chunks of running requests, then new ones.

        None if the pipeline is full or nothing can be computed before a result is in.
        """
        if not self.can_launch:
            return None
        draft = PlanDraft(self._max_num_batched_tokens, self._eos_token_ids)
        self._plan_windows(draft)
        self._plan_chunks(draft)
        self._admit(draft)
        if draft.is_empty:
            # Seniority makes this impossible; a silent stall would be the worst of faults.
            assert self._in_flight or not self._requests, f"nothing can be planned: {self}"
            return None
        plan = draft.finish(self._next_step, self._dirty_pages, self._dirty_slots)
        self._next_step += 1
        self._dirty_pages.clear()
        self._dirty_slots.clear()
        self._in_flight.append(PlanInFlight(plan, plan.encode(), draft.requests))
        if self._debug_poison:
            self.check_integrity()
        return plan

    def commit(self, result: StepResult) -> list[Progress]:
        """Apply the result of the oldest plan in flight.

        Rows of requests that were aborted, finished or preempted since then carry an older
        epoch and are dropped.

        Raises:
            PlanDivergenceError: the worker ran another plan than the head made.
        """
        assert self._in_flight, f"a result without a plan: step {result.step}"
        plan, encoded, requests = self._in_flight[0]
        assert result.step == plan.step, (
            f"results come in launch order: step {result.step} came, {plan.step} is the oldest"
        )
        digest = plan_digest(encoded)
        if result.digest != digest:
            raise PlanDivergenceError(
                f"step {plan.step}: the worker ran plan {result.digest.hex()}, "
                f"the head made {digest.hex()}:\n{plan}"
            )
        assert len(result.rows) == len(plan.segments), f"a row a segment: {result}\n{plan}"
        self._in_flight.popleft()
        progress = []
        for request, segment, row in zip(requests, plan.segments, result.rows, strict=True):
            assert row.request_id == segment.request_id and row.epoch == segment.epoch, (
                f"row {row} answers another segment:\n{plan.marked(segment)}"
            )
            if request.epoch != segment.epoch:
                continue
            item = apply_row(request, segment, row, self._eos_token_ids)
            if request.finish_reason is not None:
                self._forget(request)
            elif segment.sampling_row is not None:
                self._ready[request.request_id] = request
            if item is not None:
                progress.append(item)
        return progress

    def check_integrity(self) -> None:
        """Prove that every page, slot and row is free or owned once, and every queue in order."""
        running = self._running.values()
        self._pages.check_integrity(request.page_ids for request in running)
        self._slots.check_integrity([request.slot] for request in running if request.slot)
        self._rows.check_integrity(
            [request.sampling_row] for request in running if request.sampling_row is not None
        )
        assert len(self._waiting) + len(self._running) == len(self._requests), f"lost: {self}"
        # A chunk that is not the last took the whole budget or the last page: nobody else starts.
        assert len(self._prefilling) <= 1, f"two requests between chunks: {self}"
        order = [request.arrival_index for request in self._waiting]
        assert order == sorted(order), f"the queue is out of order: {order}"
        for request in self._waiting:
            assert request.num_computed == request.num_plans_in_flight == 0, f"waits: {request}"
            assert not request.page_ids and not request.slot, f"waits and owns: {request}"
        for request in running:
            places = (
                request.request_id in self._prefilling,
                request.request_id in self._ready,
                request.is_sample_in_flight,
            )
            assert sum(places) == 1, f"in {places} of prefilling, ready, sampling: {request}"
            has_pages = len(request.page_ids) * self._block_size >= request.num_computed
            assert has_pages, f"computed tokens without a page: {request}"
        assert len(self._in_flight) <= self._num_stages, f"too many plans in flight: {self}"
        counts = dict.fromkeys(self._running, 0)
        for entry in self._in_flight:
            for request, segment in zip(entry.requests, entry.plan.segments, strict=True):
                if request.epoch == segment.epoch:
                    counts[request.request_id] += 1
        for request in running:
            assert counts[request.request_id] == request.num_plans_in_flight, f"{request}"

    def check_idle(self) -> None:
        """Prove that nothing is left when all requests ended and all results are in."""
        assert not self.has_work, f"not idle: {self}"
        assert not self._waiting and not self._running, f"not idle: {self}"
        assert not self._prefilling and not self._ready, f"not idle: {self}"
        for pool in (self._pages, self._slots, self._rows):
            pool.check_integrity(())

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self._waiting)} waiting, {len(self._running)} running, "
            f"{len(self._prefilling)} prefilling, {len(self._ready)} ready, "
            f"{len(self._in_flight)} plans in flight, {self._pages.num_free} of "
            f"{self._pages.num_total} pages free, {self._slots.num_free} of "
            f"{self._slots.num_total} slots free)"
        )

    def _plan_windows(self, draft: PlanDraft) -> None:
        num_decoding = len(self._running) - len(self._prefilling)
        room = min(cohort_size(num_decoding, self._num_stages), draft.budget)
        for request in list(self._ready.values()):
            if not room:
                break
            # An earlier window of this loop may have preempted it.
            if request.request_id not in self._ready:
                continue
            start = request.num_computed
            if start >= len(request.page_ids) * self._block_size:
                if not self._make_room(request, 1):
                    continue
                request.page_ids.extend(self._pages.take(1))
            del self._ready[request.request_id]
            draft.add_window(request)
            room -= 1

    def _plan_chunks(self, draft: PlanDraft) -> None:
        for request in list(self._prefilling.values()):
            if draft.budget:
                self._plan_chunk(request, draft)

    def _plan_chunk(self, request: Request, draft: PlanDraft) -> None:
        """Plan as much of the next chunk as the budget and the pages allow."""
        start = request.num_computed
        remaining = request.num_tokens - start
        held = len(request.page_ids) * self._block_size - start
        if held <= 0 and not self._make_room(request, 1):
            return
        length = chunk_length(
            num_remaining=remaining,
            budget=draft.budget,
            num_free_positions=held + self._pages.num_free * self._block_size,
        )
        if length > held:
            request.page_ids.extend(self._pages.take(-(-(length - held) // self._block_size)))
        draft.add_chunk(request, length)
        if length == remaining:
            del self._prefilling[request.request_id]

    def _admit(self, draft: PlanDraft) -> None:
        while self._waiting and draft.budget:
            request = self._waiting[0]
            if not may_start(
                num_running=len(self._running),
                max_num_seqs=self._max_num_seqs,
                num_free_slots=self._slots.num_free,
                num_free_pages=self._pages.num_free,
                num_needed_pages=self._pages_to_start(request),
            ):
                break
            self._waiting.popleft()
            [request.slot] = self._slots.take(1)
            [request.sampling_row] = self._rows.take(1)
            self._running[request.request_id] = request
            self._prefilling[request.request_id] = request
            self._plan_chunk(request, draft)

    def _pages_to_start(self, request: Request) -> int:
        return pages_to_start(
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            block_size=self._block_size,
        )

    def _promised_pages(self, request: Request) -> int:
        """Pages promised to senior requests between two chunks, and not yet taken."""
        return sum(
            max(0, self._pages_to_start(other) - len(other.page_ids))
            for other in self._prefilling.values()
            if other.arrival_index < request.arrival_index
        )

    def _make_room(self, request: Request, num_pages: int) -> bool:
        """See to it that `num_pages` are free for this request; preempt younger ones if need be.

        False if it must wait for results; then nobody was preempted.
        """
        available = self._pages.num_free - self._promised_pages(request)
        if available >= num_pages:
            return True
        victims = []
        for other in sorted(self._running.values(), key=lambda other: -other.arrival_index):
            if other.arrival_index <= request.arrival_index or available >= num_pages:
                break
            # A result in flight would be lost; and its segment may be in the plan being made.
            if not other.num_plans_in_flight and other.page_ids:
                victims.append(other)
                available += len(other.page_ids)
        if available < num_pages:
            return False
        for victim in victims:
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue, with its committed tokens and nothing else."""
        self._release(request)
        request.num_preemptions += 1
        self._num_preemptions += 1
        place = 0
        while (
            place < len(self._waiting)
            and self._waiting[place].arrival_index < request.arrival_index
        ):
            place += 1
        self._waiting.insert(place, request)

    def _forget(self, request: Request) -> None:
        self._release(request)
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        """Free all that a request holds; from here on its results in flight are of an old epoch."""
        request_id = request.request_id
        for queue in (self._running, self._prefilling, self._ready):
            queue.pop(request_id, None)
        self._pages.free(request.page_ids)
        if self._debug_poison:
            self._dirty_pages.extend(request.page_ids)
        del request.page_ids[:]
        if request.slot is not None:
            self._slots.free([request.slot])
            if self._debug_poison:
                self._dirty_slots.append(request.slot)
            request.slot = None
        if request.sampling_row is not None:
            self._rows.free([request.sampling_row])
            request.sampling_row = None
        request.epoch += 1
        request.num_computed = 0
        request.num_plans_in_flight = 0
        request.is_sample_in_flight = False
