"""A step plan as tensors.

Owns the one translation from a plan's numbers to what the layers index with; every stage
and rank gets equal tensors from an equal plan. Nothing here depends on a model's weights.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stagecoach.kernels.chunk_layout import lay_out_chunks
from stagecoach.kernels.ragged import BlockInputs, BlockRun, SegmentGroup, StepTensors
from stagecoach.kernels.saves import GroupSaves, StateSaves
from stagecoach.runner.sampling_table import PendingTokens
from stagecoach.schedule.step_plan import Segment, StepPlan

# Padded tokens x context that cost less than one more kernel call.
_FREE_PADDING = 4096


class WindowRows(NamedTuple):
    """The drafts among the sampled rows: S segments, J most drafts, W = 1 + J."""

    num_drafts_S: list[int]
    segment_R: Tensor  # int64, which of the S each row belongs to
    place_R: Tensor  # int64, its place among that segment's rows
    draft_ids_R: Tensor  # int64, the draft that follows; -1 behind the last row of a segment
    rows_SW: Tensor  # int64, the rows of each segment; its last row where there is none
    pending: PendingTokens  # the drafts before each row


class SampleInputs(NamedTuple):
    """Which flat tokens the last stage turns into logits, by segment."""

    segments: tuple[int, ...]  # index in the plan of each of the S segments that sample
    first_rows: list[int]  # where the rows of each begin
    # int64: the last token of a segment, in a window the anchor and every draft
    token_index_R: Tensor
    sampling_rows: list[int]
    positions_R: Tensor  # int64, index, within the request, of the token that is sampled
    windows: WindowRows | None  # None where no segment has drafts


class TargetInputs(NamedTuple):
    """Prompt logprobs that one segment wants."""

    segment: int  # index in the plan
    token_index_P: Tensor  # int64, the flat token that predicts each target
    target_ids_P: Tensor  # int64
    num_top: int


def build_step_tensors(plan: StepPlan, block_size: int) -> StepTensors:
    """Tensors of `plan` for pages of `block_size` tokens."""
    num_windows = sum(segment.is_window for segment in plan.segments)
    token_ids = np.fromiter(
        chain.from_iterable(segment.token_ids for segment in plan.segments),
        dtype=np.int64,
        count=plan.num_tokens,
    )
    windows, chunks = (
        [_build_group(alike, block_size) for alike in split_by_shape(segments)]
        for segments in (plan.segments[:num_windows], plan.segments[num_windows:])
    )
    return StepTensors(
        num_tokens=plan.num_tokens,
        token_ids_T=torch.from_numpy(token_ids),
        cache_rows_T=torch.from_numpy(np.concatenate([rows_T for _, rows_T in windows + chunks])),
        windows=tuple(group for group, _ in windows),
        chunks=tuple(group for group, _ in chunks),
    )


def split_by_shape(segments: tuple[Segment, ...]) -> list[tuple[Segment, ...]]:
    """Runs of neighbours for which padding to the largest wastes little.

    Attention costs tokens x context of every padded segment. A run ends where padding would
    more than double that, unless the whole is too small to matter beside a kernel call. The
    plan has segments in order of context, so that runs are long.
    """
    ends = list(accumulate(_runs([(item.num_tokens, item.end) for item in segments]), initial=0))
    return [segments[first:end] for first, end in pairwise(ends)]


def _runs(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Lengths of the runs of `split_by_shape`, for (tokens, context) of each."""
    lengths: list[int] = []
    real = width = context = 0
    for num_tokens, end in shapes:
        real += num_tokens * end
        width, context = max(width, num_tokens), max(context, end)
        if lengths and (lengths[-1] + 1) * width * context <= 2 * real + _FREE_PADDING:
            lengths[-1] += 1
        else:
            lengths.append(1)
            real, width, context = num_tokens * end, num_tokens, end
    return lengths


def build_sample_inputs(plan: StepPlan) -> SampleInputs:
    """The rows of the plan's flat token axis that are sampled from."""
    ends = np.cumsum([segment.num_tokens for segment in plan.segments])
    indices = tuple(
        index for index, segment in enumerate(plan.segments) if segment.sampling_row is not None
    )
    segments = [plan.segments[index] for index in indices]
    last_token_S = ends[list(indices)] - 1
    inputs = SampleInputs(
        segments=indices,
        first_rows=list(range(len(indices))),
        token_index_R=torch.from_numpy(last_token_S),
        sampling_rows=[segment.sampling_row or 0 for segment in segments],
        positions_R=_int64([segment.end for segment in segments]),
        windows=None,
    )
    if not any(segment.num_draft_tokens for segment in segments):
        return inputs
    return _with_windows(inputs, segments, last_token_S)


