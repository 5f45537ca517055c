"""A step plan as one block of int32 on an accelerator.

Owns where each number lies in the block, how a plan is written there without a loop over tokens,
and the pinned buffers that it is copied from. Equal plans make equal blocks on every rank.
Nothing here depends on a model's weights.

Dimensions: T tokens, B segments, S = B + 1, E saves, P pages of all segments.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stagecoach.kernels.ragged import PackedGroup, PackedSaves, StepTensors
from stagecoach.schedule.step_plan import Segment, StepPlan

NOBODY = -1
_CHAINED = (-1,)  # the token is filled in on the device (`newest_tokens.py`)

# Fields begin at multiples of so many values: 16 bytes, which kernels are specialised on.
_ALIGNMENT = 4
_NUM_COLUMNS = 9


class GroupBounds(NamedTuple):
    """For how much a group has room, and how large its numbers may get."""

    num_tokens: int
    num_segments: int
    max_length: int
    max_context: int
    max_replay: int
    max_drafts: int
    num_saves: int  # 0: the group has no saves
    num_context: int = 0  # positions of all contexts; 0: only the pages bound them


class StepBounds(NamedTuple):
    """Those of a step's groups; None: there is no such group."""

    windows: GroupBounds | None
    chunks: GroupBounds | None

    @property
    def groups(self) -> tuple[GroupBounds, ...]:
        return tuple(group for group in self if group is not None)

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)

    @property
    def num_segments(self) -> int:
        return sum(group.num_segments for group in self.groups)


class PackedStep(NamedTuple):
    """A step on an accelerator; all tensors are views of one block, rewritten by the next step.

    B counts the segments of all groups, windows first.
    """

    step: StepTensors
    sampling_rows_B: Tensor  # int32, row of the sampling table; -1: samples nothing
    forced_accepts_B: Tensor  # int32, drafts that a synthetic rule accepts; -1: it is judged
    proposes_B: Tensor  # int32, 1 where the drafter proposes
    num_segments: int  # B


class _GroupPlaces(NamedTuple):
    """Where the fields of a group lie in the block."""

    offsets: slice
    segment: slice
    starts: slice
    read_slots: slice
    write_slots: slice
    replay: slice
    num_drafts: slice
    first_pages: slice
    first_saves: slice | None
    save_tokens: slice | None
    save_slots: slice | None


class _Places(NamedTuple):
    """Where everything lies; the pages come last, so that only those of the plan are copied."""

    num_real: slice
    token_ids: slice
    cache_rows: slice
    positions: slice
    sampling_rows: slice
    forced_accepts: slice
    proposes: slice
    groups: tuple[_GroupPlaces, ...]
    first_page: int  # also the number of values before


