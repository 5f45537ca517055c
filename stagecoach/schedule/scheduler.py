"""Which requests compute which tokens in which step.

Owns the queues, the order, preemption, and with its helpers all that is written to a Request.
Two verbs join deciding and doing: `plan()` makes the next step plan, `commit(result)` applies
the oldest plan's result. Knows no tensor, no clock and no process.

    waiting --admit--> prefilling --last chunk--> sampling --commit--> ready --window--> sampling
       ^                    |                  (in flight)               |
       +---- preempt -------+--------------------------------------------+   commit, abort: gone
"""

from collections import deque

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.cache.prefix_cache import PrefixCache
from stagecoach.errors import StalledError
from stagecoach.request import FinishReason, Request
from stagecoach.schedule.admission import check_request
from stagecoach.schedule.chaining import Chaining
from stagecoach.schedule.commit import Progress, apply_row, progress_of
from stagecoach.schedule.draft_policy import DraftPolicy
from stagecoach.schedule.drafting import Drafting
from stagecoach.schedule.integrity import check_in_flight, check_queues, check_result
from stagecoach.schedule.plan_draft import PlanDraft, PlanInFlight
from stagecoach.schedule.plan_filling import PlanFilling
from stagecoach.schedule.prefill_shares import PrefillShares
from stagecoach.schedule.progress_watch import ProgressWatch, blocked_requests, stall_report
from stagecoach.schedule.queues import Queues
from stagecoach.schedule.replay import Unfinished, forget_progress, leave
from stagecoach.schedule.request_memory import RequestMemory, owner_of
from stagecoach.schedule.seniority import Seniority
from stagecoach.schedule.shadow import Shadows
from stagecoach.schedule.step_plan import StepPlan, StepResult


