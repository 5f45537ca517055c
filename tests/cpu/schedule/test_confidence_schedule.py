"""The confidence schedule: the most expected tokens a second, and prefixes only."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.schedule.confidence_schedule import calibrate, choose_lengths
from stagecoach.schedule.step_cost import Floats

pytestmark = pytest.mark.cpu

CONFIDENCES = st.lists(
    st.lists(st.floats(0, 1).map(lambda value: round(value, 3)), max_size=3),
    min_size=1,
    max_size=3,
)


def linear(fixed: float, token: float = 1.0, width: float = 0.0):  # type: ignore[no-untyped-def]
    def seconds(num_tokens_M: Floats, widest_M: Floats) -> Floats:
        return fixed + token * num_tokens_M + width * (widest_M - 1)

    return seconds


def rate(confidences: list[list[float]], lengths: tuple[int, ...], fixed: float) -> float:
    expected = len(lengths) + sum(
        math.prod(row[: place + 1])
        for row, length in zip(confidences, lengths, strict=True)
        for place in range(length)
    )
    return expected / (fixed + len(lengths) + sum(lengths))


@settings(deadline=None)
@given(CONFIDENCES, st.floats(0, 20))
def test_no_other_lengths_give_a_higher_rate(confidences: list[list[float]], fixed: float) -> None:
    lengths = choose_lengths(confidences, linear(fixed))
    assert all(0 <= length <= len(row) for length, row in zip(lengths, confidences, strict=True))
    best = max(
        rate(confidences, other, fixed)
        for other in itertools.product(*(range(len(row) + 1) for row in confidences))
    )
    assert rate(confidences, tuple(lengths), fixed) == pytest.approx(best)


def test_a_confidence_that_is_no_number_is_a_doubt_and_leaves_others_alone() -> None:
    nan, sure = calibrate([math.nan] * 3, ()), calibrate([0.9, 0.2, 0.2], ())
    assert choose_lengths([nan, sure], linear(2.0)) == [0, 1]
    assert choose_lengths([calibrate([math.nan] * 3, (2.0,)), sure], linear(2.0)) == [0, 1]


@settings(deadline=None)
@given(CONFIDENCES, st.floats(0, 20))
def test_where_cost_is_linear_stopping_early_is_as_good(
    confidences: list[list[float]], fixed: float
) -> None:
    lengths = choose_lengths(confidences, linear(fixed), stops_early=True)
    longest = choose_lengths(confidences, linear(fixed))
    assert rate(confidences, tuple(lengths), fixed) == pytest.approx(
        rate(confidences, tuple(longest), fixed)
    )


@settings(deadline=None)
@given(CONFIDENCES, st.floats(0, 20), st.floats(0, 1), st.data())
def test_stopping_early_does_not_look_at_what_a_token_itself_decides(
    confidences: list[list[float]], fixed: float, other: float, data: st.DataObject
) -> None:
    """Whether a draft is verified may depend on confidences up to its own place only."""
    row = data.draw(st.sampled_from(range(len(confidences))))
    place = data.draw(st.integers(0, 2))
    changed = [list(items) for items in confidences]
    changed[row][place:] = [other] * len(changed[row][place:])
    seconds = linear(fixed, width=2.0)
    before = choose_lengths(confidences, seconds, stops_early=True)[row]
    after = choose_lengths(changed, seconds, stops_early=True)[row]
    assert min(before, place) == min(after, place)


def test_a_step_up_in_cost_is_looked_beyond_only_where_that_is_allowed() -> None:
    def seconds(num_tokens_M: Floats, widest_M: Floats) -> Floats:
        return 10.0 + 5.0 * (widest_M > 1)

    confidences = [[0.9] * 7] * 4
    assert choose_lengths(confidences, seconds) == [7] * 4
    assert choose_lengths(confidences, seconds, stops_early=True) == [0] * 4


def test_sure_drafts_are_taken_and_doubtful_ones_left() -> None:
    lengths = choose_lengths([[0.99] * 5, [0.1] * 5, [], [0.9, 0.2, 0.9]], linear(10.0))
    assert lengths == [5, 0, 0, 1]


def test_certain_drafts_of_one_window_are_admitted_from_the_first_on() -> None:
    assert choose_lengths([[1.0] * 4, [1.0] * 4], linear(1.0)) == [4, 4]


def test_a_long_prompt_beside_the_windows_makes_drafts_cheap() -> None:
    confidences = [[0.6] * 4]
    alone = choose_lengths(confidences, linear(0.5))
    beside = choose_lengths(confidences, linear(0.5), num_other_tokens=500)
    assert sum(alone) < sum(beside) == 4


def test_nothing_at_hand_gives_nothing() -> None:
    assert choose_lengths([], linear(1.0)) == []
    assert choose_lengths([[], []], linear(1.0)) == [0, 0]
    assert choose_lengths([[0.0, 0.5]], linear(1.0)) == [0]


def test_temperatures_are_applied_place_by_place_to_the_logit() -> None:
    raw = [0.9, 0.9, 0.2, 0.2]
    calibrated = calibrate(raw, (1.0, 2.0))
    expected = [raw[0], *(1 / (1 + math.sqrt((1 - c) / c)) for c in raw[1:])]
    assert calibrated == pytest.approx(expected)
    assert calibrate(raw, ()) == raw


@given(
    st.lists(st.floats(0, 1), max_size=5),
    st.lists(st.floats(1e-3, 1e3), max_size=4).map(tuple),
)
def test_calibrated_confidences_keep_their_order_and_are_never_certain(
    raw: list[float], temperatures: tuple[float, ...]
) -> None:
    calibrated = calibrate(raw, temperatures)
    assert all(0 < c <= 1 for c in calibrated)
    assert np.isfinite(calibrated).all()
    for c, before in zip(calibrated, raw, strict=True):
        assert (c > 0.5) <= (before > 0.5)