class PackedInputs:
    """Packs plans, one after the other, for one device.

    Args:
        num_values: size of the block at a fixed address; a plan that needs more gets a block of
            its own, which a captured graph cannot read.
        num_buffers: copies that may be under way.
    """

    def __init__(
        self, block_size: int, device: torch.device, *, num_values: int, num_buffers: int
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._is_pinned = device.type == "cuda"
        self._block_I = torch.zeros(num_values, dtype=torch.int32, device=device)
        self._buffers = [self._make_buffer(num_values) for _ in range(num_buffers)]
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers
        self._turn = 0

    def fits(self, plan: StepPlan, bounds: StepBounds) -> bool:
        """Whether `plan`, of windows alone, can be packed into the fixed block with `bounds`."""
        room = bounds.windows
        if room is None or bounds.chunks is not None:
            return False
        num_pages = sum(len(segment.page_table) for segment in plan.segments) // 4
        num_saves = sum(len(segment.saves) for segment in plan.segments)
        return (
            len(plan.segments) <= room.num_segments
            and num_saves <= room.num_saves
            and _places(bounds).first_page + num_pages <= len(self._block_I)
            and all(
                segment.is_window
                and segment.num_tokens <= room.max_length
                and segment.end <= room.max_context
                and segment.replay <= room.max_replay
                for segment in plan.segments
            )
        )

    def view(self, bounds: StepBounds) -> PackedStep:
        """The fixed block as a step of those bounds, whatever it holds."""
        return self._views(self._block_I, bounds)

    def clear(self, bounds: StepBounds) -> None:
        """Make the fixed block an empty step of those bounds: nothing in it is anybody's."""
        buffer_I = self._next_buffer(_places(bounds).first_page)
        self._write_nothing(buffer_I.numpy(), bounds)
        self._copy(buffer_I[: _places(bounds).first_page], self._block_I)

    def pack(
        self,
        plan: StepPlan,
        bounds: StepBounds | None = None,
        forced_accepts: Sequence[int] | None = None,
        into: PackedStep | None = None,
    ) -> PackedStep:
        """Write `plan`, and have it copied to the device on the current stream.

        Args:
            bounds: of a plan of windows alone, which `fits`; None: exactly those of the plan.
            forced_accepts: one a segment, -1 where drafts are judged; None: they all are.
            into: `view(bounds)`, if it is at hand.
        """
        is_fixed = bounds is not None
        if bounds is None:
            bounds = exact_bounds(plan)
        table_P = np.frombuffer(
            b"".join([segment.page_table for segment in plan.segments]), dtype=np.int32
        )
        first_page = _places(bounds).first_page
        size = first_page + len(table_P)
        buffer_I = self._next_buffer(size)
        values_I = buffer_I.numpy()
        self._write_nothing(values_I, bounds)
        values_I[first_page:size] = table_P
        self._write(values_I, plan, bounds, table_P, forced_accepts)
        block_I = self._block_I
        if size > len(block_I):
            assert not is_fixed, f"{size} values do not fit the block of {len(block_I)}:\n{plan}"
            block_I = torch.empty(size, dtype=torch.int32, device=self._device)
        self._copy(buffer_I[:size], block_I)
        return into if into is not None else self._views(block_I, bounds)

    def _write_nothing(self, values_I: np.ndarray, bounds: StepBounds) -> None:
        places = _places(bounds)
        values_I[: places.first_page] = 0
        for field in (
            places.cache_rows,
            places.sampling_rows,
            places.forced_accepts,
            *(group.segment for group in places.groups),
        ):
            values_I[field] = NOBODY

    def _write(
        self,
        values_I: np.ndarray,
        plan: StepPlan,
        bounds: StepBounds,
        table_P: np.ndarray,
        forced_accepts: Sequence[int] | None,
    ) -> None:
        places = _places(bounds)
        segments = plan.segments
        columns = np.fromiter(
            chain.from_iterable(map(_columns, segments)),
            dtype=np.int32,
            count=_NUM_COLUMNS * len(segments),
        ).reshape(-1, _NUM_COLUMNS)
        lengths_B, starts_B, num_pages_B = columns[:, 0], columns[:, 1], columns[:, 6]
        ends_B = np.cumsum(lengths_B, dtype=np.int32)
        offsets_B = ends_B - lengths_B
        last_pages_B = np.cumsum(num_pages_B, dtype=np.int32)
        first_pages_B = last_pages_B - num_pages_B
        # Behind a table's end stands the next segment's, which must never be written.
        assert (num_pages_B * self._block_size >= starts_B + lengths_B).all(), (
            f"too few pages:\n{plan}"
        )
        num_tokens = int(ends_B[-1])
        segment_T = np.repeat(np.arange(len(segments), dtype=np.int32), lengths_B)
        positions_T = np.arange(num_tokens, dtype=np.int32) + (starts_B - offsets_B)[segment_T]
        page_T, place_T = np.divmod(positions_T, np.int32(self._block_size))
        rows_T = table_P[first_pages_B[segment_T] + page_T] * self._block_size + place_T

        values_I[places.num_real] = num_tokens
        token_ids_T = values_I[places.token_ids]
        token_ids_T[:num_tokens] = np.fromiter(
            chain.from_iterable([segment.token_ids or _CHAINED for segment in segments]),
            dtype=np.int32,
            count=num_tokens,
        )
        values_I[places.cache_rows][:num_tokens] = rows_T
        values_I[places.positions][:num_tokens] = positions_T
        values_I[places.sampling_rows][: len(segments)] = columns[:, 7]
        values_I[places.proposes][: len(segments)] = columns[:, 8]
        if forced_accepts is not None:
            values_I[places.forced_accepts][: len(segments)] = forced_accepts
        first = 0
        num_windows = sum(map(_is_window, segments)) if bounds.chunks is not None else len(segments)
        spans = [slice(0, num_windows), slice(num_windows, len(segments))]
        if bounds.windows is None:
            spans = [spans[1]]
        for group, span in zip(places.groups, spans, strict=False):
            count = span.stop - span.start
            last = first + int(lengths_B[span].sum())
            values_I[group.segment][: last - first] = segment_T[first:last] - span.start
            offsets_S = values_I[group.offsets]
            offsets_S[1 : 1 + count] = ends_B[span] - first
            offsets_S[1 + count :] = last - first
            for field, column_B in (
                (group.starts, starts_B),
                (group.read_slots, columns[:, 2]),
                (group.write_slots, columns[:, 3]),
                (group.replay, columns[:, 4]),
                (group.num_drafts, columns[:, 5]),
                (group.first_pages, first_pages_B),
            ):
                values_I[field][:count] = column_B[span]
            _write_saves(values_I, group, segments[span])
            first = last

    def _views(self, block_I: Tensor, bounds: StepBounds) -> PackedStep:
        places = _places(bounds)
        pages_P = block_I[places.first_page :]
        groups = []
        for room, group in zip(bounds.groups, places.groups, strict=True):
            saves = None
            if group.first_saves is not None:
                saves = PackedSaves(
                    first_S=block_I[group.first_saves],
                    num_tokens_E=block_I[group.save_tokens],
                    slots_E=block_I[group.save_slots],
                )
            groups.append(
                PackedGroup(
                    num_tokens=room.num_tokens,
                    num_segments=room.num_segments,
                    max_length=room.max_length,
                    max_context=room.max_context,
                    max_replay=room.max_replay,
                    max_drafts=room.max_drafts,
                    offsets_S=block_I[group.offsets],
                    segment_T=block_I[group.segment],
                    starts_B=block_I[group.starts],
                    read_slots_B=block_I[group.read_slots],
                    write_slots_B=block_I[group.write_slots],
                    replay_B=block_I[group.replay],
                    num_drafts_B=block_I[group.num_drafts],
                    first_pages_B=block_I[group.first_pages],
                    pages_P=pages_P,
                    block_size=self._block_size,
                    saves=saves,
                    num_context=room.num_context,
                )
            )
        num_windows = int(bounds.windows is not None)
        step = StepTensors(
            num_tokens=bounds.num_tokens,
            token_ids_T=block_I[places.token_ids],
            cache_rows_T=block_I[places.cache_rows],
            windows=tuple(groups[:num_windows]),
            chunks=tuple(groups[num_windows:]),
            positions_T=block_I[places.positions],
            num_real_1=block_I[places.num_real],
        )
        return PackedStep(
            step=step,
            sampling_rows_B=block_I[places.sampling_rows],
            forced_accepts_B=block_I[places.forced_accepts],
            proposes_B=block_I[places.proposes],
            num_segments=bounds.num_segments,
        )

    def _next_buffer(self, size: int) -> Tensor:
        """A host buffer that nothing is copied from any more."""
        self._turn = (self._turn + 1) % len(self._buffers)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = self._make_buffer(size)
        return self._buffers[self._turn]

    def _make_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._is_pinned)

    def _copy(self, source_I: Tensor, target_I: Tensor) -> None:
        target_I[: len(source_I)].copy_(source_I, non_blocking=True)
        if self._is_pinned:
            copied = self._copied[self._turn]
            if copied is None:
                copied = self._copied[self._turn] = torch.cuda.Event()
            copied.record()


