"""The arithmetic of chunks and cohorts, as tables."""

import pytest

from stagecoach.schedule.chunking import chunk_length, cohort_size, pages_for


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
