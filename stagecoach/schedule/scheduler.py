"""Which requests compute which tokens in which step.

Owns the queues, the order, preemption, and with its helpers all that is written to a Request.
Two verbs join deciding and doing: `plan()` makes the next step plan, `commit(result)` applies
the oldest plan's result. Knows no tensor, no clock and no process.

    waiting --admit--> prefilling --last chunk--> sampling --commit--> ready --window--> sampling
       ^                    |                  (in flight)               |
       +---- preempt -------+--------------------------------------------+   commit, abort: gone
"""

from collections import deque

from stagecoach.errors import PlanDivergenceError
from stagecoach.request import FinishReason, Request, check_prompt
from stagecoach.schedule.admission import (
    check_fits_pool,
    check_min_tokens,
    may_start,
    pages_to_start,
    resolve_max_tokens,
)
from stagecoach.schedule.chunking import (
    DraftRoom,
    chunk_length,
    cohort_size,
    draft_budget,
    draft_limits,
)
from stagecoach.schedule.commit import Progress, apply_row, progress_of
from stagecoach.schedule.draft_policy import Candidate, DraftPolicy
from stagecoach.schedule.integrity import check_in_flight, check_running, check_waiting
from stagecoach.schedule.plan_draft import PlanDraft, PlanInFlight
from stagecoach.schedule.request_memory import RequestMemory
from stagecoach.schedule.step_plan import RowResult, Segment, StepPlan, StepResult, plan_digest
from stagecoach.schedule.verify_window import can_use_proposal, most_drafts


