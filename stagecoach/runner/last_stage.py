"""What the last stage adds to a step: logits, tokens, log-probabilities, and the next drafts.

Owns the sampling table and the order of the work. Every rank of the stage computes its share
of the head and of the drafter; only rank 0 samples, and has rows to return.

    head -> masks, verify -> [newest tokens to all ranks] -> the drafter's context rows, its blocks

A step goes one of two ways: any plan through `begin`; on a device a plan of simple windows
through `enqueue`, which asks nothing of the host, so that a graph can hold it. Both say the same.

Dimensions: R sampled rows, S segments that sample, N segments that propose, K drafts of each,
T tokens of the step, B its segments.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from stagecoach.config.engine import ResolvedSpeculation
from stagecoach.draft.drafter import Drafter, Proposal
from stagecoach.kernels.ragged import BlockInputs, PackedBlocks, PackedGroup, StepTensors
from stagecoach.kernels.sampling import (
    Accepted,
    Choices,
    SamplingRows,
    choose_tokens,
    count_accepted,
)
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import TensorParallel
from stagecoach.request import TokenLogprobs
from stagecoach.runner.accept import Rejection, make_rule
from stagecoach.runner.device_rows import DeviceRows, read_rows
from stagecoach.runner.draft_blocks import (
    blocks_of_all,
    blocks_of_proposing,
    newest_of_proposing,
    own_noise_choice,
)
from stagecoach.runner.logprobs import prompt_logprobs, requested_logprobs
from stagecoach.runner.newest_tokens import NewestTokens
from stagecoach.runner.packed_inputs import PackedStep
from stagecoach.runner.row_results import (
    Sampled,
    Unread,
    finite_chunks,
    finite_rows,
    reported_logits,
)
from stagecoach.runner.sampling_table import PendingTokens, SamplingTable, is_simple
from stagecoach.runner.step_inputs import (
    SampleInputs,
    build_block_inputs,
    build_sample_inputs,
    build_target_inputs,
)
from stagecoach.runner.token_masks import constrained_rows, mask_logits
from stagecoach.runner.transfer import to_device, upload
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
        device: where the model's tensors are.
        newest: told what is chosen, on every rank; None: no window is chained.
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
        device: torch.device | str = "cpu",
        newest: NewestTokens | None = None,
    ) -> None:
        assert (speculation is None) == (drafter is None), "drafts need a drafter"
        self._model = model
        self._tp = tp
        self._newest = newest
        self._drafter = drafter
        self._num_draft_tokens = speculation.num_speculative_tokens if speculation else 0
        self._device = torch.device(device)
        self._rule = make_rule(speculation)
        self._table: SamplingTable | None = None
        if is_sampler:
            self._table = SamplingTable(max_num_seqs, model.config.vocab_size, self._device)
        # Every rank knows which rows a graph can sample: they must all go the same way.
        self._is_simple: dict[int, bool] = {}
        self._forced: tuple[StepPlan, list[int] | None] | None = None  # of the newest plan
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
        """`admit` and `begin`, and the rows as soon as they are there; None where nobody samples.

        Args: as of `begin`.
        """
        self.admit(plan)
        unread = self.begin(plan, step, stream, taps_TNH, draft_rows_YRD, receive_masks)
        return None if unread is None else unread.read()

    def admit(self, plan: StepPlan) -> None:
        """Give the plan's new requests their rows: before all else, for every plan in order."""
        vocab_size = self._model.config.vocab_size
        for entry in plan.admissions:
            # What the rejection rule drew a draft from has to be kept for the verify.
            can_choose = entry.params.is_greedy or not isinstance(self._rule, Rejection)
            self._is_simple[entry.row] = can_choose and is_simple(entry, vocab_size)
        if self._table is not None:
            self._table.admit(plan.admissions)

    def can_capture(self, plan: StepPlan) -> bool:
        """Whether `enqueue` can run the plan's end: every segment is a window that samples, and
        is greedy or has a temperature and nothing else."""
        return all(
            segment.is_window
            and segment.sampling_row is not None
            and self._is_simple[segment.sampling_row]
            and not segment.is_constrained
            and not segment.reports_logits
            and not segment.prompt_logprob_targets
            for segment in plan.segments
        )

    def forced_accepts(self, plan: StepPlan) -> list[int] | None:
        """Drafts of each segment that stand whatever the target says, -1 where it decides.

        None where it decides of all. After `admit`, for every plan in order; to ask again of
        the newest one changes nothing.
        """
        if self._table is None:
            return None
        if self._forced is None or self._forced[0] is not plan:
            self._forced = plan, self._force(plan, self._table)
        return self._forced[1]

    def enqueue(
        self,
        packed: PackedStep,
        stream: ResidualStream,
        taps_TNH: Tensor | None = None,
        draft_rows_YRD: Tensor | None = None,
    ) -> DeviceRows:
        """The end of a plan that `can_capture`, by shapes that do not depend on it.

        Args:
            packed: one group of windows, on the device.
            taps_TNH, draft_rows_YRD: as of `begin`.

        Returns:
            On ranks that do not sample, rows that say nothing.
        """
        step = packed.step
        assert len(step.windows) == 1 and not step.chunks, "one group of windows"
        has_confidences = self._drafter is not None and self._drafter.has_confidences
        rows = DeviceRows.empty(
            step.num_tokens,
            packed.num_segments,
            self._device,
            num_drafts=self._num_draft_tokens,
            has_confidences=has_confidences,
        )
        logits_TV = self._logits(stream, None)
        newest_2B = rows.packed.new_empty(2, packed.num_segments)
        if self._table is not None:
            self._verify_packed(packed, logits_TV, self._table, rows, newest_2B)
        if self._newest is not None:
            self._newest.note(packed.sampling_rows_B, self._tp.broadcast(newest_2B)[0])
        if self._drafter is not None:
            assert taps_TNH is not None and draft_rows_YRD is not None, "the drafter lacks input"
            with self._timed():
                self._drafter.write_context(taps_TNH, step, draft_rows_YRD)
                proposal = self._drafter.propose(
                    blocks_of_all(packed, self._tp.broadcast(newest_2B)),
                    draft_rows_YRD,
                    None
                    if self._table is None
                    else own_noise_choice(packed, newest_2B, self._table),
                )
            if proposal is not None:
                rows.store(proposal.token_ids_NK, proposal.confidences_NK)
        return rows

    def rows_of(self, plan: StepPlan, packed: np.ndarray) -> tuple[RowResult, ...]:
        """What `enqueue` left, read on the host: one row a segment, in the plan's order.

        Args:
            packed: int32, `DeviceRows.packed` copied.
        """
        has_confidences = self._drafter is not None and self._drafter.has_confidences
        return read_rows(plan, packed, self._num_draft_tokens, has_confidences=has_confidences)

    def enqueue_general(
        self,
        plan: StepPlan,
        packed: PackedStep,
        stream: ResidualStream,
        taps_TNH: Tensor | None = None,
        draft_rows_YRD: Tensor | None = None,
        receive_masks: Callable[[], bytes] = no_masks,
    ) -> Unread | None:
        """`begin` on a device."""
        return self.begin(plan, packed.step, stream, taps_TNH, draft_rows_YRD, receive_masks)

    def begin(
        self,
        plan: StepPlan,
        step: StepTensors,
        stream: ResidualStream,
        taps_TNH: Tensor | None = None,
        draft_rows_YRD: Tensor | None = None,
        receive_masks: Callable[[], bytes] = no_masks,
    ) -> Unread | None:
        """The end of any plan; None on ranks that do not sample.

        Args:
            step: `plan` as tensors.
            taps_TNH: what the drafter reads of the target; with a drafter only.
            draft_rows_YRD: the drafter's context rows; with a drafter only.
            receive_masks: waits for the masks of the constrained segments, if there are any.
        """
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
        return Unread(plan, sampled, finite_chunks(plan, stream.partial_TH), proposal, targets)

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
        inputs = _on_device(build_sample_inputs(plan), self._device)
        logits_RV = self._logits(stream, inputs.token_index_R)
        table = self._table
        if table is None:
            self._note_newest(inputs, None)
            return None
        allowed_RV = logits_RV
        rows = constrained_rows(plan, inputs)
        if rows:
            # As late as can be: they are made while the layers run.
            allowed_RV = mask_logits(logits_RV, rows, receive_masks())
        forced = self.forced_accepts(plan)
        if forced is not None:
            forced = [forced[index] for index in inputs.segments]
        verdict = self._rule.verify(allowed_RV, inputs, table, forced)
        table.append(inputs.sampling_rows, verdict.token_ids_R, verdict.is_output(inputs))
        self._note_newest(inputs, verdict.token_ids_R)
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

    def _note_newest(self, inputs: SampleInputs, token_ids_R: Tensor | None) -> None:
        """Keep what was chosen, if windows are chained: then there are no drafts.

        Args:
            token_ids_R: None on ranks that do not sample.
        """
        if self._newest is None:
            return
        assert inputs.windows is None, "chained to a window with drafts"
        if token_ids_R is None:
            token_ids_R = torch.empty(len(inputs.sampling_rows), device=self._device)
        ids_R = self._tp.broadcast(token_ids_R.to(torch.int32))
        self._newest.note(upload(inputs.sampling_rows, torch.int32, self._device), ids_R)

    def _propose(
        self, plan: StepPlan, step: StepTensors, sampled: Sampled | None, draft_rows_YRD: Tensor
    ) -> Proposal | None:
        """Drafts behind the segments that propose, in the plan's order."""
        proposing = [segment for segment in plan.segments if segment.proposes]
        if not proposing:
            return None
        assert self._drafter is not None
        if sampled is None:
            newest_2N = torch.empty(2, len(proposing), dtype=torch.int64, device=self._device)
        else:
            newest_2N = newest_of_proposing(plan, sampled)
        anchor_ids_N, starts_N = self._tp.broadcast(newest_2N).unbind()
        block: BlockInputs | PackedBlocks
        if step.positions_T is None:
            block = build_block_inputs(plan, step, anchor_ids_N, starts_N, self._num_draft_tokens)
        else:
            block = blocks_of_proposing(plan, step, anchor_ids_N, starts_N)
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
                to_device(wanted.token_index_P, self._device).split(_HEAD_ROWS),
                to_device(wanted.target_ids_P, self._device).split(_HEAD_ROWS),
                strict=True,
            )
            for token_index_P, target_ids_P in parts:
                logits_PV = self._logits(stream, token_index_P)
                if self._table is not None:
                    entries += prompt_logprobs(logits_PV, target_ids_P, wanted.num_top)
            targets[wanted.segment] = tuple(entries)
        return targets

    def _force(self, plan: StepPlan, table: SamplingTable) -> list[int] | None:
        sampling = [
            (index, segment.sampling_row, segment.num_draft_tokens)
            for index, segment in enumerate(plan.segments)
            if segment.sampling_row is not None
        ]
        counts = self._rule.forced_accepts(
            [row for _, row, _ in sampling], [num_drafts for _, _, num_drafts in sampling], table
        )
        if counts is None:
            return None
        forced = [-1] * len(plan.segments)
        for (index, _, _), count in zip(sampling, counts, strict=True):
            forced[index] = count
        return forced

    def _verify_packed(
        self,
        packed: PackedStep,
        logits_TV: Tensor,
        table: SamplingTable,
        rows: DeviceRows,
        newest_2B: Tensor,
    ) -> None:
        """Choices and what is accepted, into `rows`; the newest tokens into `newest_2B`."""
        step, group = packed.step, packed.step.windows[0]
        assert isinstance(group, PackedGroup) and step.positions_T is not None, "a packed step"
        choices = choose_tokens(
            logits_TV,
            SamplingRows(
                packed.sampling_rows_B,
                group.segment_T,
                step.positions_T,
                position_offset=1,
                temperatures_N=table.temperatures_N,
                seeds_N=table.seeds_N,
            ),
            out=Choices(rows.token_ids_T, torch.empty_like(rows.token_ids_T)),
        )
        count_accepted(
            choices,
            step.token_ids_T,
            group,
            packed.sampling_rows_B,
            packed.forced_accepts_B,
            out=Accepted(rows.num_accepted_B, rows.is_finite_B, newest_2B),
        )

    def _logits(self, stream: ResidualStream, token_index_R: Tensor | None) -> Tensor:
        with self._timed():
            return self._model.logits(stream, token_index_R)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.head_seconds += time.perf_counter() - began


def _on_device(inputs: SampleInputs, device: torch.device) -> SampleInputs:
    windows = inputs.windows
    if windows is not None:
        windows = windows._replace(
            segment_R=to_device(windows.segment_R, device),
            place_R=to_device(windows.place_R, device),
            draft_ids_R=to_device(windows.draft_ids_R, device),
            rows_SW=to_device(windows.rows_SW, device),
            pending=PendingTokens(*(to_device(tensor, device) for tensor in windows.pending)),
        )
    return inputs._replace(
        token_index_R=to_device(inputs.token_index_R, device),
        positions_R=to_device(inputs.positions_R, device),
        windows=windows,
    )
