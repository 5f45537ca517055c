"""From tensors of a step to what each segment returned.

Owns the one transfer to the host, and what a segment with values that are not finite returns:
nothing. Chooses no token.

Dimensions: R sampled rows, S segments that sample, C chunks, Q rows whose logits are reported,
N segments that propose, K drafts of each, V vocabulary, H hidden size.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.draft.drafter import Proposal
from stagecoach.request import TokenLogprobs
from stagecoach.runner.accept import Verdict
from stagecoach.runner.logprobs import RequestedLogprobs, TopTokens, as_float, top_tokens
from stagecoach.runner.step_inputs import SampleInputs
from stagecoach.runner.transfer import Download, upload
from stagecoach.schedule.step_plan import RowResult, StepPlan

# Logits that a segment reports where it is asked to.
_NUM_REPORTED = 16


class ReportedLogits(NamedTuple):
    """The largest raw logits behind the first sample of some segments."""

    segments: list[int]  # index in the plan
    best: TopTokens


class Sampled(NamedTuple):
    """What rank 0 sampled in a step."""

    inputs: SampleInputs
    verdict: Verdict
    is_finite_R: Tensor  # bool, of the logits
    logprobs: RequestedLogprobs | None
    reported: ReportedLogits | None


class ChunksFound(NamedTuple):
    """Whether segments that are more than what they sample came out finite."""

    segments: list[int]  # index in the plan
    is_finite_C: Tensor | None  # bool; None where there are none


def finite_rows(logits_RV: Tensor) -> Tensor:
    """bool [R]: no logit is NaN or infinite."""
    # A sum of finite logits stays far from the end of float32.
    return logits_RV.sum(-1).isfinite()


def finite_chunks(plan: StepPlan, hidden_TH: Tensor) -> ChunksFound:
    """Looks at every token of the chunks; the logits speak for windows that sample.

    Args:
        hidden_TH: the sum of the open block behind the last layer. A state and the cache rows
            of a context enter the outputs of the tokens behind them as sums over all of their
            values, which NaN always passes; infinity passes them or is NaN in the next norm. So
            what a segment leaves behind is finite if this is.
    """
    segments = [
        index
        for index, segment in enumerate(plan.segments)
        if segment.sampling_row is None or not segment.is_window
    ]
    if not segments:
        return ChunksFound(segments, None)
    ends = list(accumulate((segment.num_tokens for segment in plan.segments), initial=0))
    sums = [hidden_TH[ends[index] : ends[index + 1]].sum() for index in segments]
    return ChunksFound(segments, torch.stack(sums).isfinite())


def reported_logits(
    plan: StepPlan, logits_RV: Tensor, inputs: SampleInputs
) -> ReportedLogits | None:
    """Those of the segments that are asked for any; None if no segment is."""
    places = [
        (index, first)
        for index, first in zip(inputs.segments, inputs.first_rows, strict=True)
        if plan.segments[index].reports_logits
    ]
    if not places:
        return None
    segments, rows = map(list, zip(*places, strict=True))
    rows_Q = upload(rows, torch.int64, logits_RV.device)
    num_best = min(_NUM_REPORTED, logits_RV.shape[1])
    return ReportedLogits(segments, top_tokens(as_float(logits_RV[rows_Q]), num_best))


class Unread:
    """What the segments of a plan returned, on its way to the host in one transfer.

    Args:
        sampled: None where no segment samples.
        proposal: None where no segment proposes.
        targets: prompt logprobs by index of the segment; they are on the host.
    """

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sampled | None,
        chunks: ChunksFound,
        proposal: Proposal | None,
        targets: dict[int, tuple[TokenLogprobs, ...]],
    ) -> None:
        self._plan = plan
        self._sampled = sampled
        self._chunks = chunks
        self._targets = targets
        logprobs = sampled and sampled.logprobs
        reported = sampled and sampled.reported
        self._values = ValuesOnTheirWay(
            chunks.is_finite_C,
            sampled and sampled.verdict.token_ids_R,
            sampled and sampled.is_finite_R,
            sampled and sampled.verdict.num_accepted_S,
            logprobs and logprobs.rows.packed_RF,
            reported and reported.best.token_ids_RK,
            reported and reported.best.values_RK,
            proposal and proposal.token_ids_NK,
            proposal and proposal.confidences_NK,
        )

    def is_ready(self) -> bool:
        """Whether `read` would return at once."""
        return self._values.is_ready()

    def read(self) -> tuple[RowResult, ...]:
        """One row a segment, in the plan's order."""
        parts = self._parts()
        return tuple(
            RowResult(
                request_id=segment.request_id,
                epoch=segment.epoch,
                token_ids=parts.token_ids.get(index, ()),
                draft_token_ids=parts.draft_token_ids.get(index, ()),
                confidences=parts.confidences.get(index, ()),
                logprobs=parts.logprobs.get(index, ()),
                prompt_logprobs=self._targets.get(index, ()),
                logit_ids=parts.logit_ids.get(index, ()),
                logits=parts.logits.get(index, ()),
            )
            if index not in parts.not_finite
            else RowResult(
                request_id=segment.request_id, epoch=segment.epoch, token_ids=(), is_finite=False
            )
            for index, segment in enumerate(self._plan.segments)
        )

    def _parts(self) -> "_Parts":
        plan, sampled, chunks = self._plan, self._sampled, self._chunks
        logprobs = sampled and sampled.logprobs
        reported = sampled and sampled.reported
        (
            is_finite_chunk,
            token_ids,
            is_finite_row,
            num_accepted,
            packed_logprobs,
            logit_ids,
            logits,
            drafts,
            confidences,
        ) = self._values.read()
        spans = [] if sampled is None else _spans(sampled.inputs, num_accepted)
        by_row: dict[int, TokenLogprobs] = {}
        if logprobs is not None:
            by_row = dict(zip(logprobs.indices, logprobs.rows.unpack(packed_logprobs), strict=True))
        proposing = [index for index, segment in enumerate(plan.segments) if segment.proposes]
        reporting = [] if reported is None else reported.segments
        return _Parts(
            # What lies behind the accepted drafts is nobody's, and may be anything.
            not_finite={
                *(index for index, span in spans if not all(is_finite_row[span])),
                *(
                    index
                    for index, is_finite in zip(chunks.segments, is_finite_chunk, strict=True)
                    if not is_finite
                ),
            },
            token_ids={index: tuple(map(int, token_ids[span])) for index, span in spans},
            logprobs={
                index: tuple(by_row[row] for row in range(span.start, span.stop))
                for index, span in spans
                if span.start in by_row
            },
            draft_token_ids={
                index: tuple(map(int, part)) for index, part in _share_out(proposing, drafts)
            },
            # A drafter that overflows is not sure of anything.
            confidences={
                index: tuple(0.0 if math.isnan(value) else value for value in part)
                for index, part in _share_out(proposing, confidences)
            },
            logit_ids={
                index: tuple(map(int, part)) for index, part in _share_out(reporting, logit_ids)
            },
            logits={index: tuple(part) for index, part in _share_out(reporting, logits)},
        )


