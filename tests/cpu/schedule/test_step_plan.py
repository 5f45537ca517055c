"""The step plan checks itself, crosses processes unchanged, and reads back from its text."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.request import SamplingParams, TokenLogprobs
from stagecoach.schedule.step_plan import (
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
    end = start + num_tokens
    positions = range(max(0, start - replay) + 1, end + 1)
    num_draft_tokens = draw(st.sampled_from([0, num_tokens - 1]))
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
        prompt_logprob_targets=tuple(draw(st.lists(ids, max_size=num_tokens))),
        num_prompt_logprobs=draw(st.integers(0, 20)),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    drawn = [draw(segments(slot)) for slot in range(1, 1 + draw(st.integers(0, 4)))]
    drawn.sort(key=lambda segment: not segment.is_window)
    return StepPlan(step=draw(st.integers(0, 2**40)), segments=tuple(drawn))


@given(plans())
def test_a_plan_reads_back_from_its_text(plan: StepPlan) -> None:
    assert StepPlan.parse(str(plan)) == plan


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
        poison_pages=(8, 9),
        poison_slots=(4,),
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
        {"poison_slots": (9,)},
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
        ({"write_slot": 0}, "zero slot is never written"),
        ({"read_slot": 0}, "state and start disagree"),
        ({"start": 0}, "state and start disagree"),
        ({"replay": -1}, "bad replay"),
        ({"start": 0, "read_slot": 0, "replay": 1}, "bad replay"),
        ({"saves": (Save(4, 9),)}, "bad save"),
        ({"saves": (Save(8, 9),)}, "bad save"),
        ({"saves": (Save(3, 9),), "replay": 1}, "bad save"),
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
        {"saves": (Save(4, 9),), "replay": 1},
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
        "propose -  targets - top 0  tokens 11,12,13"
    )
    racing = make_segment(request_id=8, read_slot=2, write_slot=4)
    with pytest.raises(AssertionError, match=r"\n> request 8\.0  span \[4,7\)"):
        StepPlan(step=3, segments=(make_segment(), racing))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage 3: 1 segments, 3 tokens", "not a step plan"),
        ("step 3: 1 segments, 3 tokens\n  request 7.0  span [4,7)", "not a segment"),
    ],
)
def test_other_text_is_not_a_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepPlan.parse(text)
