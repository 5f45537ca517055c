"""Tags of slots: plans that read what they say pass, and each kind of mistake is told."""

from typing import Any

import pytest

from stagecoach.cache.memory_moves import MemoryMoves, Transfer
from stagecoach.cache.prefix_hash import PrefixDigest, prefix_digest
from stagecoach.runner.slot_tags import SlotTags
from stagecoach.schedule.step_plan import Comparison, Save, Segment, StepPlan, pack_page_table

pytestmark = pytest.mark.cpu

TOKENS = tuple(range(50, 90))


def segment(
    start: int,
    end: int,
    *,
    slots: tuple[int, int],
    replay: int = 0,
    num_drafts: int = 0,
    saves: tuple[Save, ...] = (),
    **changes: Any,
) -> Segment:
    """TOKENS [start, end) from the first slot to the second."""
    fields = {
        "request_id": 1,
        "epoch": 0,
        "start": start,
        "token_ids": TOKENS[start:end],
        "num_draft_tokens": num_drafts,
        "read_slot": slots[0],
        "replay": replay,
        "write_slot": slots[1],
        "saves": saves,
        "page_table": pack_page_table([1]),
        "sampling_row": 0 if num_drafts else None,
        "read_digest": prefix_digest(TOKENS[:start]),
    }
    return Segment(**(fields | changes))


class Steps:
    """Follows one plan after the other."""

    def __init__(self) -> None:
        self.tags = SlotTags()
        self._step = 0

    def run(self, *segments: Segment, **fields: Any) -> None:
        self._step += 1
        self.tags.follow(StepPlan(step=self._step, segments=segments, **fields))


@pytest.fixture
def steps() -> Steps:
    """Slot 2 holds the state after 9 tokens with 3 drafts recorded."""
    steps = Steps()
    steps.run(segment(0, 8, slots=(0, 2)))
    steps.run(segment(8, 12, slots=(2, 2), num_drafts=3))
    return steps


def test_a_digest_of_parts_is_that_of_the_whole() -> None:
    digest = PrefixDigest(TOKENS[:3])
    longer = digest.extended(TOKENS[3:9]).extended(()).extended(TOKENS[9:10])
    assert longer.digest() == prefix_digest(TOKENS[:10])
    assert digest.digest() == prefix_digest(TOKENS[:3])
    assert len({prefix_digest(TOKENS[:length]) for length in range(10)}) == 10


@pytest.mark.parametrize("replay", range(4))
def test_any_number_of_recorded_rows_may_be_folded_in(steps: Steps, replay: int) -> None:
    start = 9 + replay
    steps.run(segment(start, start + 2, slots=(2, 2), replay=replay))
    steps.run(segment(start + 2, start + 3, slots=(2, 2)))


def test_many_may_read_a_checkpoint(steps: Steps) -> None:
    steps.run(*(segment(11, 14, slots=(2, slot), replay=2) for slot in (3, 4, 5)))
    steps.run(*(segment(14, 15, slots=(slot, slot)) for slot in (3, 4, 5)))
    steps.run(segment(9, 15, slots=(2, 2)))


def test_another_request_with_the_same_tokens_may_read_it(steps: Steps) -> None:
    steps.run(segment(9, 12, slots=(2, 3), request_id=9, epoch=4))


def test_saves_of_a_chunk_and_of_a_window_with_replay(steps: Steps) -> None:
    """Inside the replayed rows, right behind them, and after the anchor."""
    saved = {10: 4, 11: 5, 12: 6}
    saves = tuple(Save(position, slot) for position, slot in saved.items())
    steps.run(segment(11, 13, slots=(2, 2), replay=2, num_drafts=1, saves=saves))
    for position, slot in saved.items():
        steps.run(segment(position, 17, slots=(slot, 7), saves=(Save(14, 8), Save(17, 9))))
        steps.run(segment(14, 15, slots=(8, 3)), segment(17, 18, slots=(9, 9)))
    # The record is left where it was.
    steps.run(segment(13, 14, slots=(2, 2), replay=1))


