"""Segment groups for operator tests, in plain numbers."""

import random

import numpy as np
import torch

from stagecoach.kernels.chunk_layout import CHUNK_SIZE, lay_out_chunks
from stagecoach.kernels.ragged import SegmentGroup
from stagecoach.kernels.saves import GroupSaves, StateSaves


def make_group(
    lengths: list[int],
    starts: list[int] | None = None,
    read_slots: list[int] | None = None,
    write_slots: list[int] | None = None,
    context_rows: list[list[int]] | None = None,
    replay: list[int] | None = None,
    num_drafts: list[int] | None = None,
    saves: list[tuple[int, int, int]] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> SegmentGroup:
    """A group of segments with `lengths` tokens each.

    Args:
        lengths: tokens of each segment.
        starts: tokens before it; 0 by default.
        read_slots: 0 where nothing was computed before, by default segment index + 1 elsewhere.
        write_slots: segment index + 1 by default.
        context_rows: cache row of every position [0, start + length) of each segment; by
            default row 0 throughout, for operators that read no cache.
        replay: recorded rows of each read slot to fold in; none by default.
        num_drafts: the uncertain tail of each segment; none by default.
        saves: (segment, position, slot) in any order; none by default.
        chunk_size: of the chunked form.
    """
    num_segments, width = len(lengths), max(lengths)
    starts = starts or [0] * num_segments
    write_slots = write_slots or [index + 1 for index in range(num_segments)]
    replay, num_drafts = replay or [0] * num_segments, num_drafts or [0] * num_segments
    if read_slots is None:
        read_slots = [index + 1 if starts[index] else 0 for index in range(num_segments)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    rows = context_rows or [[0] * end for end in ends]
    assert [len(row) for row in rows] == ends
    pad_index, flat_index, offset = [], [], 0
    for index, length in enumerate(lengths):
        pad_index.append([offset + w if w < length else 0 for w in range(width)])
        flat_index += [index * width + w for w in range(length)]
        offset += length
    group_saves = make_saves(saves, starts, replay) if saves else None
    return SegmentGroup(
        num_tokens=offset,
        max_length=width,
        lengths_B=torch.tensor(lengths),
        starts_B=torch.tensor(starts),
        pad_index_BW=torch.tensor(pad_index),
        is_real_BW=torch.arange(width) < torch.tensor(lengths).unsqueeze(1),
        flat_index_T=torch.tensor(flat_index),
        read_slots_B=torch.tensor(read_slots),
        write_slots_B=torch.tensor(write_slots),
        replay_B=torch.tensor(replay),
        max_replay=max(replay),
        num_drafts_B=torch.tensor(num_drafts),
        max_drafts=max(num_drafts),
        context_rows_BL=torch.tensor([row + [0] * (max(ends) - len(row)) for row in rows]),
        context_lengths_B=torch.tensor(ends),
        saves=group_saves,
        # Short of it where a save needs the recurrent form.
        chunk_layout=lay_out_chunks(np.array(lengths), group_saves, chunk_size)
        if all(position > starts[segment] for segment, position, _ in saves or [])
        else None,
    )


def make_saves(
    saves: list[tuple[int, int, int]], starts: list[int], replay: list[int]
) -> GroupSaves:
    """Saves by the stop of the recurrent form at which the state is there."""

    ordered = []
    for segment, position, slot in saves:
        num_tokens = position - starts[segment]
        num_replayed = max(replay) if num_tokens > 0 else replay[segment]
        ordered.append((num_replayed + num_tokens, segment, num_tokens, slot))
    stops, segments, nums_tokens, slots = zip(*sorted(ordered), strict=True)
    return GroupSaves(
        states=StateSaves(torch.tensor(segments), torch.tensor(slots), stops),
        num_tokens_E=torch.tensor(nums_tokens),
    )


def scattered_rows(ends: list[int], page_size: int, seed: int) -> tuple[list[list[int]], int]:
    """Cache rows of contexts of `ends` tokens on shuffled pages, and the rows of the pool.

    Page 0 is the null page; about a third of the pages stays free.
    """
    counts = [-(-end // page_size) for end in ends]
    num_pages = 1 + sum(counts) + max(1, sum(counts) // 2)
    pages = list(range(1, num_pages))
    random.Random(seed).shuffle(pages)
    rows = []
    for end, count in zip(ends, counts, strict=True):
        table, pages = pages[:count], pages[count:]
        rows.append([table[p // page_size] * page_size + p % page_size for p in range(end)])
    return rows, num_pages * page_size


def cut(total: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Half-open spans that share out [0, total), of `sizes` in turn; the last size repeats."""
    spans, start = [], 0
    remaining = list(sizes)
    while start < total:
        size = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        spans.append((start, min(total, start + size)))
        start = spans[-1][1]
    return spans