def exact_bounds(plan: StepPlan) -> StepBounds:
    """Room for `plan` and nothing else."""
    num_windows = sum(map(_is_window, plan.segments))
    return StepBounds(
        _bounds_of(plan.segments[:num_windows]), _bounds_of(plan.segments[num_windows:])
    )


def num_values(bounds: StepBounds, num_pages: int) -> int:
    """Size of a block that has room for a step of those bounds."""
    return _places(bounds).first_page + num_pages


def _bounds_of(segments: tuple[Segment, ...]) -> GroupBounds | None:
    if not segments:
        return None
    lengths = [segment.num_tokens for segment in segments]
    return GroupBounds(
        num_tokens=sum(lengths),
        num_segments=len(segments),
        max_length=max(lengths),
        max_context=max([segment.end for segment in segments]),
        max_replay=max([segment.replay for segment in segments]),
        max_drafts=max([segment.num_draft_tokens for segment in segments]),
        num_saves=sum([len(segment.saves) for segment in segments]),
        num_context=sum([segment.end for segment in segments]),
    )


def _is_window(segment: Segment) -> bool:
    return segment.is_window


def _columns(segment: Segment) -> tuple[int, ...]:
    """What is written of a segment once."""
    sampling_row = segment.sampling_row
    return (
        segment.num_tokens,
        segment.start,
        segment.read_slot,
        segment.write_slot,
        segment.replay,
        segment.num_draft_tokens,
        len(segment.page_table) >> 2,
        NOBODY if sampling_row is None else sampling_row,
        segment.proposes,
    )


