"""Which states the segments of a group file beside what they compute, and where.

Built once a step by `runner/step_inputs.py`. A recurrent operator holds the states of all
segments side by side and moves them on together; its *stops* are the moments at which one of
them may be copied out, numbered in the order it comes to them.

Dimensions: S slots, B segments, E saves, I those of them that lie inside a chunk.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import torch
from torch import Tensor


class StateSaves(NamedTuple):
    """E copies out of the states of a batch, by rising stop."""

    rows_E: Tensor  # int64, index in the batch
    slots_E: Tensor  # int64, all different, and read or written by nobody else in the step
    stops: tuple[int, ...]  # known without asking the device

    def file(self, stop: int, state_BHVK: Tensor, state_SHVK: Tensor) -> None:
        """Copy what is due at `stop` from the batch to the pool."""
        due = slice(bisect_left(self.stops, stop), bisect_right(self.stops, stop))
        if due.start < due.stop:
            states = state_BHVK.index_select(0, self.rows_E[due])
            state_SHVK.index_copy_(0, self.slots_E[due], states)


NO_SAVES = StateSaves(torch.empty(0), torch.empty(0), ())


class GroupSaves(NamedTuple):
    """The saves of a group as token by token comes to them: the rows are its segments.

    Stop r, from 1 to the longest replay R, is behind the r-th replayed row; stop R + n is
    behind the n-th token of the step.
    """

    states: StateSaves
    # int64, position of the save − start of its segment: tokens of the step that it holds; 0
    # or less where replayed rows are left out.
    num_tokens_E: Tensor


class ChunkSaves(NamedTuple):
    """The same saves as chunk by chunk comes to them: the rows are the layout's `order_B`.

    Stop n is before the n-th chunk of each segment, the last one behind the end of all. A save
    inside a chunk is copied before it, from where its first `num_tokens_I` tokens lead on.
    """

    states: StateSaves
    slots_I: Tensor  # int64
    chunk_I: Tensor  # int64, index among all chunks of the group
    num_tokens_I: Tensor  # int64, at least 1 and less than a chunk
