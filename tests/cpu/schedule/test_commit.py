"""What a row commits: stop conditions in their order, cuts, and what is told."""

from typing import Any

import pytest

from stagecoach.request import FinishReason, Request, SamplingParams, TokenLogprobs
from stagecoach.schedule.commit import Progress, apply_row, cut_row
from stagecoach.schedule.step_plan import RowResult, Segment, pack_page_table

EOS_TOKEN_IDS = frozenset({0, 1})
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("row", "num_outputs", "params", "expected"),
    [
        ((5,), 0, {}, ((5,), None, None)),
        ((5, 6, 7), 0, {}, ((5, 6, 7), None, None)),
        ((0,), 0, {}, ((0,), STOP, None)),
        ((1,), 3, {}, ((1,), STOP, None)),
        ((5, 0, 6), 0, {}, ((5, 0), STOP, None)),  # cut after the first stop
        ((0,), 0, {"ignore_eos": True}, ((0,), None, None)),
        ((5, 9, 6), 0, {"stop_token_ids": (9,)}, ((5, 9), STOP, 9)),
        ((0,), 0, {"stop_token_ids": (0,)}, ((0,), STOP, None)),  # end-of-sequence comes first
        ((0,), 0, {"stop_token_ids": (0,), "ignore_eos": True}, ((0,), STOP, 0)),
        ((5,), 7, {}, ((5,), LENGTH, None)),
        ((5, 6, 7), 6, {}, ((5, 6), LENGTH, None)),  # cut at max_tokens
        ((0,), 7, {}, ((0,), STOP, None)),  # a stop at the last place is a stop
        ((0, 5), 0, {"min_tokens": 1}, ((0, 5), None, None)),
        ((5, 0), 0, {"min_tokens": 1}, ((5, 0), STOP, None)),
        ((9,), 2, {"min_tokens": 3, "stop_token_ids": (9,)}, ((9,), None, None)),
        ((9,), 3, {"min_tokens": 3, "stop_token_ids": (9,)}, ((9,), STOP, 9)),
        ((0, 0, 0, 0), 4, {"min_tokens": 8}, ((0, 0, 0, 0), LENGTH, None)),
    ],
)
def test_cut_row(
    row: tuple[int, ...], num_outputs: int, params: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert (
        cut_row(
            row,
            num_outputs=num_outputs,
            params=SamplingParams(**params),
            max_tokens=8,
            eos_token_ids=EOS_TOKEN_IDS,
        )
        == expected
    )


def make_request(prompt: tuple[int, ...] = (5, 6, 7, 8), **params: Any) -> Request:
    return Request(
        request_id=3,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        seed=0,
        max_tokens=8,
        num_plans_in_flight=2,
    )


def make_segment(start: int, token_ids: tuple[int, ...], **fields: Any) -> Segment:
    return Segment(
        request_id=3,
        epoch=0,
        start=start,
        token_ids=token_ids,
        read_slot=1 if start else 0,
        write_slot=1,
        page_table=pack_page_table((1,)),
        **fields,
    )


def make_row(token_ids: tuple[int, ...] = (), **fields: Any) -> RowResult:
    return RowResult(request_id=3, epoch=0, token_ids=token_ids, **fields)


def logprobs(*token_ids: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids)


def test_a_middle_chunk_changes_nothing_but_the_counts() -> None:
    """Also when the final chunk was planned before its result came (I10, I11)."""
    request = make_request()
    request.num_computed = 4
    request.is_sample_in_flight = True
    assert apply_row(request, make_segment(0, (5, 6)), make_row(), EOS_TOKEN_IDS) is None
    assert request.output_token_ids == [] and request.is_sample_in_flight
    assert (request.num_steps, request.num_plans_in_flight) == (1, 1)


def test_a_row_is_appended_with_its_logprobs_and_cut_with_them() -> None:
    request = make_request(logprobs=0)
    segment = make_segment(4, (9, 5, 0, 6), num_draft_tokens=3, sampling_row=0, proposes=True)
    row = make_row((5, 0, 7), logprobs=logprobs(5, 0, 7), draft_token_ids=(8,))
    assert apply_row(request, segment, row, EOS_TOKEN_IDS) == Progress(
        request_id=3,
        token_ids=(5, 0),
        logprobs=logprobs(5, 0),
        finish_reason=STOP,
        steps=1,
        num_windows=1,
        num_draft_tokens=3,
        num_accepted_tokens=2,
    )
    assert request.output_token_ids == [5, 0] and not request.draft_token_ids
    assert request.output_logprobs == list(logprobs(5, 0))
    assert request.finish_reason is STOP and not request.is_sample_in_flight


@pytest.mark.parametrize(
    ("row_ids", "num_computed", "num_replay"),
    [((7,), 5, 0), ((5, 7), 6, 1), ((5, 6, 7), 7, 2), ((5, 6, 8, 7), 8, 3)],
)
def test_a_row_moves_the_request_behind_its_accepted_drafts(
    row_ids: tuple[int, ...], num_computed: int, num_replay: int
) -> None:
    """I23, I27: all follows from the row's length; what it rejects is nowhere."""
    request = make_request()
    request.max_tokens = 20
    request.output_token_ids.append(9)
    segment = make_segment(4, (9, 5, 6, 8), num_draft_tokens=3, sampling_row=0, proposes=True)
    request.num_computed = segment.end
    row = make_row(row_ids, draft_token_ids=(1, 2), confidences=(0.5, 0.25))
    item = apply_row(request, segment, row, EOS_TOKEN_IDS)
    assert item is not None and item.token_ids == row_ids
    assert request.output_token_ids == [9, *row_ids]
    assert (request.num_computed, request.num_replay) == (num_computed, num_replay)
    assert request.num_computed == request.num_tokens - 1
    assert (request.draft_token_ids, request.confidences) == ((1, 2), (0.5, 0.25))
    assert (item.num_windows, item.num_draft_tokens, item.num_accepted_tokens) == (1, 3, num_replay)


def test_rows_without_drafts_count_no_window() -> None:
    """I36: neither a prompt's last chunk nor a plain decode."""
    request = make_request()
    request.num_computed = 4
    chunk = make_segment(0, (5, 6, 7, 8), sampling_row=0)
    assert apply_row(request, chunk, make_row((9,)), EOS_TOKEN_IDS) == Progress(
        request_id=3, token_ids=(9,), steps=1
    )
    assert (request.num_computed, request.num_replay) == (4, 0)
    request.num_computed = 5
    item = apply_row(request, make_segment(4, (9,), sampling_row=0), make_row((6,)), EOS_TOKEN_IDS)
    assert item == Progress(request_id=3, token_ids=(6,), steps=2)
    assert (request.num_computed, request.num_replay) == (5, 0)


def test_prompt_logprobs_of_a_middle_chunk_are_told_at_once() -> None:
    request = make_request(prompt_logprobs=0)
    segment = make_segment(0, (5, 6), prompt_logprob_targets=(6, 7))
    row = make_row(prompt_logprobs=logprobs(6, 7))
    item = apply_row(request, segment, row, EOS_TOKEN_IDS)
    assert item == Progress(request_id=3, prompt_logprobs=logprobs(6, 7), steps=1)


def test_prompt_logprobs_are_not_told_twice() -> None:
    request = make_request(prompt_logprobs=0)
    request.prompt_logprobs.extend(logprobs(6))
    segment = make_segment(0, (5, 6), prompt_logprob_targets=(6, 7))
    row = make_row(prompt_logprobs=logprobs(6, 7))
    item = apply_row(request, segment, row, EOS_TOKEN_IDS)
    assert item is not None and item.prompt_logprobs == logprobs(7)
    assert request.prompt_logprobs == list(logprobs(6, 7))


@pytest.mark.parametrize(
    ("segment", "row", "message"),
    [
        (make_segment(0, (5, 6)), make_row((7,)), "middle chunk returned tokens"),
        (make_segment(0, (5, 6), sampling_row=0), make_row(), "bad row"),
        (make_segment(0, (5, 6), sampling_row=0), make_row((7, 8)), "bad row"),
        (
            make_segment(4, (9, 5), num_draft_tokens=1, sampling_row=0),
            make_row((6, 7)),
            "opens with accepted drafts",
        ),
        (
            make_segment(4, (9,), sampling_row=0),
            make_row((6,), draft_token_ids=(7,)),
            "drafts unasked",
        ),
        (
            make_segment(4, (9,), sampling_row=0, proposes=True),
            make_row((6,), draft_token_ids=(7, 8), confidences=(0.5,)),
            "one a draft",
        ),
        (make_segment(0, (5, 6), sampling_row=0), make_row((7,)), "logprobs are missing"),
        (
            make_segment(0, (5, 6), prompt_logprob_targets=(6, 7)),
            make_row(prompt_logprobs=logprobs(6)),
            "one prompt logprob a target",
        ),
        (
            make_segment(2, (7, 8), prompt_logprob_targets=(8,)),
            make_row(prompt_logprobs=logprobs(8)),
            "skip a position",
        ),
    ],
)
def test_a_row_that_does_not_answer_its_segment_is_fatal(
    segment: Segment, row: RowResult, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        apply_row(make_request(logprobs=0, prompt_logprobs=0), segment, row, EOS_TOKEN_IDS)


@pytest.mark.parametrize("sampling_row", [None, 2])
def test_a_row_that_is_not_finite_ends_the_request_with_the_reason(
    sampling_row: int | None,
) -> None:
    """Whatever else it carries: no token, no logprob and no draft of it counts."""
    request = make_request(logprobs=0, prompt_logprobs=0)
    request.num_cached_tokens = 1
    segment = make_segment(1, (6, 7, 8), sampling_row=sampling_row)
    row = RowResult(request_id=3, epoch=0, token_ids=(), is_finite=False)
    item = apply_row(request, segment, row, EOS_TOKEN_IDS)
    assert item == Progress(
        request_id=3,
        finish_reason=FinishReason.ERROR,
        error=(
            "NonFiniteError: NaN or infinity in what was computed for tokens [1, 4) of the request"
        ),
        num_cached_tokens=1,
        steps=1,
    )
    assert request.output_token_ids == [] and request.num_plans_in_flight == 1
