"""What moves between the pools and a request, and what the proof of it finds."""

import pytest

from stagecoach.request import Request, SamplingParams
from stagecoach.schedule.request_memory import RequestMemory


def make_request() -> Request:
    return Request(
        request_id=3,
        prompt_token_ids=(5, 6, 7, 8, 9),
        params=SamplingParams(),
        seed=0,
        max_tokens=8,
    )


def make_memory(*, debug_poison: bool = True) -> RequestMemory:
    return RequestMemory(
        num_pages=1 + 4, num_slots=1 + 2, num_rows=2, block_size=4, debug_poison=debug_poison
    )


@pytest.mark.parametrize(
    ("ends", "num_pages"), [((0,), 0), ((1,), 1), ((4,), 1), ((5,), 2), ((9, 5), 3), ((5, 9), 3)]
)
def test_cover_takes_what_is_missing_and_gives_nothing_back(
    ends: tuple[int, ...], num_pages: int
) -> None:
    memory, request = make_memory(), make_request()
    for end in ends:
        memory.cover(request, end)
    assert len(request.page_ids) == num_pages == memory.pages.num_total - memory.pages.num_free
    request.num_computed = 3
    assert memory.num_open_positions(request) == 4 * num_pages - 3


@pytest.mark.parametrize("debug_poison", [True, False])
def test_all_is_given_back_and_remembered_as_dirty_in_debug_mode(*, debug_poison: bool) -> None:
    memory, request = make_memory(debug_poison=debug_poison), make_request()
    memory.admit(request)
    memory.cover(request, 6)
    memory.check_integrity([request])
    pages, slot = list(request.page_ids), request.slot
    memory.release(request)
    assert (list(request.page_ids), request.slot, request.sampling_row) == ([], None, None)
    memory.check_integrity([])
    assert memory.take_dirty() == ((pages, [slot]) if debug_poison else ([], []))
    assert memory.take_dirty() == ([], [])


def test_the_proof_finds_what_is_lost_and_tokens_without_a_page() -> None:
    memory, request = make_memory(), make_request()
    memory.admit(request)
    memory.cover(request, 4)
    with pytest.raises(AssertionError, match=r"pages: .*lost"):
        memory.check_integrity([])
    request.num_computed = 5
    with pytest.raises(AssertionError, match="without a page"):
        memory.check_integrity([request])
