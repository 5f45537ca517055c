"""A step plan as tensors.

Owns the one translation from a plan's numbers to what the layers index with; every stage
and rank gets equal tensors from an equal plan. Nothing here depends on a model's weights.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stagecoach.kernels.ragged import SegmentGroup, StepTensors
from stagecoach.schedule.step_plan import Segment, StepPlan

# Padded tokens x context that cost less than one more kernel call.
_FREE_PADDING = 4096


class SampleInputs(NamedTuple):
    """Which flat tokens the last stage turns into logits, by segment."""

    segments: tuple[int, ...]  # index in the plan of each segment that samples
    token_index_R: Tensor  # int64, the last token of each
    sampling_rows: list[int]
    positions: list[int]  # index, within the request, of the token that is sampled


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
    runs: list[tuple[Segment, ...]] = []
    first = 0
    real = width = context = 0
    for index, segment in enumerate(segments):
        real += segment.num_tokens * segment.end
        width = max(width, segment.num_tokens)
        context = max(context, segment.end)
        padded = (index + 1 - first) * width * context
        if padded > 2 * real + _FREE_PADDING:
            runs.append(segments[first:index])
            first, width, context = index, segment.num_tokens, segment.end
            real = segment.num_tokens * segment.end
    if segments:
        runs.append(segments[first:])
    return runs


def build_sample_inputs(plan: StepPlan) -> SampleInputs:
    """The rows of the plan's flat token axis that are sampled from."""
    ends = np.cumsum([segment.num_tokens for segment in plan.segments])
    sampling = tuple(
        index for index, segment in enumerate(plan.segments) if segment.sampling_row is not None
    )
    return SampleInputs(
        segments=sampling,
        token_index_R=torch.from_numpy(ends[list(sampling)] - 1),
        sampling_rows=[plan.segments[index].sampling_row or 0 for index in sampling],
        positions=[plan.segments[index].end for index in sampling],
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
        context_rows_BL=torch.from_numpy(context_rows_BL),
        context_lengths_B=torch.from_numpy(ends_B),
    )
    return group, context_rows_BL[segment_T, position_T]


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
