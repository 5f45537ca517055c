"""A step plan while it is being made: turns the scheduler's decisions into segments.

Owns what a segment says of its request, and advances the request's progress with it. Decides
nothing: the scheduler has chosen the request and the length, and taken the pages.
"""

from typing import NamedTuple

import msgspec

from stagecoach.cache.memory_moves import NO_MOVES, MemoryMoves
from stagecoach.cache.prefix_hash import prefix_digest
from stagecoach.request import Request
from stagecoach.schedule.step_plan import Comparison, SamplingEntry, Save, Segment, StepPlan


class PlanInFlight(NamedTuple):
    """A launched plan whose result is not here yet."""

    plan: StepPlan
    encoded: bytes  # what goes to the workers; they echo its digest
    requests: tuple[Request, ...]  # of each segment


class PlanDraft:
    """Segments so far, and the tokens that are left of the budget."""

    def __init__(
        self, budget: int, eos_token_ids: frozenset[int], *, has_digests: bool = False
    ) -> None:
        """With `has_digests`, workers prove that each state they read is that of its prefix."""
        self.budget = budget
        self._has_digests = has_digests
        self._eos_token_ids = eos_token_ids
        self._windows: list[tuple[Segment, Request]] = []
        self._chunks: list[tuple[Segment, Request]] = []
        self._admissions: list[SamplingEntry] = []
        self.comparisons: list[Comparison] = []

    @property
    def is_empty(self) -> bool:
        return not self._windows and not self._chunks

    @property
    def requests(self) -> tuple[Request, ...]:
        """The request of each segment of the finished plan."""
        return tuple(request for _, request in self._ordered())

    def add_window(
        self,
        request: Request,
        num_draft_tokens: int = 0,
        *,
        saves: tuple[Save, ...] = (),
        proposes: bool = False,
    ) -> None:
        """The newest token, which is the only one not forwarded yet, and drafts behind it.

        The request's drafts are used up: whatever the row, the rest of them comes too late.
        """
        assert request.slot is not None, f"runs without a slot: {request}"
        segment = Segment(
            request_id=request.request_id,
            epoch=request.epoch,
            start=request.num_computed,
            token_ids=(request.output_token_ids[-1], *request.draft_token_ids[:num_draft_tokens]),
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
        if is_final:
            self._admissions.append(self._sampling_entry(request))

    def finish(self, step: int, moves: MemoryMoves = NO_MOVES) -> StepPlan:
        """The plan; its moves come before its segments."""
        return StepPlan(
            step=step,
            segments=tuple(segment for segment, _ in self._ordered()),
            admissions=tuple(self._admissions),
            moves=moves,
            comparisons=tuple(self.comparisons),
        )

    def _ordered(self) -> list[tuple[Segment, Request]]:
        """Windows, then chunks, each by context: alike neighbours share a kernel call."""
        return [
            *sorted(self._windows, key=lambda item: item[0].end),
            *sorted(self._chunks, key=lambda item: item[0].end),
        ]

    def _add(self, segment: Segment, request: Request) -> None:
        # A chunk of one token is shaped like a window, and the plan sorts by shape.
        (self._windows if segment.is_window else self._chunks).append((segment, request))
        self.budget -= segment.num_tokens
        request.read_slot = segment.write_slot
        request.num_computed = segment.end
        request.num_replay = 0
        request.num_plans_in_flight += 1
        request.is_sample_in_flight = segment.sampling_row is not None

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


def _prompt_logprob_targets(request: Request, start: int, end: int) -> tuple[int, ...]:
    """The prompt tokens that follow tokens [start, end), if somebody still waits for them."""
    if request.params.prompt_logprobs is None:
        return ()
    last = min(end + 1, request.num_prompt_tokens)
    if last - 1 <= len(request.prompt_logprobs):
        return ()
    return request.prompt_token_ids[start + 1 : last]
