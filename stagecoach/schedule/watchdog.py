"""Whether drafting pays: for each request of a batch, and for all.

Owns the comparison of rolling acceptance with what rounds cost, the pauses that follow from it,
and the probes by which a pause ends. Knows no confidence and no clock: its time is the number of
plans with windows.

Dimensions: M numbers of requests that draft, 0 to all of the batch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stagecoach.observe.log import get_logger
from stagecoach.schedule.acceptance import FirstDrafts, Payoff
from stagecoach.schedule.step_cost import BatchCost

_LOG = get_logger(__name__)

# Rounds that are remembered of a request: it must react within a few windows; and of all.
_REQUEST_MEMORY = 10.0
_SHARED_MEMORY = 32.0
# Rounds that a request borrows from what is known of all: some for good, since alone it would
# chase its luck; the others fade.
_BORROWED_FOR_GOOD = 1.5
_BORROWED_AT_FIRST = 2.5
# What is assumed before the first round, and fades: drafting pays, and so it is tried.
_TRUST_ROUNDS = 3.0
_TRUSTED_SPEEDUP = 1.5
_TRUSTED_DRAFTS = 3.0

# Share of the time that probes may cost while drafting pays for nobody.
_PROBE_SHARE = 0.01
_LEAST_DISTANCE = 8
_MOST_DOUBLINGS = 4
# Rounds that prove that a request is worth drafting for, whatever its probes said.
_PROOF_ROUNDS = 6.0

# Plans after which a decision is made anew though nothing was heard: costs are measured on.
_REVIEW_DISTANCE = 16


class _Watched:
    """One request."""

    def __init__(self, *, pays: bool, plan: int, num_failures: int) -> None:
        self.payoff = Payoff(_REQUEST_MEMORY)
        self.pays = pays
        self.last_proposal = plan  # the plan it was made in, or in which the request came
        self.num_failures = num_failures  # probes that did not pay since drafting last did
        self.is_probing = False


class _Outlook(NamedTuple):
    """What a further round of a request is expected to be."""

    speedup: float  # tokens against cost, if all windows of the batch were like it
    num_drafts: float


class Watchdog:
    """Says who may draft.

    The requests of a batch draft whose expected tokens are worth more than the time that their
    drafts add; what is expected of a request is its rolling payoff, blended with that of all, so
    that a new one starts from what is known. The others decode plainly, except for probes: one
    round at every multiple of their distance, a power of two, so that the probes of all fall
    into the same plans and share their cost. Each probe in vain doubles the distance.

    Attributes:
        is_paused: drafting pays for no request that is here; only probes are made.
        num_pauses: times that it began not to.
    """

    def __init__(self, draft_name: str, num_places: int) -> None:
        self._draft_name = draft_name
        self._trusted_drafts = min(_TRUSTED_DRAFTS, num_places)
        self._requests: dict[int, _Watched] = {}
        self._all = Payoff(_SHARED_MEMORY)
        self._num_failures = 0  # the most of any request during this pause
        self._plan = 0
        self._cost: BatchCost | None = None
        self._reviewed: set[tuple[int, ...]] = set()  # batches that need no new decision
        self._first_drafts = FirstDrafts()
        self._told: set[str] = set()
        self.is_paused = False
        self.num_pauses = 0

    def begin_plan(self, request_ids: Sequence[int], make_cost: Callable[[], BatchCost]) -> None:
        """Decide who drafts, of the requests whose windows are being planned.

        Nothing is decided anew where no round was noted since these requests were last here,
        until costs may have changed: a pause should cost nothing.
        """
        self._plan += 1
        if self._plan % _REVIEW_DISTANCE == 0:
            self._reviewed.clear()
        key = tuple(request_ids)
        if key not in self._reviewed:
            self._reviewed.add(key)
            self._cost = make_cost()
            self._decide(key, self._cost)

    def may_verify(self, request_id: int) -> bool:
        """Whether drafts at hand are worth a thought: drafting pays, or they are a probe's."""
        request = self._request(request_id)
        return request.pays or request.is_probing

    def is_probing(self, request_id: int) -> bool:
        return self._request(request_id).is_probing

    def should_propose(self, request_id: int) -> bool:
        """Whether to propose drafts for its next window; asked once a segment."""
        request = self._request(request_id)
        if not request.pays:
            distance = self._distance(request)
            if self._plan // distance == request.last_proposal // distance:
                return False
            request.is_probing = True
        request.last_proposal = self._plan
        return True

    def note_round(self, request_id: int, num_drafts: int, num_accepted: int) -> None:
        """What came of a proposal: none of it was verified where `num_drafts` is 0."""
        assert self._cost is not None, "a round is planned before it ends"
        self._reviewed.clear()
        request = self._request(request_id)
        if request.is_probing:
            request.is_probing = False
            if 1 + num_accepted >= self._cost.uniform(num_drafts):
                request.payoff.restart()
            else:
                request.num_failures += 1
                self._num_failures = max(self._num_failures, request.num_failures)
        elif request.pays and request.payoff.num_rounds >= _PROOF_ROUNDS:
            request.num_failures = 0
        for payoff in (request.payoff, self._all):
            payoff.note(num_drafts, num_accepted)
        if num_drafts and self._first_drafts.note(request_id, is_accepted=num_accepted > 0):
            self._tell(
                "broken draft",
                f"the draft model {self._draft_name} does not fit the target: "
                f"{self._first_drafts.describe()}",
                is_warning=True,
            )

    def forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)

    def _decide(self, request_ids: Sequence[int], cost: BatchCost) -> None:
        requests = [self._request(request_id) for request_id in request_ids]
        num_paying_before = sum(request.pays for request in requests)
        shared = self._shared_outlook(cost)
        outlooks = [_blend(item.payoff, cost, shared, _borrowed(item)) for item in requests]
        order = sorted(range(len(outlooks)), key=lambda index: -outlooks[index].speedup)
        best = [outlooks[index] for index in order]
        num_paying = _num_paying(best, cost)
        for rank, index in enumerate(order):
            requests[index].pays = rank < num_paying
        self._note_pause(best[0].speedup)
        if num_paying < num_paying_before and not self.is_paused:
            last = order[num_paying]
            self._tell(
                "hard text",
                f"drafting does not pay for request {request_ids[last]}, which decodes plainly, "
                f"probes aside: {self._describe(requests[last].payoff)}",
            )

    def _request(self, request_id: int) -> _Watched:
        request = self._requests.get(request_id)
        if request is None:
            pays = self._cost is None or self._shared_outlook(self._cost).speedup >= 1
            request = _Watched(pays=pays, plan=self._plan, num_failures=self._num_failures)
            self._requests[request_id] = request
        return request

    def _shared_outlook(self, cost: BatchCost) -> _Outlook:
        trusted = _Outlook(_TRUSTED_SPEEDUP, self._trusted_drafts)
        return _blend(self._all, cost, trusted, _TRUST_ROUNDS * self._all.novelty)

    def _distance(self, request: _Watched) -> int:
        """Plans from probe to probe: a power of two."""
        cost = self._cost
        least = float(_LEAST_DISTANCE)
        # Where drafting pays for others, their gain covers the probes.
        if cost is not None and self.is_paused:
            loss = cost.uniform(max(1.0, request.payoff.mean_drafts)) - 1
            least = max(least, loss * cost.num_in_flight / _PROBE_SHARE)
        num_doublings = min(_MOST_DOUBLINGS, request.num_failures)
        return 1 << (int(least - 1).bit_length() + num_doublings)

    def _note_pause(self, expected_speedup: float) -> None:
        was_paused = self.is_paused
        self.is_paused = not any(request.pays for request in self._requests.values())
        if was_paused and not self.is_paused:
            self._num_failures = 0
            self._tell(
                "resumed",
                f"drafting is tried again: a speedup of {expected_speedup:.2f} is expected",
            )
        elif self.is_paused and not was_paused:
            self.num_pauses += 1
            self._tell(
                "paused",
                f"drafting does not pay and is paused, probes aside: {self._describe(self._all)}",
            )

    def _tell(self, event: str, text: str, *, is_warning: bool = False) -> None:
        """Once for all to see; the same event again is for those who look closely."""
        if event in self._told:
            _LOG.debug(text)
        elif is_warning:
            _LOG.warning(text)
        else:
            _LOG.info(text)
        self._told.add(event)

    def _describe(self, payoff: Payoff) -> str:
        assert self._cost is not None, "a plan comes before its outcome"
        return (
            f"{payoff.mean_tokens:.2f} tokens a round of {payoff.mean_drafts:.1f} drafts, which "
            f"costs {self._cost.uniform(payoff.mean_drafts):.2f} plain steps"
        )


