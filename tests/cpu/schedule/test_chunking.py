"""The arithmetic of chunks, cohorts and drafts, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.schedule.chunking import (
    DraftRoom,
    chunk_length,
    cohort_size,
    draft_budget,
    draft_limits,
    pages_for,
    share_evenly,
)


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "pages"),
    [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (7, 1, 7), (4096, 64, 64), (4097, 64, 65)],
)
def test_pages_for(num_tokens: int, block_size: int, pages: int) -> None:
    assert pages_for(num_tokens, block_size) == pages


@pytest.mark.parametrize(
    ("num_decoding", "num_stages", "size"),
    [(0, 2, 0), (1, 1, 1), (8, 1, 8), (1, 4, 1), (3, 2, 2), (4, 2, 2), (5, 4, 2), (8, 4, 2)],
)
def test_cohorts_of_all_plans_in_flight_hold_every_decoding_request(
    num_decoding: int, num_stages: int, size: int
) -> None:
    assert cohort_size(num_decoding, num_stages) == size


@pytest.mark.parametrize(
    ("num_remaining", "budget", "num_free_positions", "length"),
    [
        (10, 100, 100, 10),  # whole prompt
        (10, 3, 100, 3),  # cut by the budget, not rounded
        (10, 100, 7, 7),  # cut by the pages
        (10, 1, 100, 1),
        (10, 0, 100, 0),
        (10, 100, 0, 0),
        (10, 100, -3, 0),
        (1, 1, 1, 1),
    ],
)
def test_chunk_length(
    num_remaining: int, budget: int, num_free_positions: int, length: int
) -> None:
    assert (
        chunk_length(
            num_remaining=num_remaining, budget=budget, num_free_positions=num_free_positions
        )
        == length
    )


@pytest.mark.parametrize(
    ("budget", "num_chunk_tokens", "left"),
    [(10, 0, 10), (10, 3, 7), (10, 5, 5), (10, 99, 5), (9, 99, 4), (1, 1, 0), (1, 0, 1), (0, 9, 0)],
)
def test_drafts_leave_prompts_half_of_the_budget(
    budget: int, num_chunk_tokens: int, left: int
) -> None:
    assert draft_budget(budget, num_chunk_tokens) == left


@pytest.mark.parametrize(
    ("wanted", "total", "shares"),
    [
        ([], 5, []),
        ([3, 3, 3], 9, [3, 3, 3]),
        ([3, 3, 3], 100, [3, 3, 3]),
        ([3, 3, 3], 6, [2, 2, 2]),
        ([7, 1, 7], 9, [4, 1, 4]),  # what one does not want goes to the others
        ([7, 0, 7], 5, [2, 0, 3]),
        ([3, 3, 3], 0, [0, 0, 0]),
    ],
)
def test_share_evenly(wanted: list[int], total: int, shares: list[int]) -> None:
    assert share_evenly(wanted, total) == shares


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 60))
def test_shares_are_even_and_waste_nothing(wanted: list[int], total: int) -> None:
    shares = share_evenly(wanted, total)
    assert sum(shares) == min(total, sum(wanted))
    assert all(share <= want for share, want in zip(shares, wanted, strict=True))
    cut = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    assert not cut or max(shares) - min(cut) <= 1


@pytest.mark.parametrize(
    ("rooms", "budget", "num_spare_pages", "limits"),
    [
        ([(7, 3, 0)], 99, 2, [7]),
        ([(7, 3, 0)], 99, 1, [7]),  # one more page holds four
        ([(7, 2, 0)], 99, 1, [6]),
        ([(7, 3, 0)], 99, 0, [3]),
        ([(7, 0, 0)], 99, 0, [0]),
        ([(7, 3, 1)], 99, 1, [3]),  # the free page is promised to a senior
        ([(7, 3, 5)], 99, 1, [3]),
        ([(3, 3, 0), (3, 3, 0)], 99, 0, [3, 3]),
        ([(7, 3, 0), (7, 3, 0)], 99, 1, [7, 3]),  # pages go to whoever stands first
        ([(7, 3, 1), (7, 3, 0)], 99, 1, [3, 7]),
        ([(7, 9, 0), (7, 9, 0)], 6, 0, [3, 3]),
        ([(7, 3, 0), (7, 3, 0)], 6, 0, [3, 3]),  # a page is not taken for less
    ],
)
def test_draft_limits(
    rooms: list[tuple[int, int, int]], budget: int, num_spare_pages: int, limits: list[int]
) -> None:
    assert (
        draft_limits(
            [DraftRoom(*room) for room in rooms],
            budget=budget,
            num_spare_pages=num_spare_pages,
            block_size=4,
        )
        == limits
    )
