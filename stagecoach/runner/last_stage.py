"""What the last stage adds to a step: logits, tokens, log-probabilities.

Owns the sampling table. Every rank of the stage computes its share of the head; only rank 0
samples and has rows to return.
"""

import time
from typing import NamedTuple

from torch import Tensor

from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.request import TokenLogprobs
from stagecoach.runner.logprobs import prompt_logprobs
from stagecoach.runner.sampler import sample
from stagecoach.runner.sampling_table import SamplingTable
from stagecoach.runner.step_inputs import build_sample_inputs, build_target_inputs
from stagecoach.schedule.step_plan import RowResult, StepPlan

# Rows of logits of a prompt that exist at once: a whole chunk's would dwarf its activations.
_HEAD_ROWS = 256


class _Sampled(NamedTuple):
    """What segments returned, by their index in the plan."""

    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprobs]


class LastStage:
    """The end of a step on one rank of the last stage."""

    def __init__(self, model: StageModel, *, max_num_seqs: int, is_sampler: bool) -> None:
        self._model = model
        self._table: SamplingTable | None = None
        if is_sampler:
            self._table = SamplingTable(max_num_seqs, model.config.vocab_size, "cpu")
        self.head_seconds = 0.0  # inside the head since the start

    def run(self, plan: StepPlan, stream: ResidualStream) -> tuple[RowResult, ...] | None:
        """Rows of the plan's segments, in its order; None on ranks that do not sample."""
        sampled = self._sample(plan, stream)
        targets = self._prompt_logprobs(plan, stream)
        if self._table is None:
            return None
        return tuple(
            RowResult(
                request_id=segment.request_id,
                epoch=segment.epoch,
                token_ids=(sampled.tokens[index],) if index in sampled.tokens else (),
                logprobs=(sampled.logprobs[index],) if index in sampled.logprobs else (),
                prompt_logprobs=targets.get(index, ()),
            )
            for index, segment in enumerate(plan.segments)
        )

    def _sample(self, plan: StepPlan, stream: ResidualStream) -> _Sampled:
        if self._table is not None:
            self._table.admit(plan.admissions)
        if not plan.num_samples:
            return _Sampled({}, {})
        inputs = build_sample_inputs(plan)
        logits_RV = self._logits(stream, inputs.token_index_R)
        if self._table is None:
            return _Sampled({}, {})
        sampled = sample(logits_RV, inputs.sampling_rows, inputs.positions, self._table)
        self._table.append(inputs.sampling_rows, sampled.token_ids_R)
        host = sampled.to_host()
        logprobs = zip(inputs.segments, host.logprobs, strict=True)
        return _Sampled(
            tokens=dict(zip(inputs.segments, host.token_ids, strict=True)),
            logprobs={index: entry for index, entry in logprobs if entry is not None},
        )

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
        began = time.perf_counter()
        logits_RV = self._model.logits(stream, token_index_R)
        self.head_seconds += time.perf_counter() - began
        return logits_RV