class Scheduler:
    """Turns requests into step plans and results into progress.

    Seniority is the order of `add`.
    """

    def __init__(  # noqa: PLR0913 -- the limits of an engine, each by name
        self,
        *,
        num_stages: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        max_model_len: int,
        cache: PrefixCache,
        cache_root: bytes,
        state_checkpoint_interval: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        policy: DraftPolicy | None = None,
        num_draft_tokens: int = 0,
        first_step: int = 0,
        shadows: Shadows | None = None,
        prefill: PrefillShares | None = None,
        is_chaining: bool = False,
        debug_poison: bool = False,
    ) -> None:
        """Nobody else may use the cache, which owns all pages and slots.

        Args:
            cache_root: what prefixes are hashed onto (`cache/prefix_hash.py:model_root`).
            state_checkpoint_interval: as in EngineConfig; 0: no grid.
            policy: how long windows are and who gets drafts; None: nothing is drafted.
            num_draft_tokens: most drafts of a window.
            first_step: number of the first plan; the workers have executed those before.
            shadows: over the same cache; None: no hit is verified.
            prefill: how prompts are divided; None: a plan takes all that its budget allows.
            is_chaining: a plan is made ahead (`chaining.py`); one stage only, and no policy.
        """
        assert not is_chaining or (num_stages == 1 and policy is None), "chained to several"
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._debug_poison = debug_poison
        self._drafting = Drafting(policy, num_draft_tokens, block_size)
        self._cache = cache
        self._memory = RequestMemory(
            cache,
            root=cache_root,
            num_rows=max_num_seqs,
            block_size=block_size,
            checkpoint_interval=state_checkpoint_interval,
        )

        self.shadows = shadows or Shadows(cache, rate=0.0, tolerance=0.0, num_workers=1)
        self._prefill = prefill or PrefillShares(num_stages=1, budget=max_num_batched_tokens)
        self._most_in_flight = most_in_flight = num_stages + is_chaining
        self._watch = ProgressWatch(max_model_len=max_model_len, most_in_flight=most_in_flight)
        self._requests: dict[int, Request] = {}  # with the shadows that run
        self._queues = Queues()
        self._seniority = Seniority(self._queues, self._memory, cache, block_size=block_size)
        self._chaining = Chaining(num_stages, self._queues, self._memory, self._seniority)
        self._filling = PlanFilling(
            requests=self._requests,
            queues=self._queues,
            memory=self._memory,
            cache=cache,
            seniority=self._seniority,
            drafting=self._drafting,
            shadows=self.shadows,
            num_stages=num_stages,
            block_size=block_size,
            preempt=self._preempt,
        )
        self._in_flight: deque[PlanInFlight] = deque()
        self._num_added = 0
        self._num_preemptions = 0
        self._next_step = first_step

    @property
    def has_work(self) -> bool:
        """A request is alive, or a result is still to come."""
        return bool(self._requests or self._in_flight or self.shadows.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        """Of clients; shadows hold seats beside them."""
        return sum(not request.is_shadow for request in self._queues.running.values())

    @property
    def request_ids(self) -> list[int]:
        """Of all requests that are alive, and of shadows that run."""
        return list(self._requests)

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out: all but the null page."""
        return self._cache.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds; what is cached in them goes when they are needed."""
        return self._cache.num_free_pages

    @property
    def num_slots(self) -> int:
        """State slots that can be handed out: all but the zero slot."""
        return self._cache.num_slots

    @property
    def num_free_slots(self) -> int:
        """State slots that no request holds, those of checkpoints among them."""
        return self._cache.num_free_slots

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """What the cache has done and holds, without bytes, which only the loop knows."""
        return self.shadows.add_counts(self._cache.stats())

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._num_preemptions

    @property
    def num_in_flight(self) -> int:
        """Plans launched and not committed."""
        return len(self._in_flight)

    @property
    def next_step(self) -> int:
        """Number of the next plan."""
        return self._next_step

    @property
    def can_launch(self) -> bool:
        """One plan a stage may be in flight, and one more that is chained to it."""
        return len(self._in_flight) < self._most_in_flight

    def plan_in_flight(self, step: int) -> PlanInFlight:
        """The launched plan of that number, with its encoded form."""
        return self._in_flight[step - self._in_flight[0].plan.step]

    def check(self, request: Request) -> int:
        """Its `max_tokens`, capped to what fits; nothing changes.

        Raises:
            RequestError: it could never be served; names the field.
        """
        return check_request(
            request,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            block_size=self._block_size,
            num_pages=self.num_pages,
        )

    def add(self, request: Request) -> None:
        """Queue a fresh request behind all others, with `max_tokens` capped to what fits.

        Raises:
            RequestError: it could never be served; names the field. Nothing has changed then.
        """
        assert request.request_id not in self._requests, f"id in use: {request.request_id}"
        request.max_tokens = self.check(request)
        request.is_filed = self._cache.is_enabled and not request.is_shadow
        self._memory.begin(request)
        request.arrival_index = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._queues.waiting.append(request)

    def abort(self, request_id: int) -> Progress | None:
        """End a request at once, whatever it is doing; None if it is not (or no longer) here.

        Results that are still to come for it are dropped.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finish_reason = FinishReason.ABORT
        self._forget(request)
        return progress_of(request)

    def leave(self) -> Unfinished:
        """The workers' memory is lost: what is to be computed, for a scheduler that `add`s it."""
        return leave(self._requests.values(), self._in_flight, self._next_step)

    def limit_seats(self, num_seats: int) -> None:
        """Let at most so many requests run at once; those that do, go on."""
        self._max_num_seqs = num_seats

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests go on and file nothing any more."""
        self._cache.reset()
        for request in self._queues.running.values():
            request.is_filed = False

    def plan(self, now: float | None = None) -> StepPlan | None:
        """The next step plan, launched: windows, then chunks of running requests, then new ones.

        None if the pipeline is full or nothing can be computed before a result is in.

        Args:
            now: what the requests that begin with this plan note as their `first_planned`.
        """
        if not self.can_launch:
            return None
        chained = self._chaining.find(self._in_flight)
        if chained is None:
            return None
        self._cache.begin_plan(self._next_step)
        draft = PlanDraft(
            self._max_num_batched_tokens,
            self._eos_token_ids,
            self._prefill.begin_plan(
                self._queues.prompt_spans(self._max_num_seqs),
                (launched.prefill_cost for launched in self._in_flight),
            ),
            has_digests=self._debug_poison,
        )
        self._filling.fill(draft, self._next_step, chained, num_seats=self._max_num_seqs, now=now)
        if draft.is_empty:
            # Seniority makes this impossible; a silent stall would be the worst of faults.
            if self._requests and not self._in_flight:
                raise self._stalled("nothing can be planned and no result is to come")
            return None
        plan = draft.finish(self._next_step, self._cache.take_moves())
        self._memory.check_slots(plan, draft.requests)
        self._watch.note_plan()
        if self._watch.is_over:
            raise self._stalled(f"{self._watch.num_plans} plans brought no token")
        self._next_step += 1
        launched = PlanInFlight(plan, plan.encode(), draft.requests, draft.share.taken)
        self._in_flight.append(launched)
        if self._debug_poison:
            self.check_integrity()
        return plan

    def commit(self, result: StepResult) -> list[Progress]:
        """Apply the result of the oldest plan in flight.

        Rows of requests that were aborted, finished or preempted since then carry an older
        epoch and are dropped. What an admission left in the cache goes, whatever its epoch, when
        a row of it is not finite. If it began behind a prefix that others computed, that may be
        why: then the request starts over once, without the cache, before it ends with an error.

        Raises:
            PlanDivergenceError: the worker ran another plan than the head made.
        """
        assert self._in_flight, f"a result without a plan: step {result.step}"
        check_result(self._in_flight[0], result)
        launched = self._in_flight.popleft()
        plan, requests = launched.plan, launched.requests
        progress = []
        for request, segment, row in zip(requests, plan.segments, result.rows, strict=True):
            if not row.is_finite:
                self._cache.withdraw(owner_of(segment.request_id, segment.epoch))
            if request.epoch != segment.epoch:
                continue
            if not row.is_finite and self._memory.has_read(request):
                self._preempt(request, is_spoilt=True)
                self._watch.note_progress()
                continue
            self.shadows.note_row(request, row)
            item = apply_row(request, segment, row, self._eos_token_ids)
            if row.token_ids:
                self._watch.note_progress()
                self._memory.note_finite(request)
            if not request.is_shadow:
                self._drafting.note_row(segment, row)
            if request.finish_reason is not None:
                self._forget(request)
            elif segment.sampling_row is not None and not request.num_plans_in_flight:
                self._queues.ready[request.request_id] = request
            if item is not None and not request.is_shadow:
                progress.append(item)
        self.shadows.note_differences(plan.step, result.differences)
        self._cache.note_committed(plan.step)
        return progress

    def oldest_requests(self, count: int) -> list[tuple[Request, str]]:
        """Up to `count` of clients with their states: those that run, then those that wait."""
        return self._queues.oldest(count)

    def slot_states(self) -> bytes:
        """One byte a state slot, from slot 1 on: 0 vacant, 1 a request's, 2 a checkpoint's."""
        return self._memory.slot_states(self._queues.running.values())

    def check_integrity(self) -> None:
        """Prove that every page, slot and row is free or owned once, and every queue in order."""
        self._memory.check_integrity(self._queues.running.values())
        check_queues(self._queues, self._requests)
        assert len(self._in_flight) <= self._most_in_flight, f"too many plans in flight: {self}"
        check_in_flight(self._queues.running.values(), self._in_flight)

    def check_idle(self) -> None:
        """Prove that nothing is left when all requests ended and all results are in."""
        assert not self.has_work, f"not idle: {self}"
        check_queues(self._queues, {})
        self._memory.check_integrity(())

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self._queues.waiting)} waiting, {len(self._queues.running)} running, "
            f"{len(self._queues.prefilling)} prefilling, {len(self._queues.ready)} ready, "
            f"{len(self._in_flight)} plans in flight, {self.num_free_pages} of "
            f"{self.num_pages} pages free, {self.num_free_slots} of {self.num_slots} slots free)"
        )

    def _preempt(self, request: Request, *, is_spoilt: bool = False) -> None:
        """Back to the front of the queue, with its committed tokens and nothing else."""
        if request.is_shadow:
            self._forget(request)
            return
        self._release(request, is_spoilt=is_spoilt)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._queues.wait_again(request)

    def _forget(self, request: Request) -> None:
        self._release(request, is_spoilt=request.finish_reason is FinishReason.ERROR)
        self._watch.note_progress()
        del self._requests[request.request_id]
        self._memory.forget(request)
        self._drafting.forget(request.request_id)

    def _release(self, request: Request, *, is_spoilt: bool) -> None:
        """Free all that a request holds; from here on its results in flight are of an old epoch."""
        orphan = self.shadows.note_release(request)
        if orphan is not None:
            self._forget(orphan)
        self._queues.stop(request)
        if is_spoilt:
            self._memory.discard(request)
        else:
            self._memory.release(request)
        forget_progress(request)

    def _stalled(self, cause: str) -> StalledError:
        """The error that says who waits for what."""
        blocked = blocked_requests(self._queues, self._seniority, self._memory)
        return StalledError(stall_report(f"{cause}: {self}", blocked))
