"""Whether a draft runs behind its target, and whether it knows what the target says.

Owns the block pass over the taps that the layer groups left. Drafts are compared with what the
target chooses for the same text, place by place, so that no whole model is needed.

Dimensions: N blocks, L the longest context, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stagecoach.checking.layers import StepEnd
from stagecoach.checking.steps import (
    BLOCK_SIZE,
    NUM_PAGES,
    CheckStep,
    context_rows,
)
from stagecoach.checking.values import ScannedReader
from stagecoach.checking.verdict import CheckFailedError, counted
from stagecoach.config.draft import DraftConfig
from stagecoach.draft.drafter import DSparkDrafter, Proposal
from stagecoach.draft.load import DRAFT_NAMING, draft_tensors
from stagecoach.draft.model import DraftModel
from stagecoach.kernels.ragged import BlockInputs, BlockRun
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.ledger import check_checkpoint
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.slot_reads import check_slot
from stagecoach.model.weights import fill_from

# Of a text that is shorter than this at the anchor a draft knows too little.
_LEAST_CONTEXT = 6


class DraftCheckup:
    """A draft's checkpoint, then its drafter.

    Args:
        num_draft_tokens: of a block.
    """

    def __init__(
        self, folder: Path, config: DraftConfig, num_draft_tokens: int, *, is_scanning: bool
    ) -> None:
        self._folder = folder
        self._config = config
        self._num_draft_tokens = num_draft_tokens
        self._is_scanning = is_scanning
        self.reader: ScannedReader | None = None
        self._proposal: Proposal | None = None
        self._are_finite = True
        self._chosen_N: Tensor | None = None

    def check_tensors(self) -> str:
        """Open every file, and compare names, shapes and types with what the draft needs."""
        reader = ScannedReader(self._folder, DRAFT_NAMING, is_scanning=self._is_scanning)
        files = reader.open_all()
        needed = draft_tensors(self._config)
        check_checkpoint(self._folder, reader.stored, needed)
        for slot in needed.values():
            check_slot(reader, slot)
        self.reader = reader
        num_skipped = sum(reader.skipped.values())
        return (
            f"{len(needed)} tensors in {counted(len(files), 'file')}, each as the config says; "
            f"{num_skipped} of the target's passed over"
        )

    def run(
        self,
        target: StageModel,
        dtype: torch.dtype,
        steps: Sequence[CheckStep],
        ends: Sequence[StepEnd],
    ) -> None:
        """Propose behind many places of the texts that the target ran.

        Args:
            target: its last layers, with embedding and head.
            ends: taps and logits of the steps.
        """
        assert self.reader is not None, "the draft's tensors were not checked"
        draft = DraftModel(self._config, SingleRank(), dtype)
        fill_from(self.reader, draft.slots, None)
        self._propose(draft, target, dtype, steps, ends)

    @torch.inference_mode()
    def _propose(
        self,
        draft: DraftModel,
        target: StageModel,
        dtype: torch.dtype,
        steps: Sequence[CheckStep],
        ends: Sequence[StepEnd],
    ) -> None:
        drafter = DSparkDrafter(draft, target.embedding, target.head, self._num_draft_tokens)
        rows_YRD = torch.zeros(
            self._config.num_layers,
            NUM_PAGES * BLOCK_SIZE,
            self._config.cache_row_width(1),
            dtype=dtype,
        )
        chosen: dict[tuple[int, int], int] = {}
        token_ids: dict[tuple[int, int], int] = {}
        for step, end in zip(steps, ends, strict=True):
            assert end.taps_TNH is not None, "a step without taps"
            drafter.write_context(end.taps_TNH, step.tensors, rows_YRD)
            chosen |= zip(step.places, end.logits_TV.argmax(-1).tolist(), strict=True)
            token_ids |= zip(step.places, step.tensors.token_ids_T.tolist(), strict=True)
        anchors = sorted(place for place in chosen if place[1] >= _LEAST_CONTEXT)
        self._chosen_N = torch.tensor([chosen[place] for place in anchors])
        self._proposal = drafter.propose(
            _blocks(anchors, [token_ids[place] for place in anchors]), rows_YRD, self._choose
        )

    def judge(self) -> str:
        """What the blocks show; raises CheckFailedError."""
        proposal, chosen_N = self._proposal, self._chosen_N
        assert proposal is not None and chosen_N is not None, "the draft did not run"
        confidences_NK = proposal.confidences_NK
        if not self._are_finite:
            raise CheckFailedError("NaN or infinity in the logits of a block")
        if confidences_NK is not None and not confidences_NK.isfinite().all():
            raise CheckFailedError("NaN or infinity in the confidences of a block")
        num_right = int((proposal.token_ids_NK[:, 0] == chosen_N).sum())
        return (
            f"blocks of {self._num_draft_tokens} behind {len(chosen_N)} places are finite; the "
            f"first draft is what the target chooses at {num_right} of them"
        )

    def _choose(self, place: int, logits_NV: Tensor, before_NJ: Tensor) -> Tensor:
        """The likeliest token, whatever stands beside it."""
        self._are_finite = self._are_finite and bool(logits_NV.isfinite().all())
        return logits_NV.argmax(-1)


def _blocks(anchors: Sequence[tuple[int, int]], anchor_ids: Sequence[int]) -> BlockInputs:
    starts = [position for _, position in anchors]
    longest = max(starts)
    return BlockInputs(
        anchor_ids_N=torch.tensor(anchor_ids),
        starts_N=torch.tensor(starts),
        context_rows_NL=context_rows([text for text, _ in anchors], longest),
        runs=(BlockRun(len(anchors), longest),),
    )
