"""The step plan checks itself, crosses processes unchanged, and reads back from its text."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.cache.memory_moves import MemoryMoves, PageCopy, Transfer
from stagecoach.request import SamplingParams, TokenLogprobs
from stagecoach.schedule.step_plan import (
    Comparison,
    RowResult,
    SamplingEntry,
    Save,
    Segment,
    StepPlan,
    StepResult,
    pack_page_table,
    plan_digest,
    unpack_page_table,
)


def make_segment(**changes: Any) -> Segment:
    fields: dict[str, Any] = {
        "request_id": 7,
        "epoch": 0,
        "start": 4,
        "token_ids": (11, 12, 13),
        "read_slot": 2,
        "write_slot": 2,
        "page_table": pack_page_table((5, 6)),
    }
    return Segment(**{**fields, **changes})


@st.composite
def segments(draw: st.DrawFn, slot: int) -> Segment:
    num_tokens = draw(st.integers(1, 5))
    start = draw(st.sampled_from([0, 1, 64, 100_000]))
    replay = draw(st.integers(0, 3)) if start else 0
    ids = st.integers(0, 2**31 - 1)
    num_draft_tokens = draw(st.sampled_from([0, num_tokens - 1]))
    is_window = num_tokens == 1 + num_draft_tokens
    replay = min(replay, start)
    first = start - replay if is_window else start
    positions = range(first + 1, start + num_tokens - num_draft_tokens + 1)
    sampling_rows = st.integers(0, 99)
    sampling_row = draw(sampling_rows if num_draft_tokens else st.none() | sampling_rows)
    return Segment(
        request_id=draw(st.integers(0, 2**63 - 1)),
        epoch=draw(st.integers(0, 9)),
        start=start,
        token_ids=tuple(draw(st.lists(ids, min_size=num_tokens, max_size=num_tokens))),
        num_draft_tokens=num_draft_tokens,
        read_slot=slot if start else 0,
        replay=replay,
        write_slot=slot,
        saves=tuple(
            Save(position, 1_000 * slot + position)
            for position in sorted(draw(st.sets(st.sampled_from(positions), max_size=2)))
        ),
        page_table=pack_page_table(draw(st.lists(st.integers(1, 2**31 - 1), max_size=4))),
        sampling_row=sampling_row,
        proposes=draw(st.booleans()) and sampling_row is not None,
        is_constrained=draw(st.booleans()) and sampling_row is not None,
        prompt_logprob_targets=tuple(draw(st.lists(ids, max_size=num_tokens))),
        num_prompt_logprobs=draw(st.integers(0, 20)),
    )


NUMBERS = st.integers(1, 2**31 - 1)


@st.composite
def moves(draw: st.DrawFn) -> MemoryMoves:
    """Any that do not contradict each other."""
    pages = draw(st.lists(NUMBERS, unique=True, max_size=9))
    slots = draw(st.lists(st.integers(10**6, 2**31), unique=True, max_size=4))
    hosts = draw(st.lists(NUMBERS, unique=True, min_size=13, max_size=13))
    return MemoryMoves(
        store_pages=tuple(map(Transfer, pages[:2], hosts[:2])),
        store_slots=tuple(map(Transfer, slots[:2], hosts[2:4])),
        scrub_pages=tuple(pages[1:4]),
        scrub_slots=tuple(slots[:3]),
        load_pages=tuple(map(Transfer, pages[3:5], hosts[4:6])),
        load_slots=tuple(map(Transfer, slots[2:4], hosts[6:8])),
        copies=tuple(map(PageCopy, pages[5:7], pages[7:9], hosts[8:10])),
    )


COMPARISONS = st.builds(Comparison, NUMBERS, st.integers(0, 7), NUMBERS, st.integers(0, 7))


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    drawn = [draw(segments(slot)) for slot in range(1, 1 + draw(st.integers(0, 4)))]
    drawn.sort(key=lambda segment: not segment.is_window)
    return StepPlan(
        step=draw(st.integers(0, 2**40)),
        segments=tuple(drawn),
        moves=draw(st.just(MemoryMoves()) | moves()),
        comparisons=tuple(draw(st.lists(COMPARISONS, max_size=2))),
    )


@given(plans())
def test_a_plan_reads_back_from_its_text(plan: StepPlan) -> None:
    assert StepPlan.parse(str(plan)) == plan


def make_chained(**changes: Any) -> Segment:
    return make_segment(**({"token_ids": (), "is_chained": True, "sampling_row": 4} | changes))


def test_a_chained_window_has_a_token_that_nobody_names() -> None:
    segment = make_chained()
    assert segment.is_window and (segment.num_tokens, segment.end) == (1, segment.start + 1)
    plan = StepPlan(step=3, segments=(segment,))
    assert str(plan).endswith("tokens chained") and StepPlan.parse(str(plan)) == plan
    assert StepPlan.decode(plan.encode()) == plan and plan.num_tokens == plan.num_samples == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (5,)},
        {"sampling_row": None},
        {"start": 0, "read_slot": 0},
        {"num_draft_tokens": 1},
        {"proposes": True},
        {"is_constrained": True},
        {"reports_logits": True},
        {"prompt_logprob_targets": (3,)},
        {"saves": (Save(5, 9),)},
    ],
)
def test_a_chained_window_is_nothing_more(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="chained"):
        make_chained(**changes)


@given(plans())
def test_a_plan_crosses_processes_unchanged(plan: StepPlan) -> None:
    decoded = StepPlan.decode(plan.encode())
    assert decoded == plan
    assert decoded.digest() == plan.digest() == plan_digest(plan.encode())


def test_admissions_and_poison_cross_processes_too() -> None:
    entry = SamplingEntry(
        row=1,
        request_id=7,
        params=SamplingParams(temperature=0.5, logit_bias={3: -1.0}, stop=("x",), seed=9),
        seed=9,
        stop_token_ids=(0, 4),
        num_prompt_tokens=3,
        token_ids=(1, 2, 3),
    )
    plan = StepPlan(
        step=3,
        segments=(make_segment(),),
        admissions=(entry,),
        moves=MemoryMoves(scrub_pages=(8, 9), scrub_slots=(4,)),
    )
    assert StepPlan.decode(plan.encode()) == plan


def test_a_result_crosses_processes_unchanged() -> None:
    logprob = TokenLogprobs(5, -0.25, 2, (4, 5), (-0.125, -0.25))
    row = RowResult(
        request_id=7,
        epoch=1,
        token_ids=(5,),
        draft_token_ids=(6, 7),
        confidences=(0.75, 0.5),
        logprobs=(logprob,),
        prompt_logprobs=(logprob,),
    )
    result = StepResult(step=3, digest=b"12345678", rows=(row,), forward_seconds=0.5)
    data = msgspec.msgpack.encode(result)
    assert msgspec.msgpack.decode(data, type=StepResult) == result


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 4},
        {"segments": (make_segment(token_ids=(11, 12, 14)),)},
        {"segments": (make_segment(page_table=pack_page_table((5, 7))),)},
        {"segments": (make_segment(sampling_row=0),)},
        {"moves": MemoryMoves(scrub_slots=(9,))},
    ],
)
def test_the_digest_tells_plans_apart(changes: dict[str, Any]) -> None:
    plan = StepPlan(step=3, segments=(make_segment(),))
    assert len(plan.digest()) == 8
    assert msgspec.structs.replace(plan, **changes).digest() != plan.digest()


def test_a_plan_is_frozen() -> None:
    plan = StepPlan(step=0, segments=(make_segment(),))
    with pytest.raises(AttributeError):
        plan.step = 1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        plan.segments[0].start = 0  # type: ignore[misc]


def test_spans_and_shapes() -> None:
    segment = make_segment()
    assert (segment.num_tokens, segment.end, segment.is_window) == (3, 7, False)
    assert segment.page_ids == (5, 6)
    assert make_segment(token_ids=(11,)).is_window
    assert make_segment(num_draft_tokens=2, sampling_row=0).is_window
    plan = StepPlan(
        step=0,
        segments=(
            make_segment(token_ids=(11,), sampling_row=0),
            make_segment(read_slot=3, write_slot=3),
        ),
    )
    assert (plan.num_tokens, plan.num_samples) == (4, 1)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_page_tables_are_int32_little_endian(page_ids: list[int]) -> None:
    table = pack_page_table(page_ids)
    assert table == b"".join(page.to_bytes(4, "little", signed=True) for page in page_ids)
    assert unpack_page_table(table) == tuple(page_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": -1}, "empty segment"),
        ({"token_ids": ()}, "empty segment"),
        ({"num_draft_tokens": 3}, "bad window"),
        ({"num_draft_tokens": -1}, "bad window"),
        ({"num_draft_tokens": 1, "sampling_row": 0}, "a chunk with drafts"),
        ({"num_draft_tokens": 2}, "not sampled"),
        ({"proposes": True}, "not sampled"),
        ({"is_constrained": True}, "not sampled"),
        ({"write_slot": 0}, "zero slot is never written"),
        ({"read_slot": 0}, "state and start disagree"),
        ({"start": 0}, "state and start disagree"),
        ({"replay": -1}, "bad replay"),
        ({"start": 0, "read_slot": 0, "replay": 1}, "bad replay"),
        ({"saves": (Save(4, 9),)}, "bad save"),
        ({"saves": (Save(8, 9),)}, "bad save"),
        # A chunk reads its replayed rows as one.
        ({"saves": (Save(4, 9),), "replay": 1}, "bad save"),
        ({"saves": (Save(3, 9),), "replay": 1, "token_ids": (11,)}, "bad save"),
        # What a draft leads to may not come true.
        ({"saves": (Save(6, 9),), "num_draft_tokens": 2, "sampling_row": 0}, "bad save"),
        ({"reports_logits": True}, "not sampled"),
        ({"prompt_logprob_targets": (1, 2, 3, 4)}, "bad targets"),
    ],
)
def test_a_wrong_segment_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        make_segment(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"start": 0, "read_slot": 0},
        {"replay": 3},
        {"num_draft_tokens": 2, "sampling_row": 0, "proposes": True},
        {"sampling_row": 0, "proposes": True},
        {"saves": (Save(5, 8), Save(7, 9))},
        {"saves": (Save(4, 9), Save(5, 8)), "replay": 1, "token_ids": (11,)},
        {"prompt_logprob_targets": (1, 2, 3)},
    ],
)
def test_a_right_segment_is_accepted(changes: dict[str, Any]) -> None:
    make_segment(**changes)


WINDOW = make_segment(request_id=1, token_ids=(11,), read_slot=3, write_slot=3)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ((make_segment(request_id=8),), "slot written twice"),
        ((make_segment(request_id=8, read_slot=2, write_slot=4),), "slot race"),
        ((make_segment(request_id=8, read_slot=4, write_slot=4, saves=(Save(5, 2),)),), "saved"),
        (
            (
                make_segment(request_id=8, read_slot=4, write_slot=4, saves=(Save(5, 9),)),
                make_segment(request_id=9, read_slot=5, write_slot=5, saves=(Save(5, 9),)),
            ),
            "slot saved twice",
        ),
        (
            (
                make_segment(request_id=8, read_slot=4, write_slot=4, saves=(Save(5, 9),)),
                make_segment(request_id=9, read_slot=9, write_slot=5),
            ),
            "slot race",
        ),
        ((WINDOW,), "windows come first"),
    ],
)
def test_a_wrong_plan_is_refused(others: tuple[Segment, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        StepPlan(step=3, segments=(make_segment(), *others))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"load_pages": (Transfer(4, 1), Transfer(4, 2))}, "loaded twice"),
        ({"load_slots": (Transfer(4, 1), Transfer(4, 1))}, "loaded twice"),
        ({"store_slots": (Transfer(4, 1), Transfer(5, 1))}, "stored over each other"),
        (
            {"store_pages": (Transfer(4, 1),), "load_pages": (Transfer(5, 1),)},
            "stored over before it is loaded",
        ),
        ({"scrub_slots": (0,)}, "writes what is zero"),
        ({"load_pages": (Transfer(0, 1),)}, "writes what is zero"),
        ({"copies": (PageCopy(4, 5, 1), PageCopy(6, 5, 1))}, "filled twice"),
        ({"copies": (PageCopy(4, 5, 1),), "load_pages": (Transfer(5, 1),)}, "filled twice"),
        ({"copies": (PageCopy(4, 5, 1), PageCopy(5, 6, 1))}, "copies what this plan fills"),
        ({"copies": (PageCopy(4, 4, 1),)}, "copies what this plan fills"),
        ({"copies": (PageCopy(4, 5, 1),), "scrub_pages": (4,)}, "copies what was scrubbed"),
        ({"copies": (PageCopy(4, 5, 0),)}, "bad copy"),
        ({"copies": (PageCopy(4, 0, 1),)}, "bad copy"),
    ],
)
def test_moves_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        MemoryMoves(**fields)


def test_what_a_segment_reads_or_saves_is_not_moved_over() -> None:
    with pytest.raises(AssertionError, match=r"reads nothing:(.|\n)*> request 7"):
        StepPlan(step=3, segments=(make_segment(),), moves=MemoryMoves(scrub_slots=(2,)))
    saving = make_segment(saves=(Save(5, 9),))
    loads = (Transfer(9, 1),)
    with pytest.raises(AssertionError, match="loads what it saves over"):
        StepPlan(step=3, segments=(saving,), moves=MemoryMoves(load_slots=loads))
    # Its old content goes to the host or is scrubbed, and then it is loaded: a slot that is read.
    moves = MemoryMoves(
        store_slots=(Transfer(2, 0),), scrub_slots=(2,), load_slots=(Transfer(2, 1),)
    )
    StepPlan(step=3, segments=(make_segment(),), moves=moves)


def test_moves_and_comparisons_are_in_the_text() -> None:
    plan = StepPlan(
        step=3,
        segments=(make_segment(),),
        moves=MemoryMoves(
            store_pages=(Transfer(4, 0), Transfer(5, 1)), copies=(PageCopy(6, 7, 3),)
        ),
        comparisons=(Comparison(8, 2, 9),),
    )
    head, moved, compared, segment = plan.marked(plan.segments[0]).splitlines()
    assert head == "step 3: 1 segments, 3 tokens" and segment.startswith("> request 7.0")
    assert moved == (
        "  moves  store pages 4:0,5:1 slots -  scrub pages - slots -  load pages - slots -  "
        "copy 6>7*3"
    )
    assert compared == "  compare 8+2 9+0"
    assert StepPlan.parse(plan.marked(plan.segments[0])) == plan


def test_many_may_read_one_checkpoint() -> None:
    StepPlan(
        step=3,
        segments=(
            make_segment(request_id=8, read_slot=9, write_slot=4),
            make_segment(request_id=9, read_slot=9, write_slot=5),
        ),
    )


def test_an_error_shows_the_plan_with_the_bad_line_marked() -> None:
    plan = StepPlan(step=3, segments=(WINDOW, make_segment()))
    head, first, second = plan.marked(plan.segments[1]).splitlines()
    assert head == "step 3: 2 segments, 4 tokens"
    assert first.startswith("  request 1.0  span [4,5)  drafts 0  state 3+0->3")
    assert second == (
        "> request 7.0  span [4,7)  drafts 0  state 2+0->2  saves -  pages 5,6  sample -  "
        "masks -  propose -  targets - top 0  tokens 11,12,13"
    )
    racing = make_segment(request_id=8, read_slot=2, write_slot=4)
    with pytest.raises(AssertionError, match=r"\n> request 8\.0  span \[4,7\)"):
        StepPlan(step=3, segments=(make_segment(), racing))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage 3: 1 segments, 3 tokens", "not a step plan"),
        ("step 3: 1 segments, 3 tokens\n  request 7.0  span [4,7)", "not a segment"),
        ("step 3: 1 segments, 3 tokens\n  moves  store pages 4", "not moves of memory"),
        ("step 3: 1 segments, 3 tokens\n  compare 4 5", "not a comparison"),
    ],
)
def test_other_text_is_not_a_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepPlan.parse(text)
