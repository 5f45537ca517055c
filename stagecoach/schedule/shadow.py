"""Shadow verification: a share of all prefix hits is computed again from scratch and compared.

Owns which hits get a shadow, what is compared with what, and the verdict. A shadow is a request
of the engine's own with the same tokens, which reads and leaves nothing in the cache and samples
once, where the request that hit samples first. The scheduler runs it like any other, as the
youngest; whether it finds room is not known here.

    hit       cached ............ position | chunks ...... | sample: logits
    shadow    chunks ............ position | chunks ...... | sample: logits
                       states compared here                  and these
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.cache.prefix_cache import Checkpoint, PrefixCache
from stagecoach.request import Request, SamplingParams
from stagecoach.schedule.step_plan import Comparison, RowResult

# Clients' ids are below.
FIRST_SHADOW_ID = 1 << 62

# One sample, of which only the logits count.
_SHADOW_PARAMS = SamplingParams(
    temperature=0.0, max_tokens=1, ignore_eos=True, skip_reading_prefix_cache=True
)

# The largest relative difference between right states, or logits, of a prompt that is cut into
# chunks in two ways: what was measured, and a margin (docs/guarantees.md).
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.25}


class Logits(NamedTuple):
    """The largest logits behind a sample, by falling value."""

    ids: tuple[int, ...]
    values: tuple[float, ...]


class Verdict(NamedTuple):
    """What came of a verification, and what it takes to do it again."""

    request_id: int
    token_ids: tuple[int, ...]  # behind which both sampled
    position: int  # where the hit ended
    state_difference: float  # the largest relative difference on any worker
    logit_difference: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return max(self.state_difference, self.logit_difference) <= self.tolerance


@dataclass(slots=True, eq=False)
class _Verification:
    """A hit, its shadow, and what is known of both so far."""

    original: Request
    shadow: Request
    checkpoint: Checkpoint
    num_missing: int  # workers that have not compared
    state_difference: float = 0.0
    logits: dict[int, Logits] = field(default_factory=dict)  # by request id
    is_open: bool = True

    @property
    def requests(self) -> tuple[Request, Request]:
        return self.original, self.shadow


class Shadows:
    """The verifications that are under way.

    Each ends with a verdict, or is given up when one of its two requests is released before its
    logits are here. Until then its checkpoint is pinned.
    """

    def __init__(
        self, cache: PrefixCache, *, rate: float, tolerance: float, num_workers: int
    ) -> None:
        """Of n hits, the whole part of n * `rate` are verified."""
        self.waiting: deque[Request] = deque()  # shadows that have no seat yet
        self.num_verified = 0
        self.num_mismatches = 0
        self.num_unverified = 0
        self._cache = cache
        self._rate = rate
        self._tolerance = tolerance
        self._num_workers = num_workers
        self._num_hits = 0
        self._num_shadows = 0
        self._open: dict[int, _Verification] = {}  # by the ids of both requests
        self._compared: dict[int, list[_Verification]] = {}  # by the step of the plan
        self._verdicts: list[Verdict] = []

    def add_counts(self, stats: PrefixCacheStats) -> PrefixCacheStats:
        """The cache's counts together with those of its verification."""
        return msgspec.structs.replace(
            stats,
            num_verified=self.num_verified,
            num_mismatches=self.num_mismatches,
            num_unverified=self.num_unverified,
        )

    def note_hit(self, request: Request, checkpoint: Checkpoint) -> None:
        """A request was first admitted behind a hit; every so many get a shadow."""
        num_due = int(self._num_hits * self._rate)
        self._num_hits += 1
        if int(self._num_hits * self._rate) == num_due:
            return
        # Where slots are few the request has taken over the checkpoint's own.
        if not checkpoint.is_indexed or not self._bring_back(checkpoint):
            self.num_unverified += 1
            return
        shadow_id = FIRST_SHADOW_ID + self._num_shadows
        self._num_shadows += 1
        shadow = Request(
            request_id=shadow_id,
            prompt_token_ids=request.token_ids(0, request.num_tokens),
            params=_SHADOW_PARAMS,
            seed=0,
            max_tokens=1,
            arrival_index=shadow_id,  # behind all clients' requests
            is_shadow=True,
            is_filed=False,
        )
        verification = _Verification(request, shadow, checkpoint, self._num_workers)
        self._open[request.request_id] = self._open[shadow_id] = verification
        self.waiting.append(shadow)

    def cut(self, request: Request, length: int) -> int:
        """How long its next chunk may be: a shadow's ends where the hit did, to be compared."""
        if not request.is_shadow:
            return length
        position = self._open[request.request_id].checkpoint.position
        num_left = position - request.num_computed
        return min(length, num_left) if num_left > 0 else length

    def compare(self, request: Request, step: int) -> Comparison | None:
        """What plan `step` compares before the next chunk of the request, if anything."""
        if not request.is_shadow:
            return None
        verification = self._open[request.request_id]
        checkpoint = verification.checkpoint
        if request.num_computed != checkpoint.position:
            return None
        assert request.slot is not None, f"runs without a slot: {request}"
        assert checkpoint.slot is not None, f"compared on the host: {checkpoint}"
        self._compared.setdefault(step, []).append(verification)
        return Comparison(checkpoint.slot, checkpoint.replay, request.slot)

    def wants_logits(self, request: Request) -> bool:
        """Whether its next sample is one that a verification waits for."""
        verification = self._open.get(request.request_id)
        return verification is not None and request.request_id not in verification.logits

    def note_row(self, request: Request, row: RowResult) -> None:
        """Take over the logits of a sample that was asked for them."""
        verification = self._open.get(request.request_id)
        if verification is not None and row.logit_ids:
            verification.logits[request.request_id] = Logits(row.logit_ids, row.logits)
            self._judge(verification)

    def note_differences(self, step: int, differences: Sequence[float]) -> None:
        """What one worker found in the comparisons of plan `step`; every worker answers once."""
        compared = self._compared.get(step, [])
        for verification, difference in zip(compared, differences, strict=True):
            verification.state_difference = max(verification.state_difference, _or_inf(difference))
            verification.num_missing -= 1
            self._judge(verification)
        if compared and compared[0].num_missing == 0:
            del self._compared[step]

    def note_release(self, request: Request) -> Request | None:
        """A request ended, was aborted or preempted: its verification ends too if it had to come.

        Returns:
            The shadow that computes on for nobody, for the scheduler to release; None if there
            is none.
        """
        if not self.wants_logits(request):
            return None
        verification = self._open[request.request_id]
        self._close(verification)
        self.num_unverified += 1
        shadow = verification.shadow
        if shadow in self.waiting:
            self.waiting.remove(shadow)
            return None
        is_running = shadow is not request and shadow.request_id not in verification.logits
        return shadow if is_running else None

    def take_verdicts(self) -> list[Verdict]:
        """Those reached since the last call."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def _bring_back(self, checkpoint: Checkpoint) -> bool:
        """Pin it on the device, if it can be had there."""
        self._cache.pin(checkpoint)
        if self._cache.bring_back(checkpoint):
            return True
        self._cache.unpin(checkpoint)
        return False

    def _judge(self, verification: _Verification) -> None:
        if not verification.is_open or verification.num_missing or len(verification.logits) < 2:
            return
        original, shadow = verification.requests
        verdict = Verdict(
            request_id=original.request_id,
            token_ids=shadow.prompt_token_ids,
            position=verification.checkpoint.position,
            state_difference=verification.state_difference,
            logit_difference=logit_difference(
                verification.logits[original.request_id], verification.logits[shadow.request_id]
            ),
            tolerance=self._tolerance,
        )
        if verdict.is_equal:
            self.num_verified += 1
        else:
            self.num_mismatches += 1
            self._cache.quarantine(verification.checkpoint)
        self._close(verification)
        self._verdicts.append(verdict)

    def _close(self, verification: _Verification) -> None:
        verification.is_open = False
        self._cache.unpin(verification.checkpoint)
        for request in verification.requests:
            del self._open[request.request_id]


def logit_difference(one: Logits, other: Logits) -> float:
    """The largest difference of two samples' largest logits, relative to the largest of all.

    A token that only one of them lists is at most as likely in the other as the last that is
    listed there; what it exceeds that by is its difference.
    """
    scale = max(map(abs, (*one.values, *other.values)))
    largest = 0.0
    for mine, theirs in ((one, other), (other, one)):
        known = dict(zip(theirs.ids, theirs.values, strict=True))
        for token_id, value in zip(mine.ids, mine.values, strict=True):
            if token_id in known:
                difference = abs(value - known[token_id])
            else:
                difference = max(0.0, value - theirs.values[-1])
            largest = max(largest, _or_inf(difference))
    return _or_inf(largest / scale) if scale else largest


def _or_inf(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference
