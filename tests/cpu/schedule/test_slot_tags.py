"""Tags of slots: each wrong read, save, move and donation is caught when the plan is made."""

from collections.abc import Sequence
from typing import Any

import pytest

from stagecoach.cache.memory_moves import MemoryMoves, Transfer
from stagecoach.cache.prefix_cache import PrefixCache
from stagecoach.cache.prefix_hash import BlockChain
from stagecoach.request import Request, SamplingParams
from stagecoach.schedule.slot_tags import Admission, SlotTags
from stagecoach.schedule.step_plan import Comparison, Save, Segment, StepPlan, pack_page_table
from tests.cpu.schedule.fake_executor import LONG, Harness, Limits, prompt

BLOCK_SIZE = 4
TOKENS = tuple(range(100, 130))


def chain_of(token_ids: Sequence[int], root: bytes = b"root") -> BlockChain:
    return BlockChain(root, BLOCK_SIZE, lambda start, end: tuple(token_ids[start:end]))


CHAIN = chain_of(TOKENS)


def make_tags() -> SlotTags:
    return SlotTags(BLOCK_SIZE)


def segment(
    start: int,
    end: int,
    *,
    request_id: int = 1,
    epoch: int = 0,
    read: int = 1,
    write: int = 1,
    replay: int = 0,
    num_drafts: int = 0,
    saves: tuple[Save, ...] = (),
) -> Segment:
    return Segment(
        request_id=request_id,
        epoch=epoch,
        start=start,
        token_ids=TOKENS[start:end],
        num_draft_tokens=num_drafts,
        read_slot=read if start else 0,
        replay=replay,
        write_slot=write,
        saves=saves,
        page_table=pack_page_table([1]),
        sampling_row=0 if num_drafts else None,
    )


def run(
    tags: SlotTags,
    *segments: Segment,
    chain: BlockChain = CHAIN,
    moves: MemoryMoves | None = None,
    comparisons: tuple[Comparison, ...] = (),
) -> None:
    plan = StepPlan(
        step=9, segments=segments, moves=moves or MemoryMoves(), comparisons=comparisons
    )
    tags.run(plan, [chain] * len(segments))


def holder(request_id: int = 1, epoch: int = 0, slot: int = 1) -> Request:
    request = Request(
        request_id=request_id,
        prompt_token_ids=TOKENS,
        params=SamplingParams(),
        seed=0,
        max_tokens=1,
        epoch=epoch,
    )
    request.slot = slot
    return request


def after_prefill(end: int = 10, **options: int) -> SlotTags:
    tags = make_tags()
    run(tags, segment(0, end, **options))
    return tags


def test_a_request_goes_on_where_it_stood() -> None:
    tags = after_prefill()
    run(tags, segment(10, 14))
    run(tags, segment(14, 18, num_drafts=3))
    run(tags, segment(17, 20, replay=2))
    tag = tags.tag(1)
    assert tag is not None and (tag.position, tag.num_recorded) == (20, 0)
    assert tag.identity == Admission(1, 0)


@pytest.mark.parametrize(
    ("wrong", "held"),
    [
        (segment(11, 14), "the state after 10 tokens of request 1.0"),
        (segment(9, 14), "the state after 10 tokens of request 1.0"),
        (segment(11, 14, replay=1), "the state after 10 tokens of request 1.0"),
        (segment(10, 14, request_id=2), "the state after 10 tokens of request 1.0"),
        (segment(10, 14, epoch=1), "the state after 10 tokens of request 1.0"),
        (segment(10, 14, read=3), "nothing"),
    ],
    ids=["ahead", "behind", "a row too many", "a stranger", "an older admission", "never written"],
)
def test_a_wrong_read_names_the_plan_the_slot_and_both_states(wrong: Segment, held: str) -> None:
    tags = after_prefill()
    with pytest.raises(AssertionError) as caught:
        run(tags, wrong)
    text = str(caught.value)
    wanted = f"wanted is the state after {wrong.start - wrong.replay} tokens"
    assert f"step 9: slot {wrong.read_slot} holds {held}; {wanted}" in text
    assert f"> request {wrong.request_id}.{wrong.epoch}" in text


def test_drafts_that_were_rejected_stay_in_the_record() -> None:
    """The replay of a window is any number of its rows, and no more than it has."""
    for replay in range(4):
        tags = after_prefill()
        run(tags, segment(10, 14, num_drafts=3))
        run(tags, segment(11 + replay, 20, replay=replay))
    tags = after_prefill()
    run(tags, segment(10, 14, num_drafts=3))
    with pytest.raises(AssertionError, match=r"and 3 recorded rows of request 1\.0"):
        run(tags, segment(15, 20, replay=4))


def test_a_save_is_read_by_whoever_has_the_same_tokens() -> None:
    tags = make_tags()
    run(tags, segment(0, 20, saves=(Save(13, 5),)))
    run(tags, segment(13, 16, request_id=2, read=5, write=2), chain=chain_of(TOKENS[:16]))
    run(tags, segment(16, 18, request_id=2, read=2, write=2))


@pytest.mark.parametrize(
    ("start", "chain"),
    [
        (12, CHAIN),
        (14, CHAIN),
        (13, chain_of((0, *TOKENS[1:]))),
        (13, chain_of((*TOKENS[:12], 0, *TOKENS[13:]))),
        (13, chain_of(TOKENS, root=b"another salt")),
    ],
    ids=["one early", "one late", "another block", "another tail", "another salt"],
)
def test_a_save_is_read_by_nobody_else(start: int, chain: BlockChain) -> None:
    tags = make_tags()
    run(tags, segment(0, 20, saves=(Save(13, 5),)))
    with pytest.raises(AssertionError, match="slot 5 holds the state after 13 tokens of prefix"):
        run(tags, segment(start, 20, request_id=2, read=5, write=2), chain=chain)


