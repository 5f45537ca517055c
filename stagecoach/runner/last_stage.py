"""What the last stage adds to a step: logits, tokens, log-probabilities, and the next drafts.

Owns the sampling table and the order of the work. Every rank of the stage computes its share
of the head and of the drafter; only rank 0 samples, and has rows to return.

    head -> verify -> [newest tokens to all ranks] -> the drafter's context rows, its block pass

Dimensions: R sampled rows, S segments that sample, N segments that propose, K drafts of each,
T tokens of the step.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.config import ResolvedSpeculation
from stagecoach.draft.drafter import DSparkDrafter, Proposal
from stagecoach.kernels.ragged import StepTensors
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import TensorParallel
from stagecoach.request import TokenLogprobs
from stagecoach.runner.accept import Verdict, make_rule
from stagecoach.runner.logprobs import RequestedLogprobs, prompt_logprobs, requested_logprobs
from stagecoach.runner.sampling_table import SamplingTable
from stagecoach.runner.step_inputs import (
    SampleInputs,
    build_block_inputs,
    build_sample_inputs,
    build_target_inputs,
)
from stagecoach.schedule.step_plan import RowResult, StepPlan

# Rows of logits of a prompt that exist at once: a whole chunk's would dwarf its activations.
_HEAD_ROWS = 256


class _Sampled(NamedTuple):
    """What rank 0 sampled in a step."""

    inputs: SampleInputs
    verdict: Verdict
    logprobs: RequestedLogprobs | None


class LastStage:
    """The end of a step on one rank of the last stage.

    Args:
        drafter: together with `speculation`; None without.
    """

    def __init__(
        self,
        model: StageModel,
        tp: TensorParallel,
        *,
        max_num_seqs: int,
        is_sampler: bool,
        speculation: ResolvedSpeculation | None = None,
        drafter: DSparkDrafter | None = None,
    ) -> None:
        assert (speculation is None) == (drafter is None), "drafts need a drafter"
        self._model = model
        self._tp = tp
        self._drafter = drafter
        self._num_draft_tokens = speculation.num_speculative_tokens if speculation else 0
        self._rule = make_rule(speculation)
        self._table: SamplingTable | None = None
        if is_sampler:
            self._table = SamplingTable(max_num_seqs, model.config.vocab_size, "cpu")
        self.head_seconds = 0.0  # inside the head and the drafter since the start

    def run(
        self,
        plan: StepPlan,
        step: StepTensors,
        stream: ResidualStream,
        taps_TNH: Tensor | None = None,
        draft_rows_YRD: Tensor | None = None,
    ) -> tuple[RowResult, ...] | None:
        """Rows of the plan's segments, in its order; None on ranks that do not sample.

        Args:
            step: `plan` as tensors.
            taps_TNH: what the drafter reads of the target; with a drafter only.
            draft_rows_YRD: the drafter's context rows; with a drafter only.
        """
        if self._table is not None:
            self._table.admit(plan.admissions)
        sampled = self._sample(plan, stream)
        proposal = None
        if self._drafter is not None:
            assert taps_TNH is not None and draft_rows_YRD is not None, "the drafter lacks input"
            with self._timed():
                self._drafter.write_context(taps_TNH, step, draft_rows_YRD)
            proposal = self._propose(plan, step, sampled, draft_rows_YRD)
        targets = self._prompt_logprobs(plan, stream)
        if self._table is None:
            return None
        return _rows(plan, sampled, proposal, targets)

    def _sample(self, plan: StepPlan, stream: ResidualStream) -> _Sampled | None:
        """Tokens of the segments that sample, if this rank samples."""
        if not plan.num_samples:
            return None
        inputs = build_sample_inputs(plan)
        logits_RV = self._logits(stream, inputs.token_index_R)
        table = self._table
        if table is None:
            return None
        verdict = self._rule.verify(logits_RV, inputs, table)
        table.append(inputs.sampling_rows, verdict.token_ids_R, verdict.is_output(inputs))
        return _Sampled(
            inputs=inputs,
            verdict=verdict,
            logprobs=requested_logprobs(
                logits_RV,
                verdict.token_ids_R,
                [table.traits(row).num_logprobs for row in inputs.sampling_rows],
            ),
        )

    def _propose(
        self, plan: StepPlan, step: StepTensors, sampled: _Sampled | None, draft_rows_YRD: Tensor
    ) -> Proposal | None:
        """Drafts behind the segments that propose, in the plan's order."""
        proposing = [segment for segment in plan.segments if segment.proposes]
        if not proposing:
            return None
        assert self._drafter is not None
        if sampled is None:
            newest_2N = step.token_ids_T.new_empty(2, len(proposing))
        else:
            newest_2N = _newest_tokens(plan, sampled)
        anchor_ids_N, starts_N = self._tp.broadcast(newest_2N).unbind()
        block = build_block_inputs(plan, step, anchor_ids_N, starts_N, self._num_draft_tokens)
        choose = None
        if self._table is not None:
            rows = [segment.sampling_row or 0 for segment in proposing]
            choose = self._rule.draft_choice(rows, starts_N, self._table)
        with self._timed():
            return self._drafter.propose(block, draft_rows_YRD, choose)

    def _prompt_logprobs(
        self, plan: StepPlan, stream: ResidualStream
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        targets = {}
        for wanted in build_target_inputs(plan):
            entries: list[TokenLogprobs] = []
            parts = zip(
                wanted.token_index_P.split(_HEAD_ROWS),
                wanted.target_ids_P.split(_HEAD_ROWS),
                strict=True,
            )
            for token_index_P, target_ids_P in parts:
                logits_PV = self._logits(stream, token_index_P)
                if self._table is not None:
                    entries += prompt_logprobs(logits_PV, target_ids_P, wanted.num_top)
            targets[wanted.segment] = tuple(entries)
        return targets

    def _logits(self, stream: ResidualStream, token_index_R: Tensor) -> Tensor:
        with self._timed():
            return self._model.logits(stream, token_index_R)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.head_seconds += time.perf_counter() - began


def _newest_tokens(plan: StepPlan, sampled: _Sampled) -> Tensor:
    """Id and position of the newest token of each segment that proposes: int64 [2, N]."""
    inputs = sampled.inputs
    newest_row_N = sampled.verdict.newest_rows(inputs)
    proposing = [
        place for place, index in enumerate(inputs.segments) if plan.segments[index].proposes
    ]
    if len(proposing) < len(inputs.segments):
        newest_row_N = newest_row_N[torch.tensor(proposing, device=newest_row_N.device)]
    return torch.stack(
        [sampled.verdict.token_ids_R[newest_row_N], inputs.positions_R[newest_row_N]]
    )


def _rows(
    plan: StepPlan,
    sampled: _Sampled | None,
    proposal: Proposal | None,
    targets: dict[int, tuple[TokenLogprobs, ...]],
) -> tuple[RowResult, ...]:
    """What each segment returned, read from the device at once."""
    parts = _Parts({}, {}, {}, {}) if sampled is None else _read(plan, sampled, proposal)
    return tuple(
        RowResult(
            request_id=segment.request_id,
            epoch=segment.epoch,
            token_ids=parts.token_ids.get(index, ()),
            draft_token_ids=parts.draft_token_ids.get(index, ()),
            confidences=parts.confidences.get(index, ()),
            logprobs=parts.logprobs.get(index, ()),
            prompt_logprobs=targets.get(index, ()),
        )
        for index, segment in enumerate(plan.segments)
    )


class _Parts(NamedTuple):
    """Parts of the rows, by index of the segment in the plan."""

    token_ids: dict[int, tuple[int, ...]]
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    draft_token_ids: dict[int, tuple[int, ...]]
    confidences: dict[int, tuple[float, ...]]


def _read(plan: StepPlan, sampled: _Sampled, proposal: Proposal | None) -> _Parts:
    inputs, logprobs = sampled.inputs, sampled.logprobs
    num_accepted_S = sampled.verdict.num_accepted_S
    drafts_NK = None if proposal is None else proposal.token_ids_NK
    confidences_NK = None if proposal is None else proposal.confidences_NK
    token_ids, num_accepted, drafts, confidences, packed_logprobs = _to_host(
        sampled.verdict.token_ids_R,
        num_accepted_S,
        drafts_NK,
        confidences_NK,
        None if logprobs is None else logprobs.rows.packed_RF,
    )
    spans = [
        (index, slice(first, first + 1 + int(accepted)))
        for index, first, accepted in zip(
            inputs.segments,
            inputs.first_rows,
            num_accepted or [0] * len(inputs.segments),
            strict=True,
        )
    ]
    by_row: dict[int, TokenLogprobs] = {}
    if logprobs is not None:
        by_row = dict(zip(logprobs.indices, logprobs.rows.unpack(packed_logprobs), strict=True))
    proposing = [index for index, segment in enumerate(plan.segments) if segment.proposes]
    return _Parts(
        token_ids={index: tuple(map(int, token_ids[span])) for index, span in spans},
        logprobs={
            index: tuple(by_row[row] for row in range(span.start, span.stop))
            for index, span in spans
            if span.start in by_row
        },
        draft_token_ids={
            index: tuple(map(int, part)) for index, part in _share_out(proposing, drafts)
        },
        confidences={index: tuple(part) for index, part in _share_out(proposing, confidences)},
    )


def _to_host(*tensors: Tensor | None) -> list[list[float]]:
    """The flattened values of each tensor, none for None, in one transfer."""
    flat = [tensor.flatten() for tensor in tensors if tensor is not None]
    if any(part.is_floating_point() for part in flat):
        # Wide enough for token ids; what is packed as float64 stays as it is.
        flat = [part.to(torch.float64) for part in flat]
    numbers = (flat[0] if len(flat) == 1 else torch.cat(flat)).tolist()
    values: list[list[float]] = []
    start = 0
    for tensor in tensors:
        end = start + (0 if tensor is None else tensor.numel())
        values.append(numbers[start:end])
        start = end
    return values


def _share_out(indices: Sequence[int], values: list[float]) -> Iterator[tuple[int, list[float]]]:
    """As many of the values to each index, in order; nothing where there are none."""
    if values:
        width = len(values) // len(indices)
        for place, index in enumerate(indices):
            yield index, values[place * width : (place + 1) * width]