def _write_saves(values_I: np.ndarray, group: _GroupPlaces, segments: tuple[Segment, ...]) -> None:
    if group.first_saves is None or group.save_tokens is None or group.save_slots is None:
        return
    saves = [
        (save.position - segment.start, save.slot)
        for segment in segments
        for save in sorted(segment.saves, key=lambda save: save.position)
    ]
    first_S = values_I[group.first_saves]
    first_S[1 : 1 + len(segments)] = np.cumsum([len(segment.saves) for segment in segments])
    first_S[1 + len(segments) :] = len(saves)
    if saves:
        num_tokens_E, slots_E = np.array(saves, dtype=np.int32).T
        values_I[group.save_tokens][: len(saves)] = num_tokens_E
        values_I[group.save_slots][: len(saves)] = slots_E


@lru_cache(maxsize=512)
def _places(bounds: StepBounds) -> _Places:
    end = 0

    def take(count: int) -> slice:
        nonlocal end
        start, end = end, end + -(-count // _ALIGNMENT) * _ALIGNMENT
        return slice(start, start + count)

    num_tokens, num_segments = bounds.num_tokens, bounds.num_segments
    num_real = take(1)
    per_token = [take(num_tokens) for _ in range(3)]
    per_segment = [take(num_segments) for _ in range(3)]
    groups = []
    for room in bounds.groups:
        offsets, segment = take(room.num_segments + 1), take(room.num_tokens)
        fields = [take(room.num_segments) for _ in range(6)]
        saves: list[slice | None] = [None] * 3
        if room.num_saves:
            saves = [take(room.num_segments + 1), take(room.num_saves), take(room.num_saves)]
        groups.append(_GroupPlaces(offsets, segment, *fields, *saves))
    token_ids, cache_rows, positions = per_token
    sampling_rows, forced_accepts, proposes = per_segment
    return _Places(
        num_real=num_real,
        token_ids=token_ids,
        cache_rows=cache_rows,
        positions=positions,
        sampling_rows=sampling_rows,
        forced_accepts=forced_accepts,
        proposes=proposes,
        groups=tuple(groups),
        first_page=end,
    )