class _Parts(NamedTuple):
    """Parts of the rows, by index of the segment in the plan."""

    not_finite: set[int]
    token_ids: dict[int, tuple[int, ...]]
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    draft_token_ids: dict[int, tuple[int, ...]]
    confidences: dict[int, tuple[float, ...]]
    logit_ids: dict[int, tuple[int, ...]]
    logits: dict[int, tuple[float, ...]]


def _spans(inputs: SampleInputs, num_accepted: list[float]) -> list[tuple[int, slice]]:
    """The rows that count of each segment that sampled."""
    return [
        (index, slice(first, first + 1 + int(accepted)))
        for index, first, accepted in zip(
            inputs.segments,
            inputs.first_rows,
            num_accepted or [0] * len(inputs.segments),
            strict=True,
        )
    ]


class ValuesOnTheirWay:
    """The values of several tensors, in one transfer; of None, none."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self._sizes = [0 if tensor is None else tensor.numel() for tensor in tensors]
        flat = [tensor.flatten() for tensor in tensors if tensor is not None]
        if any(part.is_floating_point() for part in flat):
            # Wide enough for token ids; what is packed as float64 stays as it is.
            flat = [part.to(torch.float64) for part in flat]
        self._download: Download | None = None
        if flat:
            self._download = Download(flat[0] if len(flat) == 1 else torch.cat(flat))

    def is_ready(self) -> bool:
        return self._download is None or self._download.is_ready()

    def read(self) -> list[list[float]]:
        """Those of each tensor, flattened; waits for them."""
        numbers: list[float] = [] if self._download is None else self._download.read().tolist()
        ends = list(accumulate(self._sizes))
        return [numbers[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]


def _share_out(indices: Sequence[int], values: list[float]) -> Iterator[tuple[int, list[float]]]:
    """As many of the values to each index, in order; nothing where there are none."""
    if values:
        width = len(values) // len(indices)
        for place, index in enumerate(indices):
            yield index, values[place * width : (place + 1) * width]
