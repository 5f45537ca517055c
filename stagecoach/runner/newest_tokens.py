"""The newest token of each sampling row, for windows that are chained to it.

Owns one tensor on the worker's device, written by every choice of the last stage and read before
the next step computes. All ranks of the stage keep it. A row that gets another tenant keeps the
old one's token until the new one has sampled, and nobody is chained to a row before that.
"""

import msgspec
import torch
from torch import Tensor

from stagecoach.kernels.newest import fill_in_newest, note_newest
from stagecoach.kernels.ragged import PackedGroup
from stagecoach.runner.packed_inputs import PackedStep
from stagecoach.schedule.step_plan import Segment, StepPlan


class NewestTokens:
    """Of every row of the sampling table."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._newest_N = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def note(self, sampling_rows_B: Tensor, token_ids_B: Tensor) -> None:
        """Keep what the segments of a step have chosen.

        Args:
            sampling_rows_B: int32; -1 where nothing was.
            token_ids_B: int32.
        """
        note_newest(self._newest_N, sampling_rows_B, token_ids_B)

    def fill_in(self, packed: PackedStep) -> None:
        """Put them in the places of chained tokens, on the current stream."""
        for group in packed.step.windows:
            assert isinstance(group, PackedGroup), "a packed step"
            fill_in_newest(
                packed.step.token_ids_T[: group.num_tokens],
                group.segment_T,
                packed.sampling_rows_B[: group.num_segments],
                self._newest_N,
            )

    def told(self, plan: StepPlan) -> StepPlan:
        """The plan as if its tokens had all been known; waits for the device."""
        if not any(segment.is_chained for segment in plan.segments):
            return plan
        newest = self._newest_N.tolist()

        def filled(segment: Segment) -> Segment:
            if not segment.is_chained or segment.sampling_row is None:
                return segment
            token_ids = (newest[segment.sampling_row],)
            return msgspec.structs.replace(segment, token_ids=token_ids, is_chained=False)

        return msgspec.structs.replace(plan, segments=tuple(map(filled, plan.segments)))
