"""What moves between the cache and a request, and what the proof of it finds."""

import pytest

from stagecoach.cache.prefix_cache import PrefixCache
from stagecoach.request import Request, SamplingParams
from stagecoach.schedule.request_memory import LastState, RequestMemory, last_state, owner_of

PROMPT = (5, 6, 7, 8, 9)


def make_request() -> Request:
    return Request(
        request_id=3, prompt_token_ids=PROMPT, params=SamplingParams(), seed=0, max_tokens=8
    )


def make_memory(*, debug_poison: bool = True, is_enabled: bool = False) -> RequestMemory:
    cache = PrefixCache(
        num_pages=1 + 4,
        num_slots=1 + 2,
        block_size=4,
        is_enabled=is_enabled,
        debug_poison=debug_poison,
    )
    cache.begin_plan(0)
    return RequestMemory(cache, root=b"root", num_rows=2, block_size=4, checkpoint_interval=4)


def admitted(memory: RequestMemory) -> Request:
    request = make_request()
    memory.begin(request)
    memory.admit(request, memory.find(request))
    return request


@pytest.mark.parametrize(
    ("ends", "num_pages"), [((0,), 0), ((1,), 1), ((4,), 1), ((5,), 2), ((9, 5), 3), ((5, 9), 3)]
)
def test_cover_takes_what_is_missing_and_gives_nothing_back(
    ends: tuple[int, ...], num_pages: int
) -> None:
    memory = make_memory()
    request = admitted(memory)
    for end in ends:
        memory.cover(request, end)
    assert len(request.page_ids) == num_pages
    assert num_pages == memory.cache.num_pages - memory.cache.num_free_pages
    request.num_computed = 3
    assert memory.num_open_positions(request) == 4 * num_pages - 3


@pytest.mark.parametrize("debug_poison", [True, False])
def test_all_is_given_back_and_scrubbed_in_debug_mode(*, debug_poison: bool) -> None:
    memory = make_memory(debug_poison=debug_poison)
    request = admitted(memory)
    memory.cover(request, 6)
    memory.check_integrity([request])
    pages, slot = tuple(sorted(request.page_ids)), request.slot
    memory.release(request)
    assert (list(request.page_ids), request.slot, request.sampling_row) == ([], None, None)
    memory.check_integrity([])
    moves = memory.cache.take_moves()
    scrubbed = (moves.scrub_pages, moves.scrub_slots)
    assert scrubbed == ((pages, (slot,)) if debug_poison else ((), ()))


def test_what_is_not_finite_is_scrubbed_in_any_mode() -> None:
    memory = make_memory(debug_poison=False, is_enabled=True)
    request = admitted(memory)
    memory.cover(request, 5)
    memory.file(request, 5, is_window=False)
    request.num_computed, request.read_slot = 5, request.slot or 0
    pages, slot = tuple(sorted(request.page_ids)), request.slot
    memory.cache.withdraw(owner_of(3, 0))
    memory.discard(request)
    moves = memory.cache.take_moves()
    assert set(pages) <= {*moves.scrub_pages} and slot in moves.scrub_slots
    memory.check_integrity([])
    memory.cache.begin_plan(1)
    again = make_request()
    memory.begin(again)
    hit = memory.find(again)
    assert (hit.position, hit.num_found_tokens) == (0, 0)


def test_the_proof_finds_what_is_lost_and_tokens_without_a_page() -> None:
    memory = make_memory()
    request = admitted(memory)
    memory.cover(request, 4)
    with pytest.raises(AssertionError, match="page"):
        memory.check_integrity([])
    request.num_computed = 5
    with pytest.raises(AssertionError, match="without a page"):
        memory.check_integrity([request])


@pytest.mark.parametrize(
    ("num_outputs", "num_computed", "num_replay", "is_sampling", "state"),
    [
        (0, 3, 0, False, (3, 0)),  # between two chunks
        (0, 5, 0, True, (5, 0)),  # the last chunk is in flight
        (1, 5, 0, False, (5, 0)),
        (4, 8, 3, False, (8, 3)),  # a window at 5 with three accepted drafts
        (4, 12, 0, True, (9, 0)),  # its successor in flight: the drafts do not count
        (3, 8, 3, False, (7, 2)),  # cut: its third token was the last
        (2, 8, 3, False, (6, 1)),
        (1, 6, 1, False, (5, 0)),
    ],
)
def test_the_last_state_of_a_request(
    num_outputs: int, num_computed: int, num_replay: int, state: LastState, *, is_sampling: bool
) -> None:
    request = make_request()
    request.output_token_ids.extend([1] * num_outputs)
    request.num_computed, request.num_replay = num_computed, num_replay
    request.num_samples_in_flight = int(is_sampling)
    assert last_state(request) == state


def test_owners_are_told_apart() -> None:
    assert len({owner_of(3, 0), owner_of(3, 1), owner_of(4, 0)}) == 3