class Scheduler:
    """Turns requests into step plans and results into progress.

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
        policy: DraftPolicy | None = None,
        num_draft_tokens: int = 0,
        first_step: int = 0,
        debug_poison: bool = False,
    ) -> None:
        """`num_pages` and `num_slots` count the reserved page 0 and slot 0, as in MemoryPlan.

        Args:
            policy: how long windows are and who gets drafts; None: nothing is drafted.
            num_draft_tokens: most drafts of a window.
            first_step: number of the first plan; the workers have executed those before.
        """
        assert (policy is None) == (num_draft_tokens == 0), f"{num_draft_tokens} for {policy}"
        self._num_stages = num_stages
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._policy = policy
        self._num_draft_tokens = num_draft_tokens
        self._debug_poison = debug_poison

        self._memory = RequestMemory(
            num_pages=num_pages,
            num_slots=num_slots,
            num_rows=max_num_seqs,
            block_size=block_size,
            debug_poison=debug_poison,
        )

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
        self._next_step = first_step

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
        return self._memory.pages.num_total

    @property
    def num_free_pages(self) -> int:
        return self._memory.pages.num_free

    @property
    def num_slots(self) -> int:
        """State slots that can be handed out: all but the zero slot."""
        return self._memory.slots.num_total

    @property
    def num_free_slots(self) -> int:
        return self._memory.slots.num_free

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
            num_pages=self.num_pages,
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
        return progress_of(request)

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
        plan = draft.finish(self._next_step, *self._memory.take_dirty())
        self._next_step += 1
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
            self._note_row(segment, row)
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
        self._memory.check_integrity(running)
        assert len(self._waiting) + len(self._running) == len(self._requests), f"lost: {self}"
        assert len(self._in_flight) <= self._num_stages, f"too many plans in flight: {self}"
        check_waiting(self._waiting)
        check_running(running, self._prefilling, self._ready)
        check_in_flight(running, self._in_flight)

    def check_idle(self) -> None:
        """Prove that nothing is left when all requests ended and all results are in."""
        assert not self.has_work, f"not idle: {self}"
        assert not self._waiting and not self._running, f"not idle: {self}"
        assert not self._prefilling and not self._ready, f"not idle: {self}"
        self._memory.check_integrity(())

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self._waiting)} waiting, {len(self._running)} running, "
            f"{len(self._prefilling)} prefilling, {len(self._ready)} ready, "
            f"{len(self._in_flight)} plans in flight, {self.num_free_pages} of "
            f"{self.num_pages} pages free, {self.num_free_slots} of {self.num_slots} slots free)"
        )

    def _plan_windows(self, draft: PlanDraft) -> None:
        cohort = self._pick_cohort(draft.budget)
        lengths = self._choose_lengths(cohort, draft.budget - len(cohort))
        for request, num_drafts in zip(cohort, lengths, strict=True):
            self._memory.cover(request, request.num_computed + 1 + num_drafts)
            draft.add_window(request, num_drafts, proposes=self._proposes(request))

    def _pick_cohort(self, budget: int) -> list[Request]:
        """Ready requests whose anchors go into the plan, each with a page for it."""
        num_decoding = len(self._running) - len(self._prefilling)
        room = min(cohort_size(num_decoding, self._num_stages), budget)
        cohort: list[Request] = []
        for request in list(self._ready.values()):
            if len(cohort) == room:
                break
            # An earlier one of this loop may have preempted it.
            if request.request_id not in self._ready:
                continue
            if self._memory.num_open_positions(request) <= 0 and not self._make_room(request, 1):
                continue
            self._memory.cover(request, request.num_computed + 1)
            del self._ready[request.request_id]
            cohort.append(request)
        return cohort

    def _choose_lengths(self, cohort: list[Request], budget: int) -> list[int]:
        """Drafts of each window of the cohort, with `budget` tokens left beside the anchors."""
        if self._policy is None or not cohort:
            return [0] * len(cohort)
        if not any(request.draft_token_ids for request in cohort):
            bare = [Candidate(request.request_id, (), 0) for request in cohort]
            return self._policy.choose_lengths(bare, 0)
        num_chunk_tokens = self._expected_chunk_tokens()
        rooms = [
            DraftRoom(
                num_wanted=most_drafts(
                    num_at_hand=len(request.draft_token_ids), num_left=request.num_left
                ),
                num_open_positions=self._memory.num_open_positions(request) - 1,
                num_promised_pages=self._promised_pages(request),
            )
            for request in cohort
        ]
        # One free page stays for the next anchor of each of the others, who would else preempt.
        num_spare_pages = max(0, self.num_free_pages - len(self._running) + 1)
        limits = draft_limits(
            rooms,
            budget=draft_budget(budget, num_chunk_tokens),
            num_spare_pages=num_spare_pages,
            block_size=self._block_size,
        )
        candidates = [
            Candidate(request.request_id, request.confidences, limit)
            for request, limit in zip(cohort, limits, strict=True)
        ]
        lengths = self._policy.choose_lengths(candidates, min(budget, num_chunk_tokens))
        are_allowed = [0 <= a <= b for a, b in zip(lengths, limits, strict=True)]
        assert all(are_allowed), f"windows of {lengths} drafts, at most {limits} are allowed"
        return lengths

    def _expected_chunk_tokens(self) -> int:
        """Prompt tokens that could join the plan, as far as its budget allows."""
        num_tokens = sum(
            request.num_tokens - request.num_computed for request in self._prefilling.values()
        )
        if self._waiting and self._may_start(self._waiting[0]):
            num_tokens += self._waiting[0].num_tokens
        return num_tokens

    def _proposes(self, request: Request) -> bool:
        """Whether to draft behind what this request is about to sample."""
        return (
            self._policy is not None
            and can_use_proposal(request.num_left)
            and self._policy.should_propose(request.request_id)
        )

    def _note_row(self, segment: Segment, row: RowResult) -> None:
        """Tell the policy what became of the drafts, and of those that are new."""
        if self._policy is None or segment.sampling_row is None:
            return
        assert len(row.draft_token_ids) <= self._num_draft_tokens, f"too many drafts: {row}"
        if segment.num_draft_tokens:
            num_accepted = len(row.token_ids) - 1
            self._policy.note_window(segment.request_id, segment.num_draft_tokens, num_accepted)
        else:
            self._policy.note_plain(segment.request_id)
        if row.draft_token_ids:
            self._policy.note_proposal(segment.request_id, len(row.draft_token_ids))

    def _plan_chunks(self, draft: PlanDraft) -> None:
        for request in list(self._prefilling.values()):
            if draft.budget:
                self._plan_chunk(request, draft)

    def _plan_chunk(self, request: Request, draft: PlanDraft) -> None:
        """Plan as much of the next chunk as the budget and the pages allow."""
        start = request.num_computed
        remaining = request.num_tokens - start
        num_open = self._memory.num_open_positions(request)
        if num_open <= 0 and not self._make_room(request, 1):
            return
        length = chunk_length(
            num_remaining=remaining,
            budget=draft.budget,
            num_free_positions=num_open + self.num_free_pages * self._block_size,
        )
        self._memory.cover(request, start + length)
        is_final = length == remaining
        draft.add_chunk(request, length, proposes=is_final and self._proposes(request))
        if is_final:
            del self._prefilling[request.request_id]

    def _admit(self, draft: PlanDraft) -> None:
        while self._waiting and draft.budget and self._may_start(self._waiting[0]):
            request = self._waiting.popleft()
            self._memory.admit(request)
            self._running[request.request_id] = request
            self._prefilling[request.request_id] = request
            self._plan_chunk(request, draft)

    def _may_start(self, request: Request) -> bool:
        return may_start(
            num_running=len(self._running),
            max_num_seqs=self._max_num_seqs,
            num_free_slots=self.num_free_slots,
            num_free_pages=self.num_free_pages,
            num_needed_pages=self._pages_to_start(request),
        )

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
        available = self.num_free_pages - self._promised_pages(request)
        if available >= num_pages:
            return True
        victims = []
        for other in sorted(self._running.values(), key=lambda other: -other.arrival_index):
            if other.arrival_index <= request.arrival_index or available >= num_pages:
                break
            # A result in flight would be lost. The plan being made has taken its windows out of
            # `_ready`.
            is_idle = other.request_id in self._ready or other.request_id in self._prefilling
            if is_idle and not other.num_plans_in_flight and other.page_ids:
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
        if self._policy is not None:
            self._policy.forget(request.request_id)

    def _release(self, request: Request) -> None:
        """Free all that a request holds; from here on its results in flight are of an old epoch."""
        for queue in (self._running, self._prefilling, self._ready):
            queue.pop(request.request_id, None)
        self._memory.release(request)
        request.epoch += 1
        request.num_computed = request.num_replay = 0
        request.draft_token_ids = request.confidences = ()
        request.num_plans_in_flight = 0
        request.is_sample_in_flight = False