def _num_paying(best: Sequence[_Outlook], cost: BatchCost) -> int:
    """How many of a batch draft, in the order of their speedup.

    All that are worth it alone; if those are too few to carry what a block pass costs the whole
    batch, as many as bring the most tokens for the cost.
    """
    num_paying = sum(item.speedup >= 1 for item in best)
    drafts_M = np.array([0.0, *(item.num_drafts for item in best)])
    gains = [item.speedup * cost.uniform(item.num_drafts) - 1 for item in best]
    tokens_M = np.cumsum([float(len(best)), *gains])
    cost_M = cost.mixed(
        np.cumsum(drafts_M), np.maximum.accumulate(drafts_M), np.arange(len(best) + 1.0)
    )
    if tokens_M[num_paying] < cost_M[num_paying] * len(best):
        num_paying = int(np.argmax(tokens_M / cost_M))
    return num_paying


def _borrowed(request: _Watched) -> float:
    return _BORROWED_FOR_GOOD + _BORROWED_AT_FIRST * request.payoff.novelty


def _blend(payoff: Payoff, cost: BatchCost, other: _Outlook, num_other_rounds: float) -> _Outlook:
    """What rounds say, with another outlook that weighs as much as so many."""
    num_rounds = payoff.num_rounds
    own = _Outlook(payoff.mean_tokens / cost.uniform(payoff.mean_drafts), payoff.mean_drafts)
    total = num_rounds + num_other_rounds
    return _Outlook(
        (num_rounds * own.speedup + num_other_rounds * other.speedup) / total,
        (num_rounds * own.num_drafts + num_other_rounds * other.num_drafts) / total,
    )
