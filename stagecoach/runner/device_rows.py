"""What a step of windows returned on a device, as one block of int32, and how it is read.

Owns the layout of the block, which says itself how large its parts are: it is written by a
captured graph of fixed capacities, and read for a plan that fills a part of them.

    | T, B | token ids T | accepted B | finite B | drafts B x K | confidences B x K, as float32 |

Dimensions: T tokens, B segments, K drafts of a block.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stagecoach.schedule.step_plan import RowResult, StepPlan

_NUM_SIZES = 2


class DeviceRows(NamedTuple):
    """Rows of all segments; all but `packed` are views of it."""

    token_ids_T: Tensor  # int32, what the target says behind each token
    num_accepted_B: Tensor  # int32
    is_finite_B: Tensor  # int32, of the rows that count
    draft_ids_BK: Tensor | None  # int32; None without a drafter
    confidences_BK: Tensor | None  # float32; None without such a head
    packed: Tensor  # int32, all of it

    @staticmethod
    def empty(
        num_tokens: int,
        num_segments: int,
        device: torch.device,
        *,
        num_drafts: int,
        has_confidences: bool,
    ) -> "DeviceRows":
        """A new block whose sizes are written and nothing else.

        Args:
            num_drafts: K; 0 without a drafter.
        """
        sizes = [num_tokens, num_segments, num_segments]
        sizes += [num_segments * num_drafts] * (1 + has_confidences)
        packed = torch.empty(_NUM_SIZES + sum(sizes), dtype=torch.int32, device=device)
        # Filled, not copied from the host, which a captured graph could not repeat.
        packed[0].fill_(num_tokens)
        packed[1].fill_(num_segments)
        token_ids_T, num_accepted_B, is_finite_B, *blocks = packed[_NUM_SIZES:].split(sizes)
        drafts = [block.view(num_segments, num_drafts) for block in blocks]
        return DeviceRows(
            token_ids_T,
            num_accepted_B,
            is_finite_B,
            draft_ids_BK=drafts[0] if num_drafts else None,
            confidences_BK=drafts[1].view(torch.float32) if has_confidences else None,
            packed=packed,
        )

    def store(self, draft_ids_BK: Tensor, confidences_BK: Tensor | None) -> None:
        """Put drafts and their confidences in their places."""
        assert self.draft_ids_BK is not None, "rows without drafts"
        self.draft_ids_BK.copy_(draft_ids_BK)
        if self.confidences_BK is not None:
            assert confidences_BK is not None, "the confidences are missing"
            self.confidences_BK.copy_(confidences_BK)


def read_rows(
    plan: StepPlan, packed: np.ndarray, num_drafts: int, *, has_confidences: bool
) -> tuple[RowResult, ...]:
    """One row a segment, in the plan's order.

    Args:
        plan: windows only, all of which sample.
        packed: int32, `DeviceRows.packed` on the host.
        num_drafts, has_confidences: as the block was made with.
    """
    packed = packed.ravel()
    num_tokens, num_segments = packed[:_NUM_SIZES].tolist()
    count = len(plan.segments)
    assert count <= num_segments and plan.num_tokens <= num_tokens, f"rows of another plan:\n{plan}"
    ends = np.cumsum(
        [_NUM_SIZES, num_tokens, num_segments, num_segments]
        + [num_segments * num_drafts] * (1 + has_confidences)
    ).tolist()
    assert len(packed) == ends[-1], f"{len(packed)} numbers, {ends[-1]} expected"
    token_ids = packed[ends[0] : ends[0] + plan.num_tokens].tolist()
    accepted = packed[ends[1] : ends[1] + count].tolist()
    is_finite = packed[ends[2] : ends[2] + count].tolist()
    drafts: list[tuple[int, ...]] = [()] * count
    confidences: list[tuple[float, ...]] = [()] * count
    if num_drafts:
        num_values = count * num_drafts
        drafts = _in_rows(packed[ends[3] : ends[3] + num_values], num_drafts)
        if has_confidences:
            values = packed[ends[4] : ends[4] + num_values].view(np.float32)
            # A drafter that overflows is not sure of anything.
            confidences = _in_rows(np.where(np.isnan(values), 0.0, values), num_drafts)
    rows = []
    first = 0
    for index, segment in enumerate(plan.segments):
        if is_finite[index]:
            row = RowResult(
                request_id=segment.request_id,
                epoch=segment.epoch,
                token_ids=tuple(token_ids[first : first + 1 + accepted[index]]),
                draft_token_ids=drafts[index] if segment.proposes else (),
                confidences=confidences[index] if segment.proposes else (),
            )
        else:
            row = RowResult(
                request_id=segment.request_id, epoch=segment.epoch, token_ids=(), is_finite=False
            )
        rows.append(row)
        first += segment.num_tokens
    return tuple(rows)


def _in_rows(values: np.ndarray, width: int) -> list[tuple]:
    return list(map(tuple, values.reshape(-1, width).tolist()))
