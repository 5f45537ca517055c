"""Bounds of a window, its row, and where the next segment stands, by hand and at random."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.schedule.step_plan import Segment, pack_page_table
from stagecoach.schedule.verify_window import VerifyWindow, can_use_proposal, most_drafts


def make_segment(start: int, token_ids: tuple[int, ...], **fields: Any) -> Segment:
    return Segment(
        request_id=3,
        epoch=0,
        start=start,
        token_ids=token_ids,
        read_slot=1 if start else 0,
        write_slot=1,
        page_table=pack_page_table((1,)),
        sampling_row=0,
        **fields,
    )


@pytest.mark.parametrize(
    ("segment", "window"),
    [
        (make_segment(4, (9, 5, 6), num_draft_tokens=2), VerifyWindow(4, (5, 6))),
        (make_segment(4, (9, 5, 6), num_draft_tokens=2, replay=3), VerifyWindow(4, (5, 6))),
        (make_segment(4, (9,)), VerifyWindow(4, ())),
        (make_segment(0, (5, 6, 7)), VerifyWindow(2, ())),  # a last chunk ends in one
        (make_segment(2, (7,)), VerifyWindow(2, ())),
    ],
)
def test_a_sampling_segment_ends_in_a_window(segment: Segment, window: VerifyWindow) -> None:
    """I19: it opens with the anchor, the last certain token, and ends with its last draft."""
    assert VerifyWindow.of(segment) == window
    assert window.end == segment.end


@pytest.mark.parametrize(
    ("drafts", "samples", "row"),
    [
        ((), (7,), (7,)),
        ((5, 6), (7, 6, 8), (7,)),  # a draft behind a rejected one never counts
        ((5, 6), (5, 7, 8), (5, 7)),
        ((5, 6), (5, 6, 8), (5, 6, 8)),
        ((5, 5), (5, 5, 5), (5, 5, 5)),
    ],
)
def test_row(drafts: tuple[int, ...], samples: tuple[int, ...], row: tuple[int, ...]) -> None:
    assert VerifyWindow(4, drafts).row(samples) == row


@pytest.mark.parametrize("samples", [(), (5,), (5, 6), (5, 6, 7, 8)])
def test_a_sample_behind_each_token_of_the_window_and_no_more(samples: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="behind VerifyWindow"):
        VerifyWindow(4, (5, 6)).row(samples)


few_tokens = st.integers(0, 2)


@given(
    num_tokens=st.integers(1, 50),
    drafts=st.lists(few_tokens, max_size=7),
    table=st.lists(few_tokens, min_size=8, max_size=8),
)
def test_a_row_is_what_plain_decoding_gives(
    num_tokens: int, drafts: list[int], table: list[int]
) -> None:
    """I17, I23, I27: for any drafts, and N grows by exactly what the row holds.

    The target's next token is `table`'s at the number of drafts before, shifted by their sum, so
    that it depends on every one of them.
    """

    def plain(before: list[int]) -> int:
        return (table[len(before)] + sum(before)) % 3

    window = VerifyWindow(num_tokens - 1, tuple(drafts))
    row = window.row([plain(drafts[:count]) for count in range(len(drafts) + 1)])
    expected: list[int] = []
    while len(expected) < len(row):
        expected.append(plain(expected))
    assert list(row) == expected
    assert len(row) == len(drafts) + 1 or row[-1] != drafts[len(row) - 1]
    standing = window.standing(row)
    num_bonus, num_rejected = len(row) - 1, window.end - window.start - len(row)
    assert standing.num_computed == num_tokens + len(row) - 1 == window.end - num_rejected
    assert standing.num_replay == num_bonus


@pytest.mark.parametrize("row", [(), (5, 6, 7, 8), (6, 7), (5, 7, 8)])
def test_a_row_that_the_window_cannot_return_is_fatal(row: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="row"):
        VerifyWindow(4, (5, 6)).standing(row)


@pytest.mark.parametrize(
    ("num_at_hand", "num_left", "most"),
    [(7, 100, 7), (7, 8, 7), (7, 7, 6), (7, 2, 1), (7, 1, 0), (0, 100, 0), (3, 9, 3)],
)
def test_most_drafts(num_at_hand: int, num_left: int, most: int) -> None:
    assert most_drafts(num_at_hand=num_at_hand, num_left=num_left) == most


@given(num_left=st.integers(1, 20), num_row_tokens=st.integers(1, 20))
def test_a_proposal_is_made_exactly_if_some_row_leaves_use_for_it(
    num_left: int, num_row_tokens: int
) -> None:
    is_of_use = most_drafts(num_at_hand=1, num_left=num_left - num_row_tokens) > 0
    assert can_use_proposal(num_left) or not is_of_use
    if num_row_tokens == 1:
        assert can_use_proposal(num_left) == is_of_use
