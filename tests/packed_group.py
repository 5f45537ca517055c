"""Packed groups for tests and timings of device kernels, with the reference's form of the same.

Dimensions as in `kernels/ragged.py`.
"""

from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.chunk_layout import CHUNK_SIZE
from stagecoach.kernels.ragged import PackedGroup, PackedSaves, SegmentGroup, StepTensors
from tests.cpu.kernels.group_builder import make_group


class GroupPair(NamedTuple):
    """One group twice: for the device's kernels, and on the CPU for the reference."""

    packed: PackedGroup
    segments: SegmentGroup  # of the real segments and tokens only
    cache_rows_T: Tensor  # int32, on the packed group's device; -1 for tokens that are nobody's

    @property
    def num_real_tokens(self) -> int:
        return self.segments.num_tokens


def make_packed_group(
    lengths: list[int],
    starts: list[int] | None = None,
    replay: list[int] | None = None,
    num_drafts: list[int] | None = None,
    read_slots: list[int] | None = None,
    write_slots: list[int] | None = None,
    page_tables: list[list[int]] | None = None,
    saves: list[tuple[int, int, int]] | None = None,
    capacity_segments: int | None = None,
    capacity_tokens: int | None = None,
    device: str | torch.device = "cpu",
    *,
    block_size: int = 16,
    bounds: dict[str, int] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> GroupPair:
    """A group of segments with `lengths` tokens each, followed by empty places.

    Args:
        lengths: tokens of each segment.
        starts: tokens before it; 0 by default.
        replay: recorded rows of each read slot to fold in; none by default.
        num_drafts: the uncertain tail of each segment; none by default.
        read_slots, write_slots: as in `group_builder.make_group`.
        page_tables: page ids of each segment, for all of its context; by default rising from 1.
        saves: (segment, position, slot) in any order; None: a group that never saves. An empty
            list: one whose captured kernels look for saves, and has none in this step.
        capacity_segments, capacity_tokens: B and T of the packed form; as many as are real by
            default.
        device: of the packed form.
        block_size: tokens of a page.
        bounds: any of `max_length`, `max_context`, `max_replay`, `max_drafts`, instead of what
            the segments need.
        chunk_size: of the reference's chunked form.
    """
    num_segments, num_tokens = len(lengths), sum(lengths)
    capacity_segments = capacity_segments or num_segments
    capacity_tokens = capacity_tokens or num_tokens
    assert capacity_segments >= num_segments and capacity_tokens >= num_tokens
    starts = starts or [0] * num_segments
    replay, num_drafts = replay or [0] * num_segments, num_drafts or [0] * num_segments
    if write_slots is None:
        write_slots = list(range(1, num_segments + 1))
    if read_slots is None:
        read_slots = [index + 1 if starts[index] else 0 for index in range(num_segments)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    if page_tables is None:
        counts = [-(-end // block_size) for end in ends]
        firsts = accumulate(counts, initial=1)
        page_tables = [
            list(range(first, first + count)) for first, count in zip(firsts, counts, strict=False)
        ]
    context_rows = [
        [pages[p // block_size] * block_size + p % block_size for p in range(end)]
        for pages, end in zip(page_tables, ends, strict=True)
    ]
    segments = make_group(
        lengths,
        starts,
        read_slots,
        write_slots,
        context_rows,
        replay,
        num_drafts,
        saves or None,
        chunk_size,
    )

    def int32(values: list[int], size: int, fill: int = 0) -> Tensor:
        padded = values + [fill] * (size - len(values))
        return torch.tensor(padded, dtype=torch.int32, device=device)

    def by_segment(values: list[int]) -> Tensor:
        return int32(values, capacity_segments)

    offsets = list(accumulate(lengths, initial=0))
    segment_T = list(chain.from_iterable([index] * n for index, n in enumerate(lengths)))
    first_pages = list(accumulate((len(pages) for pages in page_tables), initial=0))[:-1]
    rows_T = list(
        chain.from_iterable(rows[start:] for rows, start in zip(context_rows, starts, strict=True))
    )
    sizes = {
        "max_length": max(lengths),
        "max_context": max(ends),
        "max_replay": max(replay),
        "max_drafts": max(num_drafts),
        "num_context": sum(ends),
        **(bounds or {}),
    }
    packed = PackedGroup(
        num_tokens=capacity_tokens,
        num_segments=capacity_segments,
        offsets_S=int32(offsets, capacity_segments + 1, fill=num_tokens),
        segment_T=int32(segment_T, capacity_tokens, fill=-1),
        starts_B=by_segment(starts),
        read_slots_B=by_segment(read_slots),
        write_slots_B=by_segment(write_slots),
        replay_B=by_segment(replay),
        num_drafts_B=by_segment(num_drafts),
        first_pages_B=by_segment(first_pages),
        pages_P=torch.tensor(
            list(chain.from_iterable(page_tables)), dtype=torch.int32, device=device
        ),
        block_size=block_size,
        saves=None if saves is None else _pack_saves(saves, starts, capacity_segments, device),
        **sizes,
    )
    return GroupPair(packed, segments, int32(rows_T, capacity_tokens, fill=-1))


def _pack_saves(
    saves: list[tuple[int, int, int]],
    starts: list[int],
    capacity_segments: int,
    device: str | torch.device,
) -> PackedSaves:
    ordered = sorted(saves)
    first_S = [
        sum(segment < boundary for segment, *_ in ordered)
        for boundary in range(capacity_segments + 1)
    ]
    num_tokens = [position - starts[segment] for segment, position, _ in ordered]
    slots = [slot for *_, slot in ordered]
    return PackedSaves(
        *(
            torch.tensor(values, dtype=torch.int32, device=device)
            # A capacity of one place at least, so that there is an address.
            for values in (first_S, num_tokens or [0], slots or [0])
        )
    )


def make_step(windows: GroupPair | None = None, chunks: GroupPair | None = None) -> StepTensors:
    """A step of packed groups: windows, then chunks. Without chunks the windows may be padded.

    Token ids are 0; positions are those of the segments.
    """
    groups = [group for group in (windows, chunks) if group is not None]
    assert groups, "a step has a group"
    for group in groups[:-1]:
        assert group.packed.num_tokens == group.num_real_tokens, "only the last group is padded"
    device = groups[0].packed.offsets_S.device
    num_tokens = sum(group.packed.num_tokens for group in groups)
    positions_T = torch.cat([_positions(group.packed) for group in groups])
    return StepTensors(
        num_tokens=num_tokens,
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        cache_rows_T=torch.cat([group.cache_rows_T for group in groups]),
        windows=() if windows is None else (windows.packed,),
        chunks=() if chunks is None else (chunks.packed,),
        positions_T=positions_T,
        num_real_1=torch.tensor(
            [sum(group.num_real_tokens for group in groups)], dtype=torch.int32, device=device
        ),
    )


def make_reference_step(
    windows: GroupPair | None = None, chunks: GroupPair | None = None
) -> StepTensors:
    """The step of the same segments as the references take it; on the CPU, nothing padded."""
    groups = [group for group in (windows, chunks) if group is not None]
    rows_T = [group.cache_rows_T[: group.num_real_tokens].long().cpu() for group in groups]
    num_tokens = sum(group.num_real_tokens for group in groups)
    return StepTensors(
        num_tokens=num_tokens,
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64),
        cache_rows_T=torch.cat(rows_T),
        windows=() if windows is None else (windows.segments,),
        chunks=() if chunks is None else (chunks.segments,),
    )


def _positions(group: PackedGroup) -> Tensor:
    segment_T = group.segment_T.clamp(min=0).long()
    places_T = torch.arange(group.num_tokens, dtype=torch.int32, device=group.segment_T.device)
    positions_T = group.starts_B[segment_T] + places_T - group.offsets_S[segment_T]
    return torch.where(group.segment_T < 0, 0, positions_T)
