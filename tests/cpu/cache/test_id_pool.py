"""Numbers are handed out once, come back once, and can be counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.cache.id_pool import IdPool


def test_a_fresh_pool_hands_out_the_lowest_numbers_and_then_the_newest_freed() -> None:
    pool = IdPool("page", 1, 6)
    assert pool.take(3) == [1, 2, 3]
    pool.free([1, 3])
    assert pool.take(3) == [3, 1, 4]
    assert (pool.num_total, pool.num_free) == (5, 1)
    assert [pool.is_free(number) for number in range(1, 6)] == [False] * 4 + [True]
    assert pool.taken == bytes((1, 1, 1, 1, 0))


def test_more_than_there_is_is_refused_with_the_numbers() -> None:
    pool = IdPool("page", 1, 6)
    pool.take(4)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 of 5 free"):
        pool.take(2)


@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_number_that_is_free_or_reserved_cannot_be_freed(number: int) -> None:
    pool = IdPool("page", 1, 6)
    pool.take(1)
    with pytest.raises(AssertionError, match=f"page {number} freed while free"):
        pool.free([number])


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([[1]], r"3 free \+ 1 owned, 5 in all; lost: \[2\]"),
        ([[1, 2], [2]], r"owned twice: \[2\]"),
        ([[1, 2, 4]], r"owned and free: \[4\]"),
    ],
)
def test_check_integrity_names_what_is_wrong(owned: list[list[int]], message: str) -> None:
    pool = IdPool("page", 1, 6)
    pool.take(2)
    pool.check_integrity([[1], [2]])
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(owned)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=50))
def test_free_and_owned_make_the_total_after_any_traffic(events: list[tuple[bool, int]]) -> None:
    pool = IdPool("state slot", 1, 9)
    held: list[list[int]] = []
    for is_take, number in events:
        if is_take and number <= pool.num_free:
            held.append(pool.take(number))
        elif held:
            pool.free(held.pop(number % len(held)))
        pool.check_integrity(held)
    for numbers in held:
        pool.free(numbers)
    assert pool.num_free == pool.num_total == 8
    pool.check_integrity(())
