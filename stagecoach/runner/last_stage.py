"""What the last stage adds to a step: logits, tokens, log-probabilities, and the next drafts.

Owns the sampling table and the order of the work. Every rank of the stage computes its share
of the head and of the drafter; only rank 0 samples, and has rows to return.

    head -> masks, verify -> [newest tokens to all ranks] -> the drafter's context rows, its blocks

Dimensions: R sampled rows, S segments that sample, N segments that propose, K drafts of each,
T tokens of the step.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stagecoach.config import ResolvedSpeculation
from stagecoach.draft.drafter import Drafter, Proposal
from stagecoach.kernels.ragged import StepTensors
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import TensorParallel
from stagecoach.request import TokenLogprobs
from stagecoach.runner.accept import make_rule
from stagecoach.runner.logprobs import prompt_logprobs, requested_logprobs
from stagecoach.runner.row_results import (
    Sampled,
    finite_chunks,
    finite_rows,
    reported_logits,
    row_results,
)
from stagecoach.runner.sampling_table import SamplingTable
from stagecoach.runner.step_inputs import (
    build_block_inputs,
    build_sample_inputs,
    build_target_inputs,
)
from stagecoach.runner.token_masks import constrained_rows, mask_logits
from stagecoach.schedule.step_plan import RowResult, StepPlan

# Rows of logits of a prompt that exist at once: a whole chunk's would dwarf its activations.
_HEAD_ROWS = 256


def no_masks() -> bytes:
    """The masks of a plan without constrained segments."""
    raise AssertionError("nobody sends masks")


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
        drafter: Drafter | None = None,
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
        receive_masks: Callable[[], bytes] = no_masks,
    ) -> tuple[RowResult, ...] | None:
        """Rows of the plan's segments, in its order; None on ranks that do not sample.

        Args:
            step: `plan` as tensors.
            taps_TNH: what the drafter reads of the target; with a drafter only.
            draft_rows_YRD: the drafter's context rows; with a drafter only.
            receive_masks: waits for the masks of the constrained segments, if there are any.
        """
        if self._table is not None:
            self._table.admit(plan.admissions)
        sampled = self._sample(plan, stream, receive_masks)
        proposal = None
        if self._drafter is not None:
            assert taps_TNH is not None and draft_rows_YRD is not None, "the drafter lacks input"
            with self._timed():
                self._drafter.write_context(taps_TNH, step, draft_rows_YRD)
            proposal = self._propose(plan, step, sampled, draft_rows_YRD)
        targets = self._prompt_logprobs(plan, stream)
        if self._table is None:
            return None
        return row_results(plan, sampled, finite_chunks(plan, stream.partial_TH), proposal, targets)

    def finish_context(self) -> None:
        """Write the drafter's context rows that are due: pages are about to be moved."""
        if self._drafter is not None:
            with self._timed():
                self._drafter.finish_context()

    def _sample(
        self, plan: StepPlan, stream: ResidualStream, receive_masks: Callable[[], bytes]
    ) -> Sampled | None:
        """Tokens of the segments that sample, if this rank samples."""
        if not plan.num_samples:
            return None
        inputs = build_sample_inputs(plan)
        logits_RV = self._logits(stream, inputs.token_index_R)
        table = self._table
        if table is None:
            return None
        allowed_RV = logits_RV
        rows = constrained_rows(plan, inputs)
        if rows:
            # As late as can be: they are made while the layers run.
            allowed_RV = mask_logits(logits_RV, rows, receive_masks())
        verdict = self._rule.verify(allowed_RV, inputs, table)
        table.append(inputs.sampling_rows, verdict.token_ids_R, verdict.is_output(inputs))
        return Sampled(
            inputs=inputs,
            verdict=verdict,
            is_finite_R=finite_rows(logits_RV),
            logprobs=requested_logprobs(
                logits_RV,
                verdict.token_ids_R,
                [table.traits(row).num_logprobs for row in inputs.sampling_rows],
            ),
            reported=reported_logits(plan, logits_RV, inputs),
        )

    def _propose(
        self, plan: StepPlan, step: StepTensors, sampled: Sampled | None, draft_rows_YRD: Tensor
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


def _newest_tokens(plan: StepPlan, sampled: Sampled) -> Tensor:
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
