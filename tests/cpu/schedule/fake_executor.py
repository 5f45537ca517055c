"""A pipeline of stages that execute step plans on simulated memory, and a scheduler over it.

The next token is a function of the prefix alone, so that every schedule of a request must give
the same output as `one_shot`. `fake_stage.py` says what is proved of memory on the way.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import msgspec

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.cache.prefix_cache import PrefixCache
from stagecoach.request import Request, SamplingParams, TokenLogprobs
from stagecoach.schedule.commit import Progress
from stagecoach.schedule.draft_policy import DraftPolicy
from stagecoach.schedule.replay import Unfinished
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.shadow import Shadows
from stagecoach.schedule.step_plan import (
    RowResult,
    SamplingEntry,
    Segment,
    StepPlan,
    StepResult,
)
from stagecoach.schedule.verify_window import VerifyWindow
from tests.cpu.schedule.fake_drafter import FakeDrafter, FakePolicy
from tests.cpu.schedule.fake_stage import BAD, NAN, VOCAB_SIZE, Stage, extend, prefix_hashes
from tests.cpu.schedule.promises import check_head, check_nothing_is_kept

EOS = 0
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def next_token(prefix: int, seed: int, masked: Sequence[int]) -> int:
    """The token after a prefix; the first in a fixed order that is not masked."""
    first = extend(prefix, seed) // 7
    allowed = (
        token for step in range(VOCAB_SIZE) if (token := (first + step) % VOCAB_SIZE) not in masked
    )
    return next(allowed)


def token_logprob(prefix: int, token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -float(extend(prefix, token_id) % 997), 1)


class Outcome(NamedTuple):
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    finish_reason: str


def one_shot(prompt: Sequence[int], params: SamplingParams, seed: int, max_tokens: int) -> Outcome:
    """What a request must give, computed without a scheduler."""
    hashes = prefix_hashes(prompt)
    prompt_logprobs = []
    if params.prompt_logprobs is not None:
        prompt_logprobs = [
            token_logprob(prefix, token)
            for prefix, token in zip(hashes, prompt[1:], strict=False)
            if prefix != NAN
        ]
    if BAD in prompt:
        return Outcome([], [], prompt_logprobs, "error")
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    outputs, logprobs, prefix, reason = [], [], hashes[-1], "length"
    for index in range(max_tokens):
        token = next_token(prefix, seed, stops if index < params.min_tokens else ())
        outputs.append(token)
        logprobs.append(token_logprob(prefix, token))
        prefix = extend(prefix, token)
        if token in stops:
            reason = "stop"
            break
    return Outcome(
        outputs, logprobs if params.logprobs is not None else [], prompt_logprobs, reason
    )


class FakeExecutor:
    """A pipeline of stages; each runs its plans in order, whenever it is told to."""

    def __init__(
        self,
        num_stages: int,
        memory: MemoryPlan,
        block_size: int,
        drafter: FakeDrafter | None = None,
    ) -> None:
        self.drafter = drafter
        self.stages = [Stage(memory, block_size) for _ in range(num_stages)]
        self.inboxes: list[deque[bytes]] = [deque() for _ in range(num_stages)]
        self.num_run = [0] * num_stages
        self.table: dict[int, SamplingEntry] = {}
        self.results: deque[StepResult] = deque()
        # Tokens of each admission as the plans named them, and as they were at each plan: the
        # history that memory must hold.
        self.histories: dict[tuple[int, int], list[int | None]] = {}
        self.at_step: dict[int, list[tuple[int | None, ...]]] = {}
        self.newest: dict[int, int] = {}  # by sampling row
        self.break_rows: Callable[[Segment], bool] = lambda segment: False

    def launch(self, plan: StepPlan, skipped: Callable[[Segment], Sequence[int]]) -> None:
        """Send a plan to the stages.

        Args:
            skipped: tokens before the first segment of an admission: those of its hit.
        """
        self.at_step[plan.step] = []
        for segment in plan.segments:
            key = (segment.request_id, segment.epoch)
            history = self.histories.setdefault(key, list(skipped(segment)))
            assert len(history) >= segment.start, plan.marked(segment)
            # Rejected drafts are overwritten; what a chained window computes is seen when it runs.
            history[segment.start :] = segment.token_ids or (None,)
            self.at_step[plan.step].append(tuple(history))
        for inbox in self.inboxes:
            inbox.append(plan.encode())

    def can_advance(self, stage: int) -> bool:
        is_behind = stage == 0 or self.num_run[stage] < self.num_run[stage - 1]
        return is_behind and bool(self.inboxes[stage])

    def advance(self, stage: int) -> None:
        """Let a stage run its next plan; the last one answers."""
        plan = StepPlan.decode(self.inboxes[stage].popleft())
        hashes = self.stages[stage].run(plan, self._histories(plan))
        self.num_run[stage] += 1
        if stage < len(self.stages) - 1:
            return
        self.table.update((entry.row, entry) for entry in plan.admissions)
        rows = tuple(map(self._row, plan.segments, hashes))
        # A stage asserts itself that the states are equal.
        differences = (0.0,) * len(plan.comparisons)
        self.results.append(
            StepResult(step=plan.step, digest=plan.digest(), rows=rows, differences=differences)
        )

    def _histories(self, plan: StepPlan) -> list[list[int]]:
        """Of each segment, all tokens up to its end."""
        filled = []
        for segment, history in zip(plan.segments, self.at_step[plan.step], strict=True):
            known = self.histories[segment.request_id, segment.epoch]
            if segment.is_chained:
                assert segment.sampling_row is not None and len(self.stages) == 1
                known[segment.start] = self.newest[segment.sampling_row]
            tokens = [known[i] if token is None else token for i, token in enumerate(history)]
            filled.append([token for token in tokens if token is not None])
            assert len(filled[-1]) == segment.end, f"chained to nothing:\n{plan.marked(segment)}"
        return filled

    def drain(self) -> None:
        """Run everything that was launched."""
        for stage in range(len(self.stages)):
            while self.can_advance(stage):
                self.advance(stage)

    def _row(self, segment: Segment, hashes: list[int]) -> RowResult:
        if hashes[-1] == NAN or self.break_rows(segment):
            if segment.sampling_row is not None:
                self.newest[segment.sampling_row] = BAD
            return RowResult(
                request_id=segment.request_id,
                epoch=segment.epoch,
                token_ids=(),
                is_finite=False,
            )
        prompt_logprobs = tuple(
            token_logprob(prefix, target)
            for prefix, target in zip(hashes, segment.prompt_logprob_targets, strict=False)
        )
        row = RowResult(
            request_id=segment.request_id,
            epoch=segment.epoch,
            token_ids=(),
            prompt_logprobs=prompt_logprobs,
        )
        return row if segment.sampling_row is None else self._sampled(segment, hashes, row)

    def _sampled(self, segment: Segment, hashes: list[int], row: RowResult) -> RowResult:
        assert segment.sampling_row is not None
        entry = self.table[segment.sampling_row]
        assert entry.request_id == segment.request_id, f"row of another request: {segment}"
        first = segment.end - segment.num_draft_tokens - entry.num_prompt_tokens
        prefixes = hashes[-1 - segment.num_draft_tokens :]
        sampled = [
            _sample(entry, prefix, num_outputs)
            for num_outputs, prefix in enumerate(prefixes, start=first)
        ]
        token_ids = VerifyWindow.of(segment).row(sampled)
        self.newest[segment.sampling_row] = token_ids[-1]
        if entry.params.logprobs is not None:
            logprobs = tuple(map(token_logprob, prefixes, token_ids))
            row = msgspec.structs.replace(row, logprobs=logprobs)
        row = msgspec.structs.replace(row, token_ids=token_ids)
        if segment.reports_logits:
            row = msgspec.structs.replace(row, logit_ids=(0,), logits=(float(prefixes[0] % 997),))
        if not segment.proposes:
            return row
        assert self.drafter is not None, f"proposes without a drafter: {segment}"
        right_ids: list[int] = []
        prefix, num_outputs = prefixes[len(token_ids) - 1], first + len(token_ids)
        prefix = extend(prefix, token_ids[-1])
        for _ in range(self.drafter.num_draft_tokens):
            right_ids.append(_sample(entry, prefix, num_outputs + len(right_ids)))
            prefix = extend(prefix, right_ids[-1])
        drafts = self.drafter.propose(right_ids, VOCAB_SIZE)
        return msgspec.structs.replace(
            row, draft_token_ids=drafts.token_ids, confidences=drafts.confidences
        )


def _sample(entry: SamplingEntry, prefix: int, num_outputs: int) -> int:
    """The token behind a prefix that holds `num_outputs` outputs."""
    is_masked = num_outputs < entry.params.min_tokens
    return next_token(prefix, entry.seed, entry.stop_token_ids if is_masked else ())


class Limits(NamedTuple):
    """The sizes of one small engine."""

    num_stages: int = 1
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    block_size: int = 4
    max_model_len: int = 64
    num_pages: int = 65
    num_live_slots: int | None = None  # None: one a sequence
    num_checkpoint_slots: int = 0
    num_draft_tokens: int = 0
    has_prefix_cache: bool = False
    state_checkpoint_interval: int = 8
    num_host_pages: int = 0
    num_host_slots: int = 0
    verify_rate: float = 0.0
    is_chaining: bool = False

    @property
    def memory(self) -> MemoryPlan:
        return MemoryPlan(
            num_pages=self.num_pages,
            num_slots=1 + (self.num_live_slots or self.max_num_seqs) + self.num_checkpoint_slots,
            num_host_pages=self.num_host_pages,
            num_host_slots=self.num_host_slots,
        )


def make_scheduler(
    limits: Limits,
    *,
    policy: FakePolicy | None = None,
    first_step: int = 0,
    debug_poison: bool = False,
) -> Scheduler:
    """A scheduler of these sizes over its own cache."""
    cache = PrefixCache(
        **msgspec.structs.asdict(limits.memory),
        block_size=limits.block_size,
        is_enabled=limits.has_prefix_cache,
        debug_poison=debug_poison,
    )
    shadows = Shadows(cache, rate=limits.verify_rate, tolerance=0.0, num_workers=1)
    return Scheduler(
        num_stages=limits.num_stages,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        cache=cache,
        cache_root=b"root",
        state_checkpoint_interval=limits.state_checkpoint_interval,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB_SIZE + 1,
        policy=cast(DraftPolicy | None, policy),
        num_draft_tokens=limits.num_draft_tokens,
        first_step=first_step,
        shadows=shadows,
        is_chaining=limits.is_chaining,
        debug_poison=debug_poison,
    )


class Harness:
    """A scheduler over a fake executor, with the promises that hold at every moment checked."""

    def __init__(
        self,
        limits: Limits,
        *,
        debug_poison: bool = True,
        policy: FakePolicy | None = None,
        drafter: FakeDrafter | None = None,
    ) -> None:
        """With drafts, the longest windows of mixed drafts unless told otherwise."""
        if limits.num_draft_tokens:
            policy = policy or FakePolicy()
            drafter = drafter or FakeDrafter(limits.num_draft_tokens)
        self.limits = limits
        self._is_debugging = debug_poison
        self.scheduler = make_scheduler(limits, policy=policy, debug_poison=debug_poison)
        self.executor = FakeExecutor(limits.num_stages, limits.memory, limits.block_size, drafter)
        self.policy = policy
        self.requests: dict[int, Request] = {}
        self.shadows: dict[int, Request] = {}
        self.progress: dict[int, list[Progress]] = {}
        self.plans: list[StepPlan] = []
        self._committed = 0
        self._ends: dict[tuple[int, int], int] = {}
        self._samples_in_flight: Counter[tuple[int, int]] = Counter()

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int = 0,
        *,
        cache_salt: str | None = None,
        checkpoint_position: int | None = None,
    ) -> Request:
        request = Request(
            request_id=100 + len(self.requests),
            prompt_token_ids=tuple(prompt),
            params=params,
            seed=seed,
            max_tokens=params.max_tokens or self.limits.max_model_len,
            cache_salt=cache_salt,
            checkpoint_position=checkpoint_position,
        )
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.progress[request.request_id] = []
        return request

    def abort(self, request: Request) -> None:
        item = self.scheduler.abort(request.request_id)
        if item is not None:
            self.progress[request.request_id].append(item)
        self.scheduler.check_integrity()

    def lose_workers(self) -> Unfinished:
        """The workers' memory and all that was in flight are gone; others start with empty ones."""
        left = self.scheduler.leave()
        lost = self.executor
        self.scheduler = make_scheduler(
            self.limits,
            policy=self.policy,
            first_step=left.next_step,
            debug_poison=self._is_debugging,
        )
        self.executor = FakeExecutor(
            self.limits.num_stages, self.limits.memory, self.limits.block_size, lost.drafter
        )
        self.executor.break_rows = lost.break_rows
        self._committed = len(self.plans)
        for request in left.requests:
            self.scheduler.add(request)
        self.scheduler.check_integrity()
        return left

    def launch(self) -> StepPlan | None:
        was_idle = {
            request_id: (request.num_preemptions, not request.num_plans_in_flight)
            for request_id, request in self.requests.items()
        }
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        check_head(self.scheduler, self.limits.block_size)
        for request_id, (num_preemptions, is_idle) in was_idle.items():
            if self.requests[request_id].num_preemptions > num_preemptions:
                assert is_idle, f"preempted with a plan in flight: {self.requests[request_id]}"
        if plan is not None:
            for request in self.scheduler.plan_in_flight(plan.step).requests:
                if request.is_shadow:
                    self.shadows[request.request_id] = request
            self._check_plan(plan)
            self.plans.append(plan)
            self.executor.launch(plan, self._skipped)
        return plan

    def commit(self) -> list[Progress]:
        """Wait for the oldest result and apply it."""
        while not self.executor.results:
            self.executor.drain()
        plan = self.plans[self._committed]
        result = self.executor.results.popleft()
        items = self.scheduler.commit(result)
        self._committed += 1
        for segment, row in zip(plan.segments, result.rows, strict=True):
            if segment.sampling_row is not None and row.is_finite:
                key = (segment.request_id, segment.epoch)
                self._samples_in_flight[key] -= 1
                if segment.num_draft_tokens:
                    self._ends[key] = segment.certain_end + len(row.token_ids) - 1
        for item in items:
            assert not self.is_ended(item.request_id), f"progress after the end: {item}"
            self.progress[item.request_id].append(item)
        self.scheduler.check_integrity()
        return items

    def _skipped(self, segment: Segment) -> tuple[int, ...]:
        return self._request(segment.request_id).token_ids(0, segment.start)

    def _request(self, request_id: int) -> Request:
        return self.requests.get(request_id) or self.shadows[request_id]

    def is_ended(self, request_id: int) -> bool:
        return any(item.finish_reason for item in self.progress[request_id])

    def finish(self) -> None:
        """Run until nothing is left; every pass launches or commits."""
        num_passes = 0
        limit = 2_000 * (1 + len(self.requests))
        while self.scheduler.has_work:
            if self.launch() is None:
                assert self.scheduler.num_in_flight, "a pass without progress"
                self.commit()
            num_passes += 1
            assert num_passes < limit, f"livelock: {self.scheduler}"
        self.scheduler.check_idle()
        check_nothing_is_kept(self.scheduler)

    def check_outcomes(self) -> None:
        """Every request that was not aborted gave what it gives alone; an aborted one a prefix."""
        for request_id, request in self.requests.items():
            expected = one_shot(
                request.prompt_token_ids, request.params, request.seed, request.max_tokens
            )
            items = self.progress[request_id]
            token_ids = [token for item in items for token in item.token_ids]
            logprobs = [entry for item in items for entry in item.logprobs]
            prompt_logprobs = [entry for item in items for entry in item.prompt_logprobs]
            reason = items[-1].finish_reason
            assert reason is not None and sum(bool(item.finish_reason) for item in items) == 1
            assert token_ids == request.output_token_ids
            assert logprobs == expected.logprobs[: len(logprobs)]
            assert reason.value in ("abort", "error") or BAD not in request.prompt_token_ids
            if reason.value in ("abort", "error"):
                assert token_ids == expected.token_ids[: len(token_ids)]
                assert prompt_logprobs == expected.prompt_logprobs[: len(prompt_logprobs)]
            else:
                actual = Outcome(token_ids, logprobs, prompt_logprobs, reason.value)
                assert actual == expected, f"request {request_id}"
            self._check_counts(request, items[-1])
            self._check_tenant(request)
        if self.policy is not None:
            assert sorted(self.policy.forgotten) == sorted([*self.requests, *self.shadows])

    def _check_tenant(self, request: Request) -> None:
        """What a request has not computed, another one with its salt has."""
        num_cached = request.num_cached_tokens
        prefix = request.token_ids(0, num_cached)
        assert not num_cached or any(
            other is not request
            and other.cache_salt == request.cache_salt
            and other.token_ids(0, min(num_cached, other.num_tokens)) == prefix
            for other in self.requests.values()
        ), f"request {request.request_id} reads what another tenant computed"

    def _check_counts(self, request: Request, last: Progress) -> None:
        """I36: as the policy was told, which counts only rows that verified drafts."""
        windows = self.policy.windows if self.policy is not None else []
        own = [window for window in windows if window[0] == request.request_id]
        assert all(num_drafts >= 1 for _, num_drafts, _ in own)
        assert (last.num_windows, last.num_draft_tokens, last.num_accepted_tokens) == (
            len(own),
            sum(num_drafts for _, num_drafts, _ in own),
            sum(num_accepted for _, _, num_accepted in own),
        )

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.limits
        assert self.scheduler.num_in_flight <= limits.num_stages + limits.is_chaining
        assert plan.num_tokens <= limits.max_num_batched_tokens, f"over the budget:\n{plan}"
        assert len(plan.segments) <= limits.max_num_seqs, f"too many requests:\n{plan}"
        for entry in plan.admissions:
            request = self._request(entry.request_id)
            counted = request.token_ids(0, request.num_tokens)
            assert entry.token_ids == (counted if request.params.has_penalties else ())
        for segment in plan.segments:
            key = (segment.request_id, segment.epoch)
            request = self._request(segment.request_id)
            assert segment.epoch == request.epoch, f"preempted in its own plan:\n{plan}"
            assert self._samples_in_flight[key] == segment.is_chained, (
                f"planned with a sample in flight:\n{plan.marked(segment)}"
            )
            if key not in self._ends:
                assert segment.start < request.num_tokens
                if not request.num_preemptions:
                    assert segment.start == request.num_cached_tokens < request.num_prompt_tokens
            assert segment.start == self._ends.get(key, segment.start), (
                f"spans are not adjacent:\n{plan.marked(segment)}"
            )
            self._ends[key] = segment.end
            certain_end = segment.end - segment.num_draft_tokens
            certain = segment.token_ids[: segment.num_tokens - segment.num_draft_tokens]
            assert certain == request.token_ids(segment.start, certain_end)
            num_tokens = request.num_tokens + segment.is_chained
            # A window may have left pages that its drafts filled in vain.
            fewest = -(-segment.end // limits.block_size)
            most = -(-(certain_end + limits.num_draft_tokens) // limits.block_size)
            if request.is_shadow:  # it takes all its pages at the start
                most = -(-request.num_tokens // limits.block_size)
            assert fewest <= len(segment.page_ids) <= most, f"bad pages:\n{plan.marked(segment)}"
            is_final = certain_end == num_tokens
            assert (segment.sampling_row is not None) == is_final, plan.marked(segment)
            if is_final:
                self._samples_in_flight[key] += 1
                self._check_window(plan, segment, request)

    def _check_window(self, plan: StepPlan, segment: Segment, request: Request) -> None:
        num_left = request.max_tokens - len(request.output_token_ids) - segment.is_chained
        assert num_left >= 1, f"a token too many:\n{plan.marked(segment)}"
        assert segment.num_draft_tokens <= self.limits.num_draft_tokens, plan.marked(segment)
        assert segment.num_draft_tokens < num_left, f"a row too long:\n{plan.marked(segment)}"
        assert num_left >= 3 or not segment.proposes, f"drafts for nobody:\n{plan}"


def prompt(length: int, first: int = 1) -> list[int]:
    return [1 + (first + index) % (VOCAB_SIZE - 1) for index in range(length)]


def spans(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return [(segment.request_id, segment.start, segment.end) for segment in plan.segments]


def decode_until_ready(harness: Harness, requests: list[Request]) -> None:
    """Run until each request has an output and nothing is in flight."""
    while not all(request.output_token_ids for request in requests):
        if harness.launch() is None:
            harness.commit()
    while harness.scheduler.num_in_flight:
        harness.commit()
