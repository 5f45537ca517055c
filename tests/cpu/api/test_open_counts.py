"""One limit for all API processes, whichever of them the clients reached."""

import multiprocessing
from typing import Any

import pytest

from stagecoach.api.error_body import QueueFullError
from stagecoach.api.open_counts import OpenCounts, shared_numbers
from stagecoach.errors import RequestError


def test_each_process_adds_and_all_see_the_sum() -> None:
    numbers = shared_numbers(3)
    processes = [OpenCounts(numbers, place) for place in range(3)]
    for place, counts in enumerate(processes):
        counts.add(1, 10 + place)
    assert {(counts.num_requests, counts.num_completions) for counts in processes} == {(3, 33)}
    processes[1].clear()
    assert (processes[0].num_requests, processes[2].num_completions) == (2, 22)
    processes[0].add(-1, -10)
    assert (processes[1].num_requests, processes[1].num_completions) == (1, 12)


def test_one_that_is_full_is_full_for_all() -> None:
    numbers = shared_numbers(2)
    here, there = OpenCounts(numbers, 0), OpenCounts(numbers, 1)
    there.add(1, 5)
    here.check_room(3, 8)
    with pytest.raises(QueueFullError, match="5 completions are open"):
        here.check_room(4, 8)
    with pytest.raises(RequestError, match="9 completions in one request"):
        here.check_room(9, 8)


def _add(numbers: Any) -> None:
    OpenCounts(numbers, 1).add(2, 3)


def test_the_numbers_reach_another_process() -> None:
    numbers = shared_numbers(2)
    process = multiprocessing.get_context("fork").Process(target=_add, args=(numbers,))
    process.start()
    process.join()
    assert (OpenCounts(numbers, 0).num_requests, OpenCounts(numbers, 0).num_completions) == (2, 3)


def test_alone_it_counts_itself() -> None:
    counts = OpenCounts()
    counts.add(1, 4)
    assert (counts.num_requests, counts.num_completions) == (1, 4)
