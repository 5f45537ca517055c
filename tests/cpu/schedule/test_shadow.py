"""Which hits get a shadow, what is compared, and what becomes of the verdict."""

import math
from typing import Any, NamedTuple, cast

import pytest

from stagecoach.cache.prefix_cache import Checkpoint, PrefixCache
from stagecoach.request import Request, SamplingParams
from stagecoach.schedule.shadow import FIRST_SHADOW_ID, Logits, Shadows, logit_difference
from stagecoach.schedule.step_plan import Comparison, RowResult

POSITION = 5
LOGITS = Logits((7, 3, 9), (4.0, 2.0, -1.0))


class FakeCheckpoint(NamedTuple):
    position: int = POSITION
    slot: int = 6
    replay: int = 2
    is_indexed: bool = True


class FakeCache:
    """Counts pins and remembers what it was told is wrong."""

    def __init__(self) -> None:
        self.num_pins = 0
        self.has_slot = True
        self.quarantined: list[Any] = []

    def pin(self, checkpoint: Any) -> None:
        self.num_pins += 1

    def unpin(self, checkpoint: Any) -> None:
        self.num_pins -= 1

    def bring_back(self, checkpoint: Any) -> bool:
        return self.has_slot

    def quarantine(self, checkpoint: Any) -> None:
        self.quarantined.append(checkpoint)


CHECKPOINT = cast(Checkpoint, FakeCheckpoint())


def make_request(request_id: int = 1, num_prompt_tokens: int = 8) -> Request:
    request = Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        params=SamplingParams(),
        seed=0,
        max_tokens=4,
        cache_salt="tenant",
    )
    request.num_computed = POSITION
    return request


class Bench:
    """Shadows over a fake cache, driven as the scheduler drives them."""

    def __init__(self, rate: float = 1.0, num_workers: int = 2) -> None:
        self.cache = FakeCache()
        self.shadows = Shadows(
            cast(PrefixCache, self.cache), rate=rate, tolerance=1e-3, num_workers=num_workers
        )

    def hit(self, request: Request) -> Request | None:
        """The shadow that the hit got."""
        num_waiting = len(self.shadows.waiting)
        self.shadows.note_hit(request, CHECKPOINT)
        return self.shadows.waiting[-1] if len(self.shadows.waiting) > num_waiting else None

    def start(self, shadow: Request, step: int = 3) -> Comparison | None:
        """Give the shadow its seat and compute up to the hit."""
        self.shadows.waiting.remove(shadow)
        shadow.slot = 4
        assert self.shadows.compare(shadow, step - 1) is None
        shadow.num_computed = POSITION
        return self.shadows.compare(shadow, step)

    def report(self, request: Request, logits: Logits = LOGITS) -> None:
        assert self.shadows.wants_logits(request)
        row = RowResult(
            request_id=request.request_id,
            epoch=request.epoch,
            token_ids=(1,),
            logit_ids=logits.ids,
            logits=logits.values,
        )
        self.shadows.note_row(request, row)

    @property
    def counts(self) -> tuple[int, int, int]:
        shadows = self.shadows
        return shadows.num_verified, shadows.num_mismatches, shadows.num_unverified


def begin(bench: Bench) -> tuple[Request, Request]:
    request = make_request()
    shadow = bench.hit(request)
    assert shadow is not None
    return request, shadow


@pytest.mark.parametrize(
    ("rate", "verified"),
    [
        (0.0, []),
        (1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0.5, [1, 3, 5, 7]),
        (0.25, [3, 7]),
        (0.75, [1, 2, 3, 5, 6, 7]),
    ],
)
def test_a_share_of_hits_is_verified_by_counting(rate: float, verified: list[int]) -> None:
    bench = Bench(rate)
    hits = [bench.hit(make_request(number)) is not None for number in range(8)]
    assert [number for number, is_verified in enumerate(hits) if is_verified] == verified


def test_a_shadow_is_the_same_request_without_the_cache() -> None:
    bench = Bench()
    request = make_request()
    request.output_token_ids.extend([77, 78])  # admitted again after a preemption
    shadow = bench.hit(request)
    assert shadow is not None and shadow.is_shadow
    assert shadow.prompt_token_ids == (*range(8), 77, 78)
    assert shadow.params.skip_reading_prefix_cache and shadow.max_tokens == 1
    assert shadow.request_id >= FIRST_SHADOW_ID and shadow.arrival_index >= FIRST_SHADOW_ID
    assert bench.cache.num_pins == 1


def test_its_chunk_ends_where_the_hit_did_and_the_next_plan_compares() -> None:
    bench = Bench()
    request, shadow = begin(bench)
    assert bench.shadows.cut(request, 100) == 100
    assert bench.shadows.cut(shadow, 3) == 3
    assert bench.shadows.cut(shadow, 100) == POSITION
    assert bench.start(shadow) == Comparison(6, 2, 4)
    assert bench.shadows.cut(shadow, 100) == 100
    assert bench.shadows.compare(request, 3) is None


def test_a_right_hit_is_verified_once_everybody_has_reported() -> None:
    bench = Bench()
    request, shadow = begin(bench)
    bench.report(request)
    assert not bench.shadows.wants_logits(request)
    assert bench.shadows.note_release(request) is None
    bench.start(shadow)
    bench.shadows.note_differences(3, [1e-5])
    bench.report(shadow)
    assert bench.shadows.note_release(shadow) is None
    assert bench.counts == (0, 0, 0) and bench.cache.num_pins == 1
    bench.shadows.note_differences(3, [2e-5])
    assert bench.counts == (1, 0, 0) and bench.cache.num_pins == 0
    [verdict] = bench.shadows.take_verdicts()
    assert verdict.is_equal and verdict.state_difference == 2e-5
    assert bench.shadows.take_verdicts() == [] and not bench.cache.quarantined