def _with_windows(
    inputs: SampleInputs, segments: list[Segment], last_token_S: np.ndarray
) -> SampleInputs:
    """One row for every token of a window, where `inputs` has one a segment."""
    num_drafts = [segment.num_draft_tokens for segment in segments]
    num_drafts_S = np.array(num_drafts, dtype=np.int64)
    last_row_S = np.cumsum(1 + num_drafts_S) - 1
    first_row_S = last_row_S - num_drafts_S
    most_drafts = max(num_drafts)

    segment_R = np.repeat(np.arange(len(segments)), 1 + num_drafts_S)
    place_R = np.arange(len(segment_R)) - first_row_S[segment_R]
    # From the end, negative: the last row of a segment stands at its last token.
    offset_R = place_R - num_drafts_S[segment_R]
    draft_ids_R = np.full(len(segment_R), -1, dtype=np.int64)
    draft_ids_R[offset_R < 0] = np.fromiter(
        chain.from_iterable(
            segment.token_ids[segment.num_tokens - segment.num_draft_tokens :]
            for segment in segments
        ),
        dtype=np.int64,
        count=num_drafts_S.sum(),
    )
    rows_SW = np.minimum(first_row_S[:, None] + np.arange(1 + most_drafts), last_row_S[:, None])
    drafts_SJ = np.maximum(draft_ids_R[rows_SW[:, :most_drafts]], 0)
    return inputs._replace(
        first_rows=first_row_S.tolist(),
        token_index_R=torch.from_numpy(last_token_S[segment_R] + offset_R),
        sampling_rows=np.array(inputs.sampling_rows)[segment_R].tolist(),
        positions_R=inputs.positions_R[torch.from_numpy(segment_R)] + torch.from_numpy(offset_R),
        windows=WindowRows(
            num_drafts_S=num_drafts,
            segment_R=torch.from_numpy(segment_R),
            place_R=torch.from_numpy(place_R),
            draft_ids_R=torch.from_numpy(draft_ids_R),
            rows_SW=torch.from_numpy(rows_SW),
            pending=PendingTokens(
                token_ids_RJ=torch.from_numpy(drafts_SJ[segment_R]),
                is_real_RJ=torch.from_numpy(np.arange(most_drafts) < place_R[:, None]),
            ),
        ),
    )


def build_block_inputs(
    plan: StepPlan,
    step: StepTensors,
    anchor_ids_N: Tensor,
    starts_N: Tensor,
    num_draft_tokens: int,
) -> BlockInputs:
    """The blocks behind the segments that propose, at least one.

    Args:
        step: `build_step_tensors(plan)`.
        anchor_ids_N, starts_N: as in `BlockInputs`; a start is at most its segment's end.
        num_draft_tokens: tokens of a block.
    """
    ends = [segment.end for segment in plan.segments if segment.proposes]
    runs, first = [], 0
    for num_blocks in _runs([(num_draft_tokens, end) for end in ends]):
        runs.append(BlockRun(num_blocks, max(ends[first : first + num_blocks])))
        first += num_blocks
    return BlockInputs(anchor_ids_N, starts_N, _block_context(plan, step), tuple(runs))


def _block_context(plan: StepPlan, step: StepTensors) -> Tensor:
    """`BlockInputs.context_rows_NL`: those of the groups, padded to the longest."""
    parts = []
    first = 0
    for span in step.spans():
        assert isinstance(span.group, SegmentGroup), "a block of a packed step is built elsewhere"
        rows_BL = span.group.context_rows_BL
        segments = plan.segments[first : first + len(rows_BL)]
        first += len(segments)
        proposing = [index for index, segment in enumerate(segments) if segment.proposes]
        if proposing:
            is_all = len(proposing) == len(segments)
            parts.append(rows_BL if is_all else rows_BL[_int64(proposing)])
    if len(parts) == 1:
        return parts[0]
    longest = max(rows_BL.shape[1] for rows_BL in parts)
    return torch.cat(
        [functional.pad(rows_BL, (0, longest - rows_BL.shape[1])) for rows_BL in parts]
    )


