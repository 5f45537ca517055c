"""How long each window is, and who gets drafts: the one place where that is decided.

Owns what is remembered of each request's drafts and the statistics of speculation. Puts
together the confidence schedule and the watchdog; with neither, every window is as long as it
may be. Knows no tensor, no clock and no plan; decisions change the speed, never the tokens.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from stagecoach.config.engine import ResolvedSpeculation
from stagecoach.schedule.acceptance import PlaceRates
from stagecoach.schedule.confidence_schedule import calibrate, choose_lengths
from stagecoach.schedule.speculation_stats import SpeculationStats
from stagecoach.schedule.step_cost import BatchCost, Floats, StepCost, StepShape
from stagecoach.schedule.watchdog import Watchdog

# Windows of one request, and of all, that acceptance rates remember.
_REQUEST_MEMORY = 16.0
_SHARED_MEMORY = 256.0


class Candidate(NamedTuple):
    """A window that is being planned."""

    request_id: int
    confidences: tuple[float, ...]  # raw, as they came; empty without a confidence head
    limit: int  # most drafts that may be verified now; at most those at hand


class _Drafting:
    """What is remembered of one request."""

    def __init__(self, num_places: int) -> None:
        self.rates = PlaceRates(num_places, _REQUEST_MEMORY)
        self.has_drafts = False  # at hand since its newest row
        self.has_declined = False  # drafts were at hand, and none of them was planned


class DraftPolicy:
    """Chooses lengths and proposals; learns from what came of them."""

    def __init__(
        self, config: ResolvedSpeculation, cost: StepCost | None, *, num_stages: int = 1
    ) -> None:
        """
        Args:
            cost: of the running pipeline; None if neither a schedule nor a watchdog needs it.
        """
        self._config = config
        self._num_places = config.num_speculative_tokens
        self._cost = cost
        self._num_stages = num_stages
        needs_cost = config.has_confidence_schedule or config.has_watchdog
        assert cost is not None or not needs_cost, "lengths are chosen by a cost"
        self._watchdog = (
            Watchdog(str(config.checkpoint), self._num_places) if config.has_watchdog else None
        )
        self._requests: dict[int, _Drafting] = {}
        self._rates = PlaceRates(self._num_places, _SHARED_MEMORY)
        self._num_windows = 0
        self._num_proposed = 0
        # Windows by the drafts that they verified, and by those that stood.
        self._by_drafted = [0] * (self._num_places + 1)
        self._by_accepted = [0] * (self._num_places + 1)
        self._lengths = [0] * (self._num_places + 1)

    def choose_lengths(self, candidates: Sequence[Candidate], num_other_tokens: int) -> list[int]:
        """Drafts to verify in each window of a plan, at most `limit` each.

        Args:
            candidates: all windows of the plan, those without drafts (limit 0) too.
            num_other_tokens: tokens of the plan beside windows.
        """
        requests = [self._request(candidate.request_id) for candidate in candidates]
        limits = [min(candidate.limit, self._num_places) for candidate in candidates]
        allowed = limits
        if self._watchdog is not None and candidates:
            self._watchdog.begin_plan(
                [candidate.request_id for candidate in candidates],
                lambda: self._batch_cost(len(candidates)),
            )
            allowed = [
                limit if self._may_verify(candidate.request_id) else 0
                for candidate, limit in zip(candidates, limits, strict=True)
            ]
        lengths = allowed
        if self._config.has_confidence_schedule and any(allowed):
            lengths = self._schedule(candidates, allowed, num_other_tokens)
        for candidate, request, length in zip(candidates, requests, lengths, strict=True):
            # A budget that leaves no room for drafts makes them as useless as a doubtful draft.
            is_wasted = request.has_drafts and length == 0
            request.has_declined = is_wasted and self._may_verify(candidate.request_id)
            request.has_drafts = False
            self._lengths[length] += 1
        return lengths

    def should_propose(self, request_id: int) -> bool:
        """Whether the drafter proposes a block behind what the request's segment samples."""
        self._request(request_id)
        return self._watchdog is None or self._watchdog.should_propose(request_id)

    def note_proposal(self, request_id: int, num_drafts: int) -> None:
        """Drafts came back for a request, with its newest row."""
        self._num_proposed += num_drafts
        self._request(request_id).has_drafts = True

    def note_window(self, request_id: int, num_drafts: int, num_accepted: int) -> None:
        """A window verified drafts, at least one of them."""
        assert 0 < num_drafts <= self._num_places, f"{num_drafts} drafts"
        assert 0 <= num_accepted <= num_drafts, f"{num_accepted} of {num_drafts} drafts"
        self._num_windows += 1
        self._by_drafted[num_drafts] += 1
        self._by_accepted[num_accepted] += 1
        self._request(request_id).rates.note(num_drafts, num_accepted)
        self._rates.note(num_drafts, num_accepted)
        if self._watchdog is not None:
            self._watchdog.note_round(request_id, num_drafts, num_accepted)

    def note_plain(self, request_id: int) -> None:
        """A row was sampled without verified drafts."""
        request = self._request(request_id)
        if request.has_declined and self._watchdog is not None:
            self._watchdog.note_round(request_id, 0, 0)
        request.has_declined = request.has_drafts = False

    def note_step(self, shape: StepShape, stage_seconds: Sequence[float]) -> None:
        """A plan of windows only was executed, in so many busy seconds of each stage."""
        if self._cost is not None:
            self._cost.note(shape, stage_seconds)

    def forget(self, request_id: int) -> None:
        """The request has ended; unknown ones are ignored."""
        self._requests.pop(request_id, None)
        if self._watchdog is not None:
            self._watchdog.forget(request_id)

    def stats(self) -> SpeculationStats:
        watchdog = self._watchdog
        drafted, accepted = _at_least(self._by_drafted), _at_least(self._by_accepted)
        return SpeculationStats(
            num_windows=self._num_windows,
            num_proposed_tokens=self._num_proposed,
            num_draft_tokens=sum(drafted),
            num_accepted_tokens=sum(accepted),
            drafted_per_position=drafted,
            accepted_per_position=accepted,
            window_lengths=tuple(self._lengths),
            is_paused=watchdog is not None and watchdog.is_paused,
            num_pauses=0 if watchdog is None else watchdog.num_pauses,
        )

    @property
    def _num_in_flight(self) -> int:
        """Plans that the requests alive can keep in flight."""
        return max(1, min(self._num_stages, len(self._requests)))

    def _may_verify(self, request_id: int) -> bool:
        return self._watchdog is None or self._watchdog.may_verify(request_id)

    def _request(self, request_id: int) -> _Drafting:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Drafting(self._num_places)
        return request

    def _schedule(
        self, candidates: Sequence[Candidate], limits: Sequence[int], num_other_tokens: int
    ) -> list[int]:
        assert self._cost is not None
        cost, num_in_flight = self._cost, self._num_in_flight
        num_proposals = sum(limit > 0 for limit in limits)

        def step_seconds(num_tokens_M: Floats, widest_M: Floats) -> Floats:
            return cost.seconds_each(num_tokens_M, widest_M, num_proposals, num_in_flight)

        shared = self._rates.blended()
        confidences = [
            self._confidences(candidate, limit, shared)
            for candidate, limit in zip(candidates, limits, strict=True)
        ]
        lengths = choose_lengths(
            confidences,
            step_seconds,
            num_other_tokens=num_other_tokens,
            stops_early=self._config.acceptance == "rejection",
        )
        if self._watchdog is None:
            return lengths
        # A probe that verifies nothing finds out nothing.
        return [
            max(length, min(limit, 1))
            if self._watchdog.is_probing(candidate.request_id)
            else length
            for candidate, limit, length in zip(candidates, limits, lengths, strict=True)
        ]

    def _confidences(
        self, candidate: Candidate, limit: int, shared: Sequence[float]
    ) -> Sequence[float]:
        """Of the first `limit` drafts, calibrated."""
        if candidate.confidences:
            raw = candidate.confidences[:limit]
            return calibrate(raw, self._config.draft.confidence_temperatures)
        return self._request(candidate.request_id).rates.blended(shared)[:limit]

    def _batch_cost(self, num_windows: int) -> BatchCost:
        assert self._cost is not None, "a watchdog compares costs"
        return BatchCost(
            self._cost,
            num_windows=num_windows,
            num_places=self._num_places,
            num_in_flight=self._num_in_flight,
        )


def _at_least(counts: Sequence[int]) -> tuple[int, ...]:
    """How many of what was counted by size are of size 1 or more, of 2 or more, and so on."""
    totals = list(accumulate(reversed(counts[1:])))
    return tuple(reversed(totals))
