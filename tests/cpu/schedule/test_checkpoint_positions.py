"""Which rungs a segment passes, what they may take, and how deep a hit may be."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.cache.prefix_cache import Claim
from stagecoach.schedule.checkpoint_positions import (
    Ladder,
    demanded_position,
    grid_interval,
    hit_limit,
)


@pytest.mark.parametrize(
    ("first", "last", "rungs"),
    [
        (0, 7, []),
        (0, 8, [(8, Claim.PROBATION)]),  # seen before, so more than a vacant slot
        (8, 15, [(12, Claim.ANY)]),
        (8, 16, [(12, Claim.ANY), (16, Claim.PROBATION)]),
        (16, 24, [(21, Claim.PROBATION), (24, Claim.VACANT)]),
        (21, 23, []),
        (33, 40, [(40, Claim.VACANT)]),
        (24, 33, [(32, Claim.PROBATION)]),  # in the answer
        (
            0,
            21,
            [(12, Claim.ANY), (21, Claim.PROBATION), (8, Claim.PROBATION), (16, Claim.PROBATION)],
        ),
    ],
)
def test_rungs_of_a_span(first: int, last: int, rungs: list[tuple[int, Claim]]) -> None:
    ladder = Ladder(interval=8, prompt_end=21, demand=12, num_found_tokens=15)
    assert ladder.rungs(first, last) == rungs


def test_the_strongest_claim_counts_where_rungs_meet() -> None:
    assert Ladder(8, prompt_end=8).rungs(0, 8) == [(8, Claim.PROBATION)]
    ladder = Ladder(8, prompt_end=8, demand=8, num_found_tokens=8)
    assert ladder.rungs(0, 8) == [(8, Claim.ANY)]


def test_a_long_new_prompt_asks_for_few_slots_that_others_have() -> None:
    rungs = Ladder(8, prompt_end=0).rungs(0, 8 * 100)
    wanted = [position // 8 for position, claim in rungs if claim is Claim.PROBATION]
    assert len(rungs) == 100 and wanted == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(("prompt_end", "grid"), [(7, [16]), (5, [16]), (4, [8, 16]), (8, [16])])
def test_the_grid_leaves_out_what_the_prompts_end_all_but_is(
    prompt_end: int, grid: list[int]
) -> None:
    positions = [position for position, _ in Ladder(8, prompt_end, page_size=4).rungs(0, 16)]
    assert positions == [prompt_end, *grid]


def test_without_a_grid_the_other_rungs_are_left() -> None:
    assert Ladder(0, prompt_end=9).rungs(0, 100) == [(9, Claim.PROBATION)]


@given(
    interval=st.integers(0, 9),
    prompt_end=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_each_rung_falls_into_one_span_however_a_prompt_is_cut(
    interval: int, prompt_end: int, cuts: list[int]
) -> None:
    """I64: where chunks end changes nothing about what is kept."""
    ladder = Ladder(interval, prompt_end)
    ends = [0, *sorted(cuts), 40]
    pieces = [rung for a, b in pairwise(ends) for rung in ladder.rungs(a, b)]
    assert dict(pieces) == dict(ladder.rungs(0, 40)) and len(pieces) == len(dict(pieces))
    assert all(0 < position <= 40 for position, _ in pieces)


@pytest.mark.parametrize(("interval", "rounded"), [(0, 0), (1, 16), (16, 16), (17, 32), (512, 512)])
def test_the_grid_has_whole_pages(interval: int, rounded: int) -> None:
    """I75."""
    assert grid_interval(interval, 16) == rounded


@pytest.mark.parametrize(
    ("found", "hit", "limit", "position"),
    [
        (0, 0, 30, 0),
        (16, 0, 30, 16),
        (16, 8, 30, 16),
        (16, 16, 30, 0),
        (16, 19, 30, 0),
        (32, 0, 31, 28),  # never the whole prompt
        (32, 28, 31, 0),
        (3, 0, 30, 0),
    ],
)
def test_pages_without_a_state_ask_for_one(found: int, hit: int, limit: int, position: int) -> None:
    demanded = demanded_position(num_found_tokens=found, hit=hit, limit=limit, block_size=4)
    assert demanded == position


@pytest.mark.parametrize(
    ("num_tokens", "num_prompt_logprobs", "skips", "limit"),
    [
        (10, None, False, 9),
        (10, None, True, 0),
        (13, None, False, 12),  # after a preemption
        (10, 0, False, 0),
        (10, 4, False, 4),
        (13, 8, False, 8),
        (13, 9, False, 12),  # all prompt logprobs are delivered: no row is needed for them
        (1, None, False, 0),
    ],
)
def test_hit_limit(
    num_tokens: int, num_prompt_logprobs: int | None, limit: int, *, skips: bool
) -> None:
    answer = hit_limit(
        num_tokens=num_tokens,
        num_prompt_tokens=min(num_tokens, 10),
        num_prompt_logprobs=num_prompt_logprobs,
        skips_reading=skips,
    )
    assert answer == limit