def build_target_inputs(plan: StepPlan) -> list[TargetInputs]:
    """The prompt logprobs that the plan's segments want; mostly none."""
    targets = []
    offset = 0
    for index, segment in enumerate(plan.segments):
        if segment.prompt_logprob_targets:
            targets.append(
                TargetInputs(
                    segment=index,
                    token_index_P=torch.arange(
                        offset, offset + len(segment.prompt_logprob_targets)
                    ),
                    target_ids_P=_int64(segment.prompt_logprob_targets),
                    num_top=segment.num_prompt_logprobs,
                )
            )
        offset += segment.num_tokens
    return targets


def _build_group(segments: tuple[Segment, ...], block_size: int) -> tuple[SegmentGroup, np.ndarray]:
    """The group of `segments`, and the cache row of each of their tokens."""
    lengths_B = np.array([segment.num_tokens for segment in segments], dtype=np.int64)
    starts_B = np.array([segment.start for segment in segments], dtype=np.int64)
    ends_B = starts_B + lengths_B
    offsets_B = np.cumsum(lengths_B) - lengths_B
    num_tokens, max_length = int(lengths_B.sum()), int(lengths_B.max())

    places_W = np.arange(max_length)
    is_real_BW = places_W < lengths_B[:, None]
    pad_index_BW = np.where(is_real_BW, offsets_B[:, None] + places_W, 0)
    flat_index_T = np.flatnonzero(is_real_BW)

    context_rows_BL = _context_rows(segments, ends_B, block_size)
    segment_T = flat_index_T // max_length
    position_T = starts_B[segment_T] + flat_index_T % max_length
    saves = _build_saves(segments)
    group = SegmentGroup(
        num_tokens=num_tokens,
        max_length=max_length,
        lengths_B=torch.from_numpy(lengths_B),
        starts_B=torch.from_numpy(starts_B),
        pad_index_BW=torch.from_numpy(pad_index_BW),
        is_real_BW=torch.from_numpy(is_real_BW),
        flat_index_T=torch.from_numpy(flat_index_T),
        read_slots_B=_int64([segment.read_slot for segment in segments]),
        write_slots_B=_int64([segment.write_slot for segment in segments]),
        replay_B=_int64([segment.replay for segment in segments]),
        max_replay=max(segment.replay for segment in segments),
        num_drafts_B=_int64([segment.num_draft_tokens for segment in segments]),
        max_drafts=max(segment.num_draft_tokens for segment in segments),
        context_rows_BL=torch.from_numpy(context_rows_BL),
        context_lengths_B=torch.from_numpy(ends_B),
        saves=saves,
        chunk_layout=None if segments[0].is_window else lay_out_chunks(lengths_B, saves),
    )
    return group, context_rows_BL[segment_T, position_T]


def _build_saves(segments: tuple[Segment, ...]) -> GroupSaves | None:
    rows = [
        (index, save.position - segment.start, save.slot)
        for index, segment in enumerate(segments)
        for save in segment.saves
    ]
    if not rows:
        return None
    segment_E, num_tokens_E, slots_E = np.array(rows, dtype=np.int64).T
    replay_B = np.array([segment.replay for segment in segments], dtype=np.int64)
    num_replayed_E = np.where(num_tokens_E > 0, replay_B.max(), replay_B[segment_E])
    stop_E = num_replayed_E + num_tokens_E
    order_E = np.argsort(stop_E, kind="stable")
    return GroupSaves(
        states=StateSaves(
            rows_E=torch.from_numpy(segment_E[order_E]),
            slots_E=torch.from_numpy(slots_E[order_E]),
            stops=tuple(stop_E[order_E].tolist()),
        ),
        num_tokens_E=torch.from_numpy(num_tokens_E[order_E]),
    )


def _context_rows(segments: tuple[Segment, ...], ends_B: np.ndarray, block_size: int) -> np.ndarray:
    """Cache row of each position [0, end) of each segment; row 0 past the end."""
    table = np.frombuffer(b"".join(segment.page_table for segment in segments), dtype=np.int32)
    num_pages_B = np.array([len(segment.page_table) // 4 for segment in segments])
    # Beyond a table's end stands the null page, which must never be written.
    assert (num_pages_B * block_size >= ends_B).all(), f"too few pages: {segments}"
    pages_BP = np.zeros((len(segments), int(num_pages_B.max())), dtype=np.int64)
    pages_BP[np.arange(pages_BP.shape[1]) < num_pages_B[:, None]] = table
    rows_BL = (pages_BP[:, :, None] * block_size + np.arange(block_size)).reshape(
        len(segments), -1
    )[:, : int(ends_B.max())]
    return np.where(np.arange(rows_BL.shape[1]) < ends_B[:, None], rows_BL, 0)


def _int64(values: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