def test_a_donated_slot_is_read_with_its_replay() -> None:
    tags = after_prefill()
    run(tags, segment(10, 14, num_drafts=3))
    tags.file(holder(), 13, 2, CHAIN)
    run(tags, segment(13, 15, request_id=2, replay=2, write=2))
    with pytest.raises(AssertionError, match="slot 1 holds the state after 11 tokens and 2 rec"):
        run(tags, segment(12, 15, request_id=3, replay=1, write=3))


@pytest.mark.parametrize(
    ("position", "replay", "owner"),
    [
        (13, 1, {}),
        (12, 2, {}),
        (15, 4, {}),
        (13, 2, {"epoch": 1}),
        (13, 2, {"request_id": 2}),
        (13, 2, {"slot": 2}),
    ],
)
def test_only_what_a_request_has_is_filed(
    position: int, replay: int, owner: dict[str, int]
) -> None:
    tags = after_prefill()
    run(tags, segment(10, 14, num_drafts=3))
    with pytest.raises(AssertionError, match=r"slot \d is filed as .*; it holds "):
        tags.file(holder(**owner), position, replay, CHAIN)


def test_tags_travel_to_the_host_and_back() -> None:
    tags = make_tags()
    run(tags, segment(0, 20, saves=(Save(13, 5),)))
    run(
        tags,
        segment(0, 8, request_id=2, write=5),
        moves=MemoryMoves(store_slots=(Transfer(5, 1),)),
    )
    run(
        tags,
        segment(13, 16, request_id=3, read=4, write=4),
        moves=MemoryMoves(load_slots=(Transfer(4, 1),)),
    )
    with pytest.raises(AssertionError, match=r"slot 5 holds .* 8 tokens of request 2\.0"):
        run(tags, segment(13, 16, request_id=3, read=5, write=5))


def test_only_checkpoints_go_to_the_host_and_only_what_is_there_comes_back() -> None:
    tags = after_prefill()
    with pytest.raises(AssertionError, match="slot 1 goes to the host and is no checkpoint"):
        run(tags, moves=MemoryMoves(store_slots=(Transfer(1, 0),)))
    with pytest.raises(AssertionError, match="host slot 0 holds nothing"):
        run(tags, moves=MemoryMoves(load_slots=(Transfer(1, 0),)))


def test_what_is_scrubbed_is_read_by_nobody() -> None:
    tags = make_tags()
    run(tags, segment(0, 20, saves=(Save(13, 5),)))
    run(tags, moves=MemoryMoves(scrub_slots=(5,)))
    with pytest.raises(AssertionError, match="slot 5 holds nothing"):
        run(tags, segment(13, 16, request_id=2, read=5, write=2))


def test_only_states_of_one_position_are_compared() -> None:
    tags = make_tags()
    run(tags, segment(0, 20, saves=(Save(13, 5),)))
    run(tags, segment(0, 13, request_id=2, write=2))
    run(tags, comparisons=(Comparison(5, 0, 2),))
    for wrong in (Comparison(5, 0, 1), Comparison(5, 1, 2), Comparison(5, 0, 6)):
        with pytest.raises(AssertionError, match="compare"):
            run(tags, comparisons=(wrong,))


CACHED = Limits(has_prefix_cache=True, num_checkpoint_slots=3, num_draft_tokens=3)


def warm_harness() -> Harness:
    harness = Harness(CACHED, debug_poison=False)
    harness.add(prompt(12), SamplingParams(max_tokens=1, ignore_eos=True))
    harness.finish()
    return harness


def test_a_hit_that_reads_another_checkpoint_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same position, and of other tokens."""
    harness = warm_harness()
    harness.add(prompt(12, first=3), SamplingParams(max_tokens=1, ignore_eos=True))
    plan = harness.launch()
    assert plan is not None
    save = plan.segments[0].saves[-1]
    harness.finish()
    adopt = PrefixCache.adopt

    def adopt_wrongly(self: PrefixCache, *arguments: Any, **options: Any) -> Any:
        return adopt(self, *arguments, **options)._replace(read_slot=save.slot)

    monkeypatch.setattr(PrefixCache, "adopt", adopt_wrongly)
    harness.add(prompt(12), LONG)
    with pytest.raises(AssertionError, match=rf"slot {save.slot} holds the state after 11 tokens"):
        harness.scheduler.plan()


def test_a_hit_one_token_too_deep_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = warm_harness()
    find = PrefixCache.find

    def find_too_deep(self: PrefixCache, chain: BlockChain, limit: int) -> Any:
        hit = find(self, chain, limit)
        return hit._replace(position=hit.position + 1)

    monkeypatch.setattr(PrefixCache, "find", find_too_deep)
    harness.add(prompt(14), LONG)
    with pytest.raises(AssertionError, match=r"holds the state after 1\d tokens of prefix"):
        harness.scheduler.plan()


def test_a_forgotten_replay_is_no_plan() -> None:
    harness = Harness(Limits(num_draft_tokens=3), debug_poison=False)
    request = harness.add(prompt(6), LONG)
    while not request.num_replay:
        harness.launch()
        harness.commit()
    request.num_replay -= 1
    with pytest.raises(AssertionError, match="recorded rows of request 100"):
        harness.scheduler.plan()