def test_tags_go_to_the_host_and_back_with_their_record(steps: Steps) -> None:
    steps.run(moves=MemoryMoves(store_slots=(Transfer(2, 7),), scrub_slots=(2,)))
    steps.run(
        segment(11, 14, slots=(5, 5), replay=2),
        moves=MemoryMoves(load_slots=(Transfer(5, 7),)),
    )


def test_equal_states_may_be_compared(steps: Steps) -> None:
    steps.run(segment(0, 11, slots=(0, 3)))
    steps.run(comparisons=(Comparison(2, 2, 3), Comparison(3, 0, 2, 2), Comparison(0, 0, 0)))


def test_without_a_digest_the_position_is_checked(steps: Steps) -> None:
    steps.run(segment(9, 12, slots=(2, 2), read_digest=b""))
    with pytest.raises(AssertionError, match="slot 2 holds the state after 12 tokens"):
        steps.run(segment(11, 13, slots=(2, 2), read_digest=b""))


MISTAKES = {
    "stale slot": segment(8, 10, slots=(2, 2)),
    "slot of nobody": segment(9, 10, slots=(6, 6)),
    "slot that was scrubbed": segment(4, 10, slots=(1, 1)),
    "replay forgotten": segment(11, 13, slots=(2, 2)),
    "one row too many": segment(11, 13, slots=(2, 2), replay=3),
    "one row too few": segment(11, 13, slots=(2, 2), replay=1),
    "more rows than there are": segment(13, 15, slots=(2, 2), replay=4),
    "other tokens": segment(9, 12, slots=(2, 2), read_digest=prefix_digest(TOKENS[1:10])),
    "a rejected draft": segment(
        11, 13, slots=(2, 2), replay=2, read_digest=prefix_digest((*TOKENS[:10], 3))
    ),
    "a zero slot with a history": segment(0, 3, slots=(0, 3), read_digest=prefix_digest((1,))),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_read_shows_the_plan_and_what_the_slot_holds(steps: Steps, name: str) -> None:
    steps.run(segment(0, 4, slots=(0, 1)))
    steps.run(moves=MemoryMoves(scrub_slots=(1,)))
    bad, good = MISTAKES[name], segment(0, 2, slots=(0, 8))
    with pytest.raises(AssertionError, match=f"^slot {bad.read_slot} holds ") as caught:
        steps.run(bad, good)
    told, *plan = str(caught.value).splitlines()
    assert f"wanted with {bad.replay} of them folded in: {bad.start} tokens" in told
    assert plan[-2].startswith("> request 1.0") and plan[-1].startswith("  request 1.0")
    if bad.read_slot == 2:
        assert "the state after 9 tokens" in told and "3 drafts recorded" in told
        assert prefix_digest(TOKENS[:9]).hex() in told


@pytest.mark.parametrize("planned", [10, 12])
def test_a_state_saved_one_row_off_is_found_when_it_is_read(steps: Steps, planned: int) -> None:
    steps.run(segment(9, 14, slots=(2, 2), saves=(Save(planned, 4),)))
    with pytest.raises(AssertionError, match=f"slot 4 holds the state after {planned} tokens"):
        steps.run(segment(11, 13, slots=(4, 5)))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"moves": MemoryMoves(store_slots=(Transfer(6, 0),))}, "slot 6 holds nothing"),
        ({"moves": MemoryMoves(load_slots=(Transfer(6, 3),))}, "host slot 3 holds nothing"),
        ({"comparisons": (Comparison(2, 1, 3),)}, "slot 3 holds the state after 11 tokens"),
        ({"comparisons": (Comparison(2, 2, 4),)}, "slot 4 holds the state after 11 tokens"),
        ({"comparisons": (Comparison(2, 4, 3),)}, "slot 2 holds the state after 9 tokens"),
        ({"comparisons": (Comparison(6, 0, 6),)}, "slot 6 holds nothing"),
    ],
)
def test_a_wrong_move_or_comparison_is_told(
    steps: Steps, fields: dict[str, Any], told: str
) -> None:
    other = tuple(token + 1 for token in TOKENS[:11])
    steps.run(segment(0, 11, slots=(0, 3)), segment(0, 11, slots=(0, 4), token_ids=other))
    with pytest.raises(AssertionError, match=told):
        steps.run(**fields)
