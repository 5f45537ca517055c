"""Apply one row of a step's result to its request, and say what became known.

Owns the stop conditions and what a caller is told. Knows neither pools nor queues: the
scheduler releases what a finished request held.
"""

from typing import NamedTuple

import msgspec

from stagecoach.errors import GrammarError, NonFiniteError, StagecoachError
from stagecoach.request import Constraint, FinishReason, Request, SamplingParams, TokenLogprobs
from stagecoach.schedule.step_plan import RowResult, Segment
from stagecoach.schedule.verify_window import standing_behind


class Progress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one commit (or an abort) made known about one request."""

    request_id: int
    token_ids: tuple[int, ...] = ()  # new output tokens
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a new token, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the next prompt positions
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it; None for end-of-sequence
    error: str | None = None  # why the finish reason is ERROR; opens with a name of errors.py
    num_cached_tokens: int = 0  # prompt tokens that a prefix hit saved
    first_planned: float | None = None  # monotonic seconds; None: not yet, or nobody said when
    steps: int = 0  # results applied to the request so far
    preemptions: int = 0
    num_windows: int = 0  # rows so far of windows that verified at least one draft
    num_draft_tokens: int = 0  # drafts that they verified
    num_accepted_tokens: int = 0  # of them, before a row was cut at a stop


class CommittedRow(NamedTuple):
    """The part of a row that counts."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | None


NOTHING = CommittedRow((), None, None)


def cut_row(
    row: tuple[int, ...],
    *,
    num_outputs: int,
    params: SamplingParams,
    max_tokens: int,
    eos_token_ids: frozenset[int],
) -> CommittedRow:
    """Keep a row up to and including the first token that ends the request.

    End-of-sequence first, then the request's stop tokens, then its length. Both kinds of stop
    count only once `min_tokens` outputs stand before the token, as in the sampler's mask.

    Args:
        num_outputs: output tokens committed before the row.
        max_tokens: resolved; at least one more than `num_outputs`.
    """
    for count, token_id in enumerate(row, start=1):
        if num_outputs + count > params.min_tokens:
            if not params.ignore_eos and token_id in eos_token_ids:
                return CommittedRow(row[:count], FinishReason.STOP, None)
            if token_id in params.stop_token_ids:
                return CommittedRow(row[:count], FinishReason.STOP, token_id)
        if num_outputs + count >= max_tokens:
            return CommittedRow(row[:count], FinishReason.LENGTH, None)
    return CommittedRow(row, None, None)


def apply_row(
    request: Request, segment: Segment, row: RowResult, eos_token_ids: frozenset[int]
) -> Progress | None:
    """Append what a segment of the current epoch returned; None if nothing became known.

    What is due is read from the segment, not from the request: when the result of a middle
    chunk arrives, the request's progress already counts later chunks.
    """
    request.num_plans_in_flight -= 1
    request.num_steps += 1
    if not row.is_finite:
        return end_with(
            request,
            NonFiniteError,
            f"NaN or infinity in what was computed for tokens [{segment.start}, {segment.end}) of "
            "the request",
        )
    prompt_logprobs = _new_prompt_logprobs(request, segment, row)
    request.prompt_logprobs.extend(prompt_logprobs)
    if segment.sampling_row is None:
        assert not row.token_ids, f"a middle chunk returned tokens: {row}"
        if not prompt_logprobs:
            return None
        return progress_of(request, prompt_logprobs=prompt_logprobs)

    _stand_behind(request, segment, row)
    committed = cut_row(
        row.token_ids,
        num_outputs=len(request.output_token_ids),
        params=request.params,
        max_tokens=request.max_tokens,
        eos_token_ids=eos_token_ids,
    )
    if request.constraint is not None:
        committed = _obey(request.constraint, committed)
        if request.constraint.error is not None:
            return end_with(request, GrammarError, request.constraint.error)
    logprobs = row.logprobs[: len(committed.token_ids)]
    if request.params.logprobs is not None:
        assert len(logprobs) == len(committed.token_ids), f"logprobs are missing: {row}"
        request.output_logprobs.extend(logprobs)
    request.output_token_ids.extend(committed.token_ids)
    request.num_samples_in_flight -= 1
    request.finish_reason = committed.finish_reason
    if committed.finish_reason is None:
        _take_drafts(request, row)
    return progress_of(request, committed, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def end_with(request: Request, kind: type[StagecoachError], reason: str) -> Progress:
    """The end of a request by a fault of its own, and what its caller is told."""
    request.finish_reason = FinishReason.ERROR
    request.error = f"{kind.__name__}: {reason}"
    return progress_of(request)


def _obey(constraint: Constraint, committed: CommittedRow) -> CommittedRow:
    """Take a row that counts through the request's grammar, whose end may be the request's.

    A text usually ends with an end token. Where none may stand behind it, nothing else may.
    """
    if constraint.error is None:
        constraint.advance(committed.token_ids)
    if committed.finish_reason is None and constraint.is_finished:
        return committed._replace(finish_reason=FinishReason.STOP)
    return committed


def _take_drafts(request: Request, row: RowResult) -> None:
    """Keep what was proposed, as far as the request's grammar makes it worth verifying."""
    num_useful = len(row.draft_token_ids)
    if request.constraint is not None:
        num_useful = request.constraint.num_useful_drafts(row.draft_token_ids)
    request.draft_token_ids = row.draft_token_ids[:num_useful]
    request.confidences = row.confidences[:num_useful]


def _stand_behind(request: Request, segment: Segment, row: RowResult) -> None:
    """Move the request's progress behind what the row accepts, and count it."""
    standing = standing_behind(segment, row.token_ids)
    # Without drafts it stood there from the plan on; a chained window may stand behind it.
    if segment.num_draft_tokens:
        request.num_computed, request.num_replay = standing
        request.num_windows += 1
        request.num_draft_tokens += segment.num_draft_tokens
        request.num_accepted_tokens += standing.num_replay
    assert segment.proposes or not row.draft_token_ids, f"drafts unasked: {row}\n{segment}"
    assert len(row.confidences) in (0, len(row.draft_token_ids)), f"one a draft, or none: {row}"


def _new_prompt_logprobs(
    request: Request, segment: Segment, row: RowResult
) -> tuple[TokenLogprobs, ...]:
    """Those of the row that an earlier admission has not delivered already."""
    assert len(row.prompt_logprobs) == len(segment.prompt_logprob_targets), (
        f"one prompt logprob a target: {row}\n{segment}"
    )
    if not row.prompt_logprobs:
        return ()
    num_delivered = len(request.prompt_logprobs)
    assert segment.start <= num_delivered, f"prompt logprobs skip a position: {segment}"
    return row.prompt_logprobs[num_delivered - segment.start :]


def progress_of(
    request: Request,
    committed: CommittedRow = NOTHING,
    *,
    logprobs: tuple[TokenLogprobs, ...] = (),
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
) -> Progress:
    """What is new about a request, and its counts so far."""
    return Progress(
        request_id=request.request_id,
        token_ids=committed.token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=request.finish_reason,
        stop_reason=committed.stop_reason,
        error=request.error,
        num_cached_tokens=request.num_cached_tokens,
        first_planned=request.first_planned,
        steps=request.num_steps,
        preemptions=request.num_preemptions,
        num_windows=request.num_windows,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
    )
