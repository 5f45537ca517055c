"""Rolling acceptance: rates by place, payoff of rounds, and the sign of a broken draft."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.schedule.acceptance import FirstDrafts, Payoff, PlaceRates

pytestmark = pytest.mark.cpu


def test_a_place_is_tried_only_if_all_before_it_are_accepted() -> None:
    rates = PlaceRates(4, memory=1e9)
    for _ in range(1000):
        rates.note(3, 1)
    first, second, third, fourth = rates.blended([0.5] * 4)
    assert first > 0.99 and second < 0.01
    assert (third, fourth) == (0.5, 0.5), "nothing is known of a place that was never tried"


def test_rates_start_at_those_of_all_and_leave_them_with_evidence() -> None:
    shared = [0.9, 0.8]
    rates = PlaceRates(2, memory=16)
    assert rates.blended(shared) == pytest.approx(shared)
    values = []
    for _ in range(30):
        rates.note(2, 0)
        values.append(rates.blended(shared)[0])
    assert values == sorted(values, reverse=True) and 0 < values[-1] < 0.15


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_rates_are_rates(windows: list[tuple[int, int]]) -> None:
    rates = PlaceRates(5, memory=8)
    for num_drafts, num_accepted in windows:
        rates.note(num_drafts, min(num_accepted, num_drafts))
    assert all(0 <= rate <= 1 for rate in rates.blended())


def test_the_memory_of_a_payoff_fades() -> None:
    payoff = Payoff(memory=8)
    assert (payoff.mean_tokens, payoff.mean_drafts, payoff.num_rounds) == (1, 0, 0)
    for _ in range(100):
        payoff.note(7, 5)
    assert (payoff.mean_tokens, payoff.mean_drafts) == pytest.approx((6, 7))
    assert 7.9 < payoff.num_rounds < 8 and payoff.novelty < 0.01
    for _ in range(12):
        payoff.note(2, 0)
    assert payoff.mean_tokens < 2.1 and payoff.mean_drafts < 3.1


def test_a_payoff_that_restarts_keeps_no_round_and_is_no_novelty() -> None:
    payoff = Payoff(memory=8)
    for _ in range(5):
        payoff.note(7, 0)
    novelty = payoff.novelty
    payoff.restart()
    payoff.note(3, 3)
    assert (payoff.mean_tokens, payoff.mean_drafts, payoff.num_rounds) == (4, 3, 1)
    assert payoff.novelty < novelty < 1


def test_a_draft_is_broken_when_no_first_draft_of_several_requests_stands() -> None:
    drafts = FirstDrafts()
    seen = [drafts.note(window % 3, is_accepted=False) for window in range(24)]
    assert seen == [False] * 23 + [True]
    assert "24 windows" in drafts.describe()


def test_one_hard_text_is_not_a_broken_draft() -> None:
    drafts = FirstDrafts()
    assert not any(drafts.note(window % 2, is_accepted=False) for window in range(200))


def test_a_first_draft_that_stands_clears_the_suspicion() -> None:
    drafts = FirstDrafts()
    for window in range(20):
        drafts.note(window, is_accepted=False)
    assert not drafts.note(20, is_accepted=True)
    assert not any(drafts.note(window, is_accepted=False) for window in range(95))
    assert drafts.note(95, is_accepted=False)


def test_hard_texts_all_day_are_not_a_broken_draft() -> None:
    """One first draft of seven stands; by chance there are runs of dozens that do not."""
    noise = random.Random(5)
    drafts = FirstDrafts()
    assert not any(drafts.note(w % 9, is_accepted=noise.random() < 1 / 7) for w in range(20_000))