@pytest.mark.parametrize(
    ("differences", "logits"),
    [
        ((0.0, 0.01), LOGITS),
        ((0.01, 0.0), LOGITS),
        ((0.0, math.nan), LOGITS),
        ((math.nan, 0.0), LOGITS),
        ((math.inf, 0.0), LOGITS),
        ((0.0, 0.0), Logits((7, 3, 9), (4.0, 2.1, -1.0))),
        ((0.0, 0.0), Logits((7, 3, 8), (4.0, 2.0, 1.0))),
        ((0.0, 0.0), Logits((7, 3, 9), (math.nan, 2.0, -1.0))),
    ],
    ids=[
        "one worker",
        "another worker",
        "a late NaN",
        "an early NaN",
        "infinity",
        "a logit",
        "a token",
        "a NaN logit",
    ],
)
def test_a_wrong_hit_is_quarantined_and_can_be_done_again(
    differences: tuple[float, float], logits: Logits
) -> None:
    bench = Bench()
    request, shadow = begin(bench)
    bench.start(shadow)
    for difference in differences:
        bench.shadows.note_differences(3, [difference])
    bench.report(shadow, logits)
    assert not bench.cache.quarantined
    bench.report(request)
    assert bench.counts == (0, 1, 0)
    assert bench.cache.quarantined == [CHECKPOINT] and bench.cache.num_pins == 0
    [verdict] = bench.shadows.take_verdicts()
    assert not verdict.is_equal
    assert (verdict.request_id, verdict.position) == (1, POSITION)
    assert verdict.token_ids == tuple(range(8))


def test_it_is_given_up_when_the_request_goes_before_it_reported() -> None:
    """Aborted, preempted or not finite: its shadow is released with it, wherever it is."""
    bench = Bench()
    request, shadow = begin(bench)
    assert bench.shadows.note_release(request) is None
    assert not bench.shadows.waiting
    assert bench.counts == (0, 0, 1) and bench.cache.num_pins == 0

    bench = Bench()
    request, shadow = begin(bench)
    bench.start(shadow)
    assert bench.shadows.note_release(request) is shadow
    assert bench.shadows.note_release(shadow) is None
    bench.shadows.note_differences(3, [9.0])
    bench.shadows.note_differences(3, [9.0])
    assert bench.counts == (0, 0, 1) and bench.cache.num_pins == 0

    bench = Bench()
    request, shadow = begin(bench)
    bench.start(shadow)
    bench.report(shadow)
    assert bench.shadows.note_release(shadow) is None
    assert bench.shadows.note_release(request) is None
    assert bench.counts == (0, 0, 1) and bench.cache.num_pins == 0


def test_it_is_given_up_when_the_shadow_goes_before_it_reported() -> None:
    bench = Bench()
    request, shadow = begin(bench)
    bench.start(shadow)
    assert bench.shadows.note_release(shadow) is None
    assert bench.counts == (0, 0, 1) and bench.cache.num_pins == 0
    assert not bench.shadows.wants_logits(request)
    bench.shadows.note_differences(3, [9.0])
    bench.shadows.note_differences(3, [9.0])
    assert bench.counts == (0, 0, 1) and not bench.cache.quarantined


def test_it_is_given_up_when_its_state_cannot_come_back_from_the_host() -> None:
    bench = Bench()
    bench.cache.has_slot = False
    request = make_request()
    assert bench.hit(request) is None
    assert bench.counts == (0, 0, 1) and bench.cache.num_pins == 0
    assert not bench.shadows.wants_logits(request)


def test_a_checkpoint_that_its_reader_took_over_is_not_verified() -> None:
    bench = Bench()
    taken = cast(Checkpoint, FakeCheckpoint(is_indexed=False))
    bench.shadows.note_hit(make_request(), taken)
    assert not bench.shadows.waiting
    assert bench.counts == (0, 0, 1) and bench.cache.num_pins == 0


def test_several_are_compared_in_one_plan() -> None:
    bench = Bench(num_workers=1)
    pairs = []
    for request in (make_request(1), make_request(2)):
        shadow = bench.hit(request)
        assert shadow is not None
        pairs.append((request, shadow))
    for request, shadow in pairs:
        bench.start(shadow)
        bench.report(shadow)
        bench.report(request)
    bench.shadows.note_differences(3, [0.0, 1.0])
    verdicts = bench.shadows.take_verdicts()
    assert [(verdict.request_id, verdict.is_equal) for verdict in verdicts] == [
        (1, True),
        (2, False),
    ]
    bench.shadows.note_differences(3, [])  # a plan that compares nothing


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (LOGITS, 0.0),
        (Logits((7, 3, 9), (4.0, 2.0, -3.0)), 0.5),
        (Logits((7, 9, 3), (4.0, 3.0, 2.0)), 1.0),
        (Logits((7, 3, 8), (4.0, 2.0, -1.0)), 0.0),  # a tie at the end of both lists
        (Logits((7, 3, 8), (4.0, 2.0, 1.0)), 0.5),  # token 8 is below -1.0 in the first
    ],
)
def test_logits_are_compared_relative_to_the_largest(other: Logits, expected: float) -> None:
    assert logit_difference(LOGITS, other) == pytest.approx(expected)
    assert logit_difference(other, LOGITS) == pytest.approx(expected)
