"""What a row commits: stop conditions in their order, cuts, and what is told."""

from typing import Any

import pytest

from stagecoach.request import FinishReason, Request, SamplingParams, TokenLogprobs
from stagecoach.schedule.commit import Progress, apply_row, cut_row
from stagecoach.schedule.step_plan import RowResult, Segment, pack_page_table
from tests.cpu.table_constraint import Table, TableConstraint, line

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
    request.num_samples_in_flight = 1
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


def follow(table: Table, *outputs: int) -> tuple[Request, TableConstraint]:
    """A request behind these outputs, and the grammar that it obeys."""
    request = make_request()
    request.max_tokens = 20
    request.output_token_ids.extend(outputs)
    request.num_computed = request.num_tokens
    constraint = TableConstraint(table, vocab_size=40)
    constraint.advance(outputs)
    request.constraint = constraint
    return request, constraint


def test_a_grammar_is_moved_by_the_tokens_that_count() -> None:
    """Two drafts stand and the third falls; what is behind an end is nobody's."""
    request, constraint = follow(line(9, 5, 6, 7, 0), 9)
    segment = make_segment(4, (9, 5, 6, 8), num_draft_tokens=3, sampling_row=0)
    apply_row(request, segment, make_row((5, 6, 7)), EOS_TOKEN_IDS)
    assert constraint.committed == request.output_token_ids == [9, 5, 6, 7]
    assert request.finish_reason is None
    segment = make_segment(7, (7, 0, 5), num_draft_tokens=2, sampling_row=0)
    apply_row(request, segment, make_row((0, 5, 33)), EOS_TOKEN_IDS)
    assert constraint.committed == request.output_token_ids == [9, 5, 6, 7, 0]
    assert request.finish_reason is STOP


@pytest.mark.parametrize("is_last", [False, True])
def test_a_token_that_does_not_obey_ends_its_request_and_is_not_told(is_last: bool) -> None:
    """Whatever the request would have ended with."""

    class Strict(TableConstraint):
        def advance(self, token_ids: tuple[int, ...]) -> None:
            try:
                super().advance(token_ids)
            except AssertionError:
                self.error = "8 is forbidden"

    request, _ = follow(line(9, 5, 6), 9)
    request.constraint = Strict(line(5, 6), vocab_size=40)
    request.max_tokens = 2 if is_last else 20
    item = apply_row(request, make_segment(4, (9,), sampling_row=0), make_row((8,)), EOS_TOKEN_IDS)
    assert item is not None
    assert (item.token_ids, item.finish_reason) == ((), FinishReason.ERROR)
    assert item.error == "GrammarError: 8 is forbidden" and request.output_token_ids == [9]


def test_a_text_that_nothing_may_follow_ends_its_request() -> None:
    """Also where no end token can stand behind it."""
    request, _ = follow(line(9, 5), 9)
    segment = make_segment(4, (9,), sampling_row=0, proposes=True)
    item = apply_row(request, segment, make_row((5,), draft_token_ids=(7,)), EOS_TOKEN_IDS)
    assert item is not None
    assert (item.token_ids, item.finish_reason, item.stop_reason) == ((5,), STOP, None)
    assert not request.draft_token_ids


def test_a_length_or_a_stop_token_ends_before_the_grammar_does() -> None:
    request, _ = follow(line(9, 5, 6), 9)
    request.max_tokens = 2
    item = apply_row(request, make_segment(4, (9,), sampling_row=0), make_row((5,)), EOS_TOKEN_IDS)
    assert item is not None and item.finish_reason is LENGTH
    request, _ = follow(line(9, 5, 6), 9)
    request.params = SamplingParams(stop_token_ids=(5,))
    item = apply_row(request, make_segment(4, (9,), sampling_row=0), make_row((5,)), EOS_TOKEN_IDS)
    assert item is not None and (item.finish_reason, item.stop_reason) == (STOP, 5)


@pytest.mark.parametrize(
    ("drafts", "kept"),
    [
        ((), ()),
        ((6, 7, 8), (6, 7, 8)),
        ((6, 7, 30), (6, 7, 30)),
        ((6, 30, 8), (6, 30)),
        ((30, 7, 8), (30,)),
        ((6, 7, 8, 0, 0, 5), (6, 7, 8, 0, 0)),  # one behind the end
    ],
)
def test_drafts_are_kept_up_to_the_first_that_does_not_obey(
    drafts: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    request, constraint = follow(line(9, 5, 6, 7, 8, 0), 9)
    segment = make_segment(4, (9,), sampling_row=0, proposes=True)
    confidences = tuple(place / 10 for place in range(len(drafts)))
    row = make_row((5,), draft_token_ids=drafts, confidences=confidences)
    apply_row(request, segment, row, EOS_TOKEN_IDS)
    assert request.draft_token_ids == kept
    assert request.confidences == confidences[: len(kept)]
    assert constraint.committed == [9, 5]


def test_a_grammar_that_cannot_go_on_ends_its_request_with_the_reason() -> None:
    """No token of the row counts: it was chosen among whatever was left."""
    request, constraint = follow(line(9, 5), 9)
    constraint.error = "a limit was reached"
    item = apply_row(request, make_segment(4, (9,), sampling_row=0), make_row((33,)), EOS_TOKEN_IDS)
    assert item is not None
    assert (item.token_ids, item.finish_reason) == ((), FinishReason.ERROR)
    assert item.error == "GrammarError: a limit was reached"
    assert request.output_token_ids == [9]
