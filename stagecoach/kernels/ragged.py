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


class PackedSaves(NamedTuple):
    """What the segments of a PackedGroup file beside what they compute; all int32.

    The saves of segment b are those of [first_S[b], first_S[b + 1]), by rising position.
    """

    first_S: Tensor  # [B + 1]
    # Position of the save - start of its segment, as in `GroupSaves`: 0 or less where the last
    # of the replayed rows are left out.
    num_tokens_E: Tensor
    slots_E: Tensor


class PackedGroup(NamedTuple):
    """Segments as an accelerator's kernels read them: end to end, at fixed addresses, int32.

    Sizes are capacities and bounds, so that a captured graph can be replayed with other values
    in the same tensors. Behind the real segments come empty ones (length 0, all slots 0), behind
    the real tokens some that belong to no segment: nothing is read, written or counted for them,
    and what stands in their rows of an output is undefined.

    S = B + 1; P pages of all segments.
    """

    num_tokens: int  # T
    num_segments: int  # B
    max_length: int  # W: no segment is longer
    max_context: int  # no context is longer
    max_replay: int  # no replay is longer; 0 where there are no records
    max_drafts: int  # no window has more drafts
    offsets_S: Tensor  # first token of each segment, counted within the group
    segment_T: Tensor  # which segment a token belongs to; -1: none
    starts_B: Tensor  # position of the first token; the context ends at start + length
    read_slots_B: Tensor  # slot 0 holds zeros
    write_slots_B: Tensor  # 0: nothing is written
    replay_B: Tensor
    num_drafts_B: Tensor
    first_pages_B: Tensor  # where the pages of each segment begin in `pages_P`
    pages_P: Tensor  # page ids; page n of a segment holds positions [n * block_size, ...)
    block_size: int
    saves: PackedSaves | None = None  # None: no segment files a state
    # No more positions in the contexts of all segments together; 0: only the pages bound them.
    num_context: int = 0


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


class PackedBlocks(NamedTuple):
    """Where the drafter's blocks stand, as an accelerator's kernels read it: one a segment.

    Sizes are capacities and bounds as in a PackedGroup. For a block that is not real nothing is
    read, and what stands in its rows of an output is undefined. All tensors are int32.
    """

    num_blocks: int  # N
    max_context: int  # no block starts farther
    anchor_ids_N: Tensor  # the newest token of each request
    starts_N: Tensor  # position of the anchor: so many rows of context lie before it
    is_real_N: Tensor  # 1 where a block is asked for
    first_pages_N: Tensor  # as in the PackedGroup
    pages_P: Tensor
    block_size: int  # positions of a page
    # Whether a block's token is blind to the block's later ones; the drafter says so.
    is_causal: bool = False


class RowLayout(NamedTuple):
    """How cached rows are read: the keys of G groups of heads, and their values.

    A key is [C | P] in latent attention, one group whose values are its first C columns;
    elsewhere it has one part, and the row is [keys of all groups | values of all groups].
    """

    num_groups: int  # G
    key_width: int  # C
    second_width: int  # P; 0 where a key has one part
    value_width: int
    has_own_values: bool  # False: values are the keys' first part

    @property
    def value_start(self) -> int | None:
        """Column of the first group's value, where values have columns of their own."""
        return self.num_groups * self.key_width if self.has_own_values else None


class GroupSpan(NamedTuple):
    """A group, and where its tokens lie on the flat axis of the step."""

    tokens: slice
    group: SegmentGroup | PackedGroup  # what the step was built for decides who runs it
    is_window: bool


class StepTensors(NamedTuple):
    """A step plan as tensors: what the layers of every stage index with.

    The flat token axis holds the groups' tokens in their order: windows, then chunks.
    """

    num_tokens: int
    token_ids_T: Tensor  # int64; int32 on an accelerator
    # MLA cache row (page * page_size + offset) of each token: int64; int32 on an accelerator, where
    # it is -1 for tokens that are nobody's.
    cache_rows_T: Tensor
    windows: tuple[SegmentGroup, ...] | tuple[PackedGroup, ...]
    chunks: tuple[SegmentGroup, ...] | tuple[PackedGroup, ...]
    # On an accelerator only. Tokens from `num_real_1[0]` on are nobody's.
    positions_T: Tensor | None = None  # int32, place of each token within its request
    num_real_1: Tensor | None = None  # int32 [1]

    def spans(self) -> Iterator[GroupSpan]:
        """The groups with their places on the flat token axis."""
        start = 0
        for is_window, groups in ((True, self.windows), (False, self.chunks)):
            for group in groups:
                end = start + group.num_tokens
                yield GroupSpan(slice(start, end), group, is_window)
                start = end
