"""A step plan while it is being made: turns the scheduler's decisions into segments.

Owns what a segment says of its request, and advances the request's progress with it. Decides
nothing: the scheduler has chosen the request and the length, and taken the pages.
"""

from dataclasses import dataclass
from functools import cached_property

import msgspec

from stagecoach.cache.memory_moves import NO_MOVES, MemoryMoves
from stagecoach.cache.prefix_hash import prefix_digest
from stagecoach.request import Request
from stagecoach.schedule.prefill_shares import PrefillShares, Share
from stagecoach.schedule.step_plan import (
    Comparison,
    SamplingEntry,
    Save,
    Segment,
    StepPlan,
    plan_digest,
)


@dataclass(frozen=True)
class PlanInFlight:
    """A launched plan whose result is not here yet."""

    plan: StepPlan
    encoded: bytes  # what goes to the workers; they echo its digest
    requests: tuple[Request, ...]  # of each segment
    prefill_cost: float = 0.0  # of its chunks

    @cached_property
    def digest(self) -> bytes:
        """Of `encoded`; best asked for while the workers have the plan."""
        return plan_digest(self.encoded)


class PlanDraft:
    """Segments so far, and the tokens that are left of the budget."""

    def __init__(
        self,
        budget: int,
        eos_token_ids: frozenset[int],
        share: Share | None = None,
        *,
        has_digests: bool = False,
    ) -> None:
        """Without `share`, chunks may take the whole budget.

        With `has_digests`, workers prove that each state they read is that of its prefix.
        """
        self.budget = budget
        self._has_digests = has_digests
        self._eos_token_ids = eos_token_ids
        self._windows: list[tuple[Segment, Request]] = []
        self._chunks: list[tuple[Segment, Request]] = []
        self._admissions: list[SamplingEntry] = []
        # What its chunks may take, once windows have their place.
        self.share = share or PrefillShares(num_stages=1, budget=budget).begin_plan((), ())
        # Of each segment of the finished plan.
        self.requests: tuple[Request, ...] = ()
        self.comparisons: list[Comparison] = []

    @property
    def is_empty(self) -> bool:
        return not self._windows and not self._chunks

    @property
    def has_chunk_room(self) -> bool:
        """Whether another chunk may join."""
        return self.budget > 0 and not self.share.is_used_up

    def add_window(
        self,
        request: Request,
        num_draft_tokens: int = 0,
        *,
        saves: tuple[Save, ...] = (),
        proposes: bool = False,
    ) -> None:
        """The newest token, which is the only one not forwarded yet, and drafts behind it.

        The request's drafts are used up: whatever the row, the rest of them comes too late. With
        a sample in flight, that will be the newest token: the window is chained to it.
        """
        assert request.slot is not None, f"runs without a slot: {request}"
        is_chained = request.is_sample_in_flight
        token_ids: tuple[int, ...] = ()
        if not is_chained:
            token_ids = request.output_token_ids[-1], *request.draft_token_ids[:num_draft_tokens]
        segment = Segment(
            request_id=request.request_id,
            epoch=request.epoch,
            start=request.num_computed,
            token_ids=token_ids,
            num_draft_tokens=num_draft_tokens,
            read_slot=request.read_slot,
            replay=request.num_replay,
            write_slot=request.slot,
            saves=saves,
            page_table=request.page_ids.tobytes(),
            sampling_row=request.sampling_row,
            proposes=proposes,
            is_constrained=request.constraint is not None,
            read_digest=self._read_digest(request),
            is_chained=is_chained,
        )
        request.draft_token_ids = request.confidences = ()
        self._add(segment, request)

    def add_chunk(
        self,
        request: Request,
        length: int,
        *,
        saves: tuple[Save, ...] = (),
        proposes: bool = False,
        reports_logits: bool = False,
    ) -> None:
        """The next `length` committed tokens; the chunk that reaches the newest one samples."""
        assert request.slot is not None, f"runs without a slot: {request}"
        start = request.num_computed
        end = start + length
        is_final = end == request.num_tokens
        segment = Segment(
            request_id=request.request_id,
            epoch=request.epoch,
            start=start,
            token_ids=request.token_ids(start, end),
            read_slot=request.read_slot,
            replay=request.num_replay,
            write_slot=request.slot,
            saves=saves,
            page_table=request.page_ids.tobytes(),
            sampling_row=request.sampling_row if is_final else None,
            proposes=proposes,
            is_constrained=is_final and request.constraint is not None,
            read_digest=self._read_digest(request),
            prompt_logprob_targets=_prompt_logprob_targets(request, start, end),
            num_prompt_logprobs=request.params.prompt_logprobs or 0,
            reports_logits=reports_logits,
        )
        self._add(segment, request)
        self.share.take(start, end)
        if is_final:
            self._admissions.append(self._sampling_entry(request))

    def finish(self, step: int, moves: MemoryMoves = NO_MOVES) -> StepPlan:
        """The plan; its moves come before its segments."""
        ordered = self._ordered()
        self.requests = tuple([request for _, request in ordered])
        return StepPlan(
            step=step,
            segments=tuple([segment for segment, _ in ordered]),
            admissions=tuple(self._admissions),
            moves=moves,
            comparisons=tuple(self.comparisons),
        )

    def _ordered(self) -> list[tuple[Segment, Request]]:
        """Windows, then chunks, each by context: alike neighbours share a kernel call."""
        return [*sorted(self._windows, key=_end), *sorted(self._chunks, key=_end)]

    def _add(self, segment: Segment, request: Request) -> None:
        num_tokens = segment.num_tokens
        # A chunk of one token is shaped like a window, and the plan sorts by shape.
        is_window = num_tokens == 1 + segment.num_draft_tokens
        (self._windows if is_window else self._chunks).append((segment, request))
        self.budget -= num_tokens
        request.read_slot = segment.write_slot
        request.num_computed = segment.start + num_tokens
        request.num_replay = 0
        request.num_plans_in_flight += 1
        request.num_samples_in_flight += segment.sampling_row is not None

    def _read_digest(self, request: Request) -> bytes:
        if not self._has_digests:
            return b""
        return prefix_digest(request.token_ids(0, request.num_computed))

    def _sampling_entry(self, request: Request) -> SamplingEntry:
        """What the sampling table learns with the first sample of an admission."""
        params = request.params
        assert request.sampling_row is not None, f"runs without a row: {request}"
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._eos_token_ids
        return SamplingEntry(
            row=request.sampling_row,
            request_id=request.request_id,
            # Masks say what the grammar means to them.
            params=msgspec.structs.replace(params, structured_outputs=None),
            seed=request.seed,
            stop_token_ids=tuple(sorted(stops)),
            num_prompt_tokens=request.num_prompt_tokens,
            token_ids=request.token_ids(0, request.num_tokens) if params.has_penalties else (),
        )


def _end(item: tuple[Segment, Request]) -> int:
    """The length of its context."""
    segment = item[0]
    return segment.end


def _prompt_logprob_targets(request: Request, start: int, end: int) -> tuple[int, ...]:
    """The prompt tokens that follow tokens [start, end), if somebody still waits for them."""
    if request.params.prompt_logprobs is None:
        return ()
    last = min(end + 1, request.num_prompt_tokens)
    if last - 1 <= len(request.prompt_logprobs):
        return ()
    return request.prompt_token_ids[start + 1 : last]
