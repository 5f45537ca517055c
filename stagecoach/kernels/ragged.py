"""Segments of unlike lengths on one flat token axis.

Operators take flat tensors [T, ...] and a SegmentGroup that says which tokens belong
together; reference implementations pad to [B, W, ...] with `pad` and come back with `flat`.

Dimensions: T tokens of the group, B segments, W the longest segment, L the longest context.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.chunk_layout import ChunkLayout
from stagecoach.kernels.saves import GroupSaves


class SegmentGroup(NamedTuple):
    """Segments that one operator call runs together: windows, or chunks, of alike lengths.

    Built once a step by `runner/step_inputs.py`; every layer reads it.
    """

    num_tokens: int  # T
    max_length: int  # W
    lengths_B: Tensor  # int64, tokens of each segment in this step
    starts_B: Tensor  # int64, tokens computed before this step (position of the first token)
    pad_index_BW: Tensor  # int64, flat token of each padded place; 0 where nothing is
    is_real_BW: Tensor  # bool, False where padded
    flat_index_T: Tensor  # int64, b * W + w of each flat token
    read_slots_B: Tensor  # int64; slot 0 holds zeros
    write_slots_B: Tensor  # int64
    replay_B: Tensor  # int64, recorded rows of the read slot to fold in first
    max_replay: int  # the largest of them, known without asking the device
    num_drafts_B: Tensor  # int64, the uncertain tail of each segment: recorded, not folded
    max_drafts: int
    context_rows_BL: Tensor  # int64, cache row of each position [0, end); 0 past the end
    context_lengths_B: Tensor  # int64, end = start + length
    saves: GroupSaves | None = None  # None: no segment files a state
    chunk_layout: ChunkLayout | None = None  # what the chunked form of KDA goes by

    def pad(self, x_T: Tensor, fill: float = 0.0) -> Tensor:
        """[T, ...] -> [B, W, ...], `fill` where no token is; a view when nothing is padded."""
        if self.num_tokens == self.pad_index_BW.numel():
            return x_T.reshape(-1, self.max_length, *x_T.shape[1:])
        x_BW = x_T[self.pad_index_BW]
        mask = self.is_real_BW.reshape(*self.is_real_BW.shape, *(1,) * (x_T.dim() - 1))
        return torch.where(mask, x_BW, fill)

    def flat(self, x_BW: Tensor) -> Tensor:
        """[B, W, ...] -> [T, ...]; a view when nothing is padded."""
        x_flat = x_BW.flatten(0, 1)
        if self.num_tokens == self.pad_index_BW.numel():
            return x_flat
        return x_flat[self.flat_index_T]


class BlockRun(NamedTuple):
    """Neighbouring blocks whose contexts are of alike lengths, so that padding wastes little."""

    num_blocks: int
    longest: int  # positions of the longest context


class BlockInputs(NamedTuple):
    """Where the drafter's blocks stand: N of them, one a segment that proposes.

    L is the longest context.
    """

    anchor_ids_N: Tensor  # int64, the newest token of each request
    starts_N: Tensor  # int64, position of the anchor: so many rows of context lie before it
    context_rows_NL: Tensor  # int64, cache row of each position; past `starts_N` any row
    runs: tuple[BlockRun, ...]  # in order, N blocks in all


class GroupSpan(NamedTuple):
    """A group, and where its tokens lie on the flat axis of the step."""

    tokens: slice
    group: SegmentGroup
    is_window: bool


class StepTensors(NamedTuple):
    """A step plan as tensors: what the layers of every stage index with.

    The flat token axis holds the groups' tokens in their order: windows, then chunks.
    """

    num_tokens: int
    token_ids_T: Tensor  # int64
    cache_rows_T: Tensor  # int64, MLA cache row (page * page_size + offset) of each token
    windows: tuple[SegmentGroup, ...]
    chunks: tuple[SegmentGroup, ...]

    def spans(self) -> Iterator[GroupSpan]:
        """The groups with their places on the flat token axis."""
        start = 0
        for is_window, groups in ((True, self.windows), (False, self.chunks)):
            for group in groups:
                end = start + group.num_tokens
                yield GroupSpan(slice(start, end), group, is_window)
                start = end
