"""Stages that execute step plans on simulated memory, without a tensor.

A KDA state is a fold over all tokens and a cache row is a function of the tokens before it, so
one number, the hash of a token prefix, stands for both: a slot holds the hash of the prefix that
it is the state of and, as its record, the drafts behind it; a page row the hash of the prefix
that ends with its token. A stage folds what the segment replays and asserts that it then stands
exactly before the segment, that every page row it reads holds the prefix that the segment claims,
and freshly poisoned memory holds nothing. The next token is a function of the prefix alone, so
that every schedule of a request must give the same output as `one_shot`.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec

from stagecoach.request import Request, SamplingParams, TokenLogprobs
from stagecoach.schedule.commit import Progress
from stagecoach.schedule.draft_policy import DraftPolicy
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.step_plan import (
    NULL_PAGE,
    ZERO_SLOT,
    RowResult,
    SamplingEntry,
    Segment,
    StepPlan,
    StepResult,
)
from stagecoach.schedule.verify_window import VerifyWindow
from tests.cpu.schedule.fake_drafter import FakeDrafter, FakePolicy

VOCAB_SIZE = 13
EOS = 0
EMPTY_PREFIX = 1
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def extend(prefix: int, token_id: int) -> int:
    return (prefix * 1_000_003 + token_id + 1) % (2**61 - 1)


def prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    """Entry i is the hash of the first i + 1 tokens."""
    hashes, prefix = [], EMPTY_PREFIX
    for token_id in token_ids:
        prefix = extend(prefix, token_id)
        hashes.append(prefix)
    return hashes


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
            token_logprob(prefix, token) for prefix, token in zip(hashes, prompt[1:], strict=False)
        ]
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


class SlotContent(NamedTuple):
    prefix: int  # hash of the tokens that the state is the fold of
    record: tuple[int, ...] = ()  # the drafts behind them


class Stage:
    """One stage's simulated memory. None is NaN: nobody may read it."""

    def __init__(self, num_pages: int, num_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[SlotContent | None] = [None] * num_slots
        self.slots[ZERO_SLOT] = SlotContent(EMPTY_PREFIX)
        self.pages: list[list[int | None]] = [[None] * block_size for _ in range(num_pages)]

    def run(self, plan: StepPlan) -> list[list[int]]:
        """Execute the plan; per segment the hash of the prefix that each token ends."""
        for page in plan.poison_pages:
            self.pages[page] = [None] * self.block_size
        for slot in plan.poison_slots:
            self.slots[slot] = None
        inputs = [self.slots[segment.read_slot] for segment in plan.segments]
        return [
            self._run_segment(plan, segment, content)
            for segment, content in zip(plan.segments, inputs, strict=True)
        ]

    def _run_segment(
        self, plan: StepPlan, segment: Segment, content: SlotContent | None
    ) -> list[int]:
        assert content is not None, f"reads a poisoned slot:\n{plan.marked(segment)}"
        assert segment.replay <= len(content.record), f"no such record:\n{plan.marked(segment)}"
        prefix = content.prefix
        for token_id in content.record[: segment.replay]:
            prefix = extend(prefix, token_id)
        pages = segment.page_ids
        assert NULL_PAGE not in pages and len(set(pages)) == len(pages), plan.marked(segment)
        if segment.start:
            page, row = divmod(segment.start - 1, self.block_size)
            assert self.pages[pages[page]][row] == prefix, (
                f"state and pages differ:\n{plan.marked(segment)}"
            )
        hashes = []
        for position, token_id in enumerate(segment.token_ids, start=segment.start):
            prefix = extend(prefix, token_id)
            page, row = divmod(position, self.block_size)
            self.pages[pages[page]][row] = prefix
            hashes.append(prefix)
        num_certain = segment.num_tokens - segment.num_draft_tokens
        self.slots[segment.write_slot] = SlotContent(
            hashes[num_certain - 1], segment.token_ids[num_certain:]
        )
        return hashes

    def check_history(self, plan: StepPlan, segment: Segment, token_ids: Sequence[int]) -> None:
        """After the plan: slot and pages hold exactly the prefixes of `token_ids`."""
        hashes = prefix_hashes(token_ids)
        assert len(hashes) == segment.end, plan.marked(segment)
        num_certain = segment.end - segment.num_draft_tokens
        expected_slot = SlotContent(hashes[num_certain - 1], tuple(token_ids[num_certain:]))
        assert self.slots[segment.write_slot] == expected_slot, plan.marked(segment)
        for position, expected in enumerate(hashes):
            page, row = divmod(position, self.block_size)
            assert self.pages[segment.page_ids[page]][row] == expected, (
                f"wrong history at {position}:\n{plan.marked(segment)}"
            )


class FakeExecutor:
    """A pipeline of stages; each runs its plans in order, whenever it is told to."""

    def __init__(
        self,
        num_stages: int,
        num_pages: int,
        num_slots: int,
        block_size: int,
        drafter: FakeDrafter | None = None,
    ) -> None:
        self.drafter = drafter
        self.stages = [Stage(num_pages, num_slots, block_size) for _ in range(num_stages)]
        self.inboxes: list[deque[bytes]] = [deque() for _ in range(num_stages)]
        self.num_run = [0] * num_stages
        self.table: dict[int, SamplingEntry] = {}
        self.results: deque[StepResult] = deque()
        # Tokens of each admission as the plans named them: the history that memory must hold.
        self.histories: dict[tuple[int, int], list[int]] = {}

    def launch(self, plan: StepPlan) -> None:
        for inbox in self.inboxes:
            inbox.append(plan.encode())

    def can_advance(self, stage: int) -> bool:
        is_behind = stage == 0 or self.num_run[stage] < self.num_run[stage - 1]
        return is_behind and bool(self.inboxes[stage])

    def advance(self, stage: int) -> None:
        """Let a stage run its next plan; the last one answers."""
        plan = StepPlan.decode(self.inboxes[stage].popleft())
        hashes = self.stages[stage].run(plan)
        self.num_run[stage] += 1
        if stage < len(self.stages) - 1:
            return
        for segment in plan.segments:
            history = self.histories.setdefault((segment.request_id, segment.epoch), [])
            assert len(history) >= segment.start, plan.marked(segment)
            history[segment.start :] = segment.token_ids  # rejected drafts are overwritten
            self.stages[stage].check_history(plan, segment, history)
        self.table.update((entry.row, entry) for entry in plan.admissions)
        rows = tuple(map(self._row, plan.segments, hashes))
        self.results.append(StepResult(step=plan.step, digest=plan.digest(), rows=rows))

    def drain(self) -> None:
        """Run everything that was launched."""
        for stage in range(len(self.stages)):
            while self.can_advance(stage):
                self.advance(stage)

    def _row(self, segment: Segment, hashes: list[int]) -> RowResult:
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
        if entry.params.logprobs is not None:
            logprobs = tuple(map(token_logprob, prefixes, token_ids))
            row = msgspec.structs.replace(row, logprobs=logprobs)
        row = msgspec.structs.replace(row, token_ids=token_ids)
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
    num_slots: int | None = None  # None: one a sequence
    num_draft_tokens: int = 0


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
        num_slots = limits.num_slots or limits.max_num_seqs + 1
        self.limits = limits
        self.scheduler = Scheduler(
            **{**limits._asdict(), "num_slots": num_slots},
            eos_token_ids=(EOS,),
            vocab_size=VOCAB_SIZE,
            policy=cast(DraftPolicy | None, policy),
            debug_poison=debug_poison,
        )
        self.executor = FakeExecutor(
            limits.num_stages, limits.num_pages, num_slots, limits.block_size, drafter
        )
        self.policy = policy
        self.requests: dict[int, Request] = {}
        self.progress: dict[int, list[Progress]] = {}
        self.plans: list[StepPlan] = []
        self._committed = 0
        self._ends: dict[tuple[int, int], int] = {}
        self._samples_in_flight: set[tuple[int, int]] = set()

    def add(self, prompt: Sequence[int], params: SamplingParams, seed: int = 0) -> Request:
        request = Request(
            request_id=100 + len(self.requests),
            prompt_token_ids=tuple(prompt),
            params=params,
            seed=seed,
            max_tokens=params.max_tokens or self.limits.max_model_len,
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

    def launch(self) -> StepPlan | None:
        was_idle = {
            request_id: (request.num_preemptions, not request.num_plans_in_flight)
            for request_id, request in self.requests.items()
        }
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        for request_id, (num_preemptions, is_idle) in was_idle.items():
            if self.requests[request_id].num_preemptions > num_preemptions:
                assert is_idle, f"preempted with a plan in flight: {self.requests[request_id]}"
        if plan is not None:
            self._check_plan(plan)
            self.plans.append(plan)
            self.executor.launch(plan)
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
            if segment.sampling_row is not None:
                key = (segment.request_id, segment.epoch)
                self._samples_in_flight.discard(key)
                self._ends[key] = segment.end - segment.num_draft_tokens + len(row.token_ids) - 1
        for item in items:
            assert not self.is_ended(item.request_id), f"progress after the end: {item}"
            self.progress[item.request_id].append(item)
        self.scheduler.check_integrity()
        return items

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
            if reason.value == "abort":
                assert token_ids == expected.token_ids[: len(token_ids)]
                assert prompt_logprobs == expected.prompt_logprobs[: len(prompt_logprobs)]
            else:
                actual = Outcome(token_ids, logprobs, prompt_logprobs, reason.value)
                assert actual == expected, f"request {request_id}"
            self._check_counts(request, items[-1])
        if self.policy is not None:
            assert sorted(self.policy.forgotten) == sorted(self.requests)

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
        assert self.scheduler.num_in_flight <= limits.num_stages
        assert plan.num_tokens <= limits.max_num_batched_tokens, f"over the budget:\n{plan}"
        assert len(plan.segments) <= limits.max_num_seqs, f"too many requests:\n{plan}"
        for entry in plan.admissions:
            request = self.requests[entry.request_id]
            counted = request.token_ids(0, request.num_tokens)
            assert entry.token_ids == (counted if request.params.has_penalties else ())
        for segment in plan.segments:
            key = (segment.request_id, segment.epoch)
            request = self.requests[segment.request_id]
            assert segment.epoch == request.epoch, f"preempted in its own plan:\n{plan}"
            assert key not in self._samples_in_flight, (
                f"planned with a sample in flight:\n{plan.marked(segment)}"
            )
            assert segment.start == self._ends.get(key, 0), (
                f"spans are not adjacent:\n{plan.marked(segment)}"
            )
            self._ends[key] = segment.end
            certain_end = segment.end - segment.num_draft_tokens
            certain = segment.token_ids[: segment.num_tokens - segment.num_draft_tokens]
            assert certain == request.token_ids(segment.start, certain_end)
            # A window may have left pages that its drafts filled in vain.
            fewest = -(-segment.end // limits.block_size)
            most = -(-(certain_end + limits.num_draft_tokens) // limits.block_size)
            assert fewest <= len(segment.page_ids) <= most, f"bad pages:\n{plan.marked(segment)}"
            is_final = certain_end == request.num_tokens
            assert (segment.sampling_row is not None) == is_final, plan.marked(segment)
            if is_final:
                self._samples_in_flight.add(key)
                self._check_window(plan, segment, request)

    def _check_window(self, plan: StepPlan, segment: Segment, request: Request) -> None:
        num_left = request.max_tokens - len(request.output_token_ids)
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
