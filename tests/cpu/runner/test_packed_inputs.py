"""Plans as one block of int32: the same numbers as the padded tensors have, and nothing else."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.kernels.ragged import PackedGroup, SegmentGroup
from stagecoach.runner.packed_inputs import (
    GroupBounds,
    PackedInputs,
    PackedStep,
    StepBounds,
    exact_bounds,
    num_values,
)
from stagecoach.runner.step_inputs import build_step_tensors
from stagecoach.schedule.step_plan import Save, Segment, StepPlan, pack_page_table

pytestmark = pytest.mark.cpu

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def segment(
    number: int,
    start: int,
    length: int,
    *,
    num_drafts: int = 0,
    replay: int = 0,
    saves: tuple[Save, ...] = (),
    num_spare_pages: int = 0,
    samples: bool = True,
    proposes: bool = False,
) -> Segment:
    """Every number different from those of other segments."""
    num_pages = -(-(start + length) // BLOCK_SIZE) + num_spare_pages
    return Segment(
        request_id=number,
        epoch=0,
        start=start,
        token_ids=tuple(1000 * number + place for place in range(length)),
        num_draft_tokens=num_drafts,
        read_slot=2 * number if start else 0,
        replay=replay if start else 0,
        write_slot=2 * number,
        saves=saves,
        page_table=pack_page_table([100 * number + page for page in range(num_pages)]),
        sampling_row=number + 3 if samples else None,
        proposes=proposes and samples,
    )


def plan_of(*segments: Segment) -> StepPlan:
    return StepPlan(step=0, segments=segments)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=7).map(sorted))
    segments = []
    for number, is_chunk in enumerate(kinds, start=1):
        start = draw(st.integers(0, 30))
        if is_chunk:
            length = draw(st.integers(2, 9))
            first, drafts, replay = start, 0, draw(st.integers(0, 3))
        else:
            drafts = draw(st.integers(0, 3))
            length, replay = 1 + drafts, draw(st.integers(0, 3)) if start else 0
            first = start - replay
        positions = draw(st.sets(st.integers(first + 1, start + length - drafts), max_size=2))
        segments.append(
            segment(
                number,
                start,
                length,
                num_drafts=drafts,
                replay=replay,
                # In any order: what is packed is sorted.
                saves=tuple(
                    Save(position, 500 + 10 * number + place)
                    for place, position in enumerate(sorted(positions, reverse=True))
                ),
                num_spare_pages=draw(st.integers(0, 2)),
                samples=not is_chunk or draw(st.booleans()),
                proposes=draw(st.booleans()),
            )
        )
    return plan_of(*segments)


def inputs(num_values: int = 4096) -> PackedInputs:
    return PackedInputs(BLOCK_SIZE, CPU, num_values=num_values, num_buffers=2)


class OneSegment(NamedTuple):
    """What a group says of one of its segments."""

    length: int
    start: int
    read_slot: int
    write_slot: int
    replay: int
    num_drafts: int
    context_rows: list[int]
    saves: list[tuple[int, int]]


def of_reference(groups: tuple[SegmentGroup, ...]) -> Iterator[OneSegment]:
    for group in groups:
        saves: dict[int, list[tuple[int, int]]] = {}
        if group.saves is not None:
            for row, slot, num_tokens in zip(
                group.saves.states.rows_E.tolist(),
                group.saves.states.slots_E.tolist(),
                group.saves.num_tokens_E.tolist(),
                strict=True,
            ):
                saves.setdefault(row, []).append((num_tokens, slot))
        for index, end in enumerate(group.context_lengths_B.tolist()):
            numbers = (
                int(item[index])
                for item in (
                    group.lengths_B,
                    group.starts_B,
                    group.read_slots_B,
                    group.write_slots_B,
                    group.replay_B,
                    group.num_drafts_B,
                )
            )
            rows = group.context_rows_BL[index, :end].tolist()
            yield OneSegment(*numbers, rows, sorted(saves.get(index, [])))


def of_packed(groups: tuple[PackedGroup, ...]) -> Iterator[OneSegment]:
    for group in groups:
        offsets, pages = group.offsets_S.tolist(), group.pages_P.tolist()
        for index in range(group.num_segments):
            length = offsets[index + 1] - offsets[index]
            assert group.segment_T[offsets[index] : offsets[index + 1]].tolist() == [index] * length
            start, first_page = int(group.starts_B[index]), int(group.first_pages_B[index])
            rows = [
                pages[first_page + position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for position in range(start + length)
            ]
            saves: list[tuple[int, int]] = []
            if group.saves is not None:
                first, last = group.saves.first_S[index : index + 2].tolist()
                tokens_E, slots_E = group.saves.num_tokens_E, group.saves.slots_E
                saves = list(
                    zip(tokens_E[first:last].tolist(), slots_E[first:last].tolist(), strict=True)
                )
                assert saves == sorted(saves)
            yield OneSegment(
                length,
                start,
                int(group.read_slots_B[index]),
                int(group.write_slots_B[index]),
                int(group.replay_B[index]),
                int(group.num_drafts_B[index]),
                rows,
                saves,
            )


@given(plans())
def test_a_packed_plan_says_what_the_padded_tensors_say(plan: StepPlan) -> None:
    reference = build_step_tensors(plan, BLOCK_SIZE)
    packed = inputs().pack(plan)
    step = packed.step
    assert step.num_tokens == plan.num_tokens and packed.num_segments == len(plan.segments)
    assert step.token_ids_T.tolist() == reference.token_ids_T.tolist()
    assert step.cache_rows_T.tolist() == reference.cache_rows_T.tolist()
    assert step.positions_T is not None and step.num_real_1 is not None
    assert step.positions_T.tolist() == [
        position for item in plan.segments for position in range(item.start, item.end)
    ]
    assert step.num_real_1.tolist() == [plan.num_tokens]
    assert packed.sampling_rows_B.tolist() == [
        -1 if item.sampling_row is None else item.sampling_row for item in plan.segments
    ]
    assert packed.proposes_B.tolist() == [int(item.proposes) for item in plan.segments]
    assert packed.forced_accepts_B.tolist() == [-1] * len(plan.segments)
    for ours, theirs in ((step.windows, reference.windows), (step.chunks, reference.chunks)):
        assert len(ours) <= 1
        assert list(of_packed(ours)) == list(of_reference(theirs))  # type: ignore[arg-type]


@given(plans())
def test_bounds_are_those_of_the_plan(plan: StepPlan) -> None:
    bounds = exact_bounds(plan)
    for room, group in zip(bounds.groups, [*_groups(inputs().pack(plan))], strict=True):
        assert room.max_length == max(
            end - start for start, end in zip(group.offsets_S, group.offsets_S[1:], strict=False)
        )
        assert room.max_replay == group.replay_B.max()
        assert room.max_drafts == group.num_drafts_B.max()
        lengths_B = group.offsets_S[1:] - group.offsets_S[:-1]
        assert room.max_context == (group.starts_B + lengths_B).max()


def _groups(packed: PackedStep) -> Iterator[PackedGroup]:
    for span in packed.step.spans():
        assert isinstance(span.group, PackedGroup)
        yield span.group


def bucket(num_segments: int, width: int, num_saves: int = 3) -> StepBounds:
    windows = GroupBounds(
        num_tokens=num_segments * width,
        num_segments=num_segments,
        max_length=width,
        max_context=64,
        max_replay=3,
        max_drafts=width - 1,
        num_saves=num_saves,
    )
    return StepBounds(windows, None)


WINDOWS = plan_of(
    segment(1, 7, 3, num_drafts=2, replay=1, saves=(Save(7, 90), Save(8, 91)), proposes=True),
    segment(2, 0, 1, num_spare_pages=2),
    segment(3, 12, 2, num_drafts=1, proposes=True),
)


def test_behind_a_plan_in_a_larger_place_stands_nobody() -> None:
    packer, bounds = inputs(), bucket(5, 4)
    packer.pack(plan_of(*(segment(number, 20, 4, num_drafts=3) for number in range(1, 6))), bounds)
    assert packer.fits(WINDOWS, bounds)
    packed = packer.pack(WINDOWS, bounds, forced_accepts=[1, -1, 0])
    step, [group] = packed.step, list(_groups(packed))
    assert step.positions_T is not None and step.num_real_1 is not None
    assert (step.num_tokens, packed.num_segments, step.num_real_1.tolist()) == (20, 5, [6])
    assert group.offsets_S.tolist() == [0, 3, 4, 6, 6, 6]
    assert group.segment_T.tolist() == [0, 0, 0, 1, 2, 2] + [-1] * 14
    assert step.cache_rows_T.tolist()[6:] == [-1] * 14
    assert step.token_ids_T.tolist()[6:] == step.positions_T.tolist()[6:] == [0] * 14
    assert packed.forced_accepts_B.tolist() == [1, -1, 0, -1, -1]
    assert packed.sampling_rows_B.tolist() == [4, 5, 6, -1, -1]
    assert packed.proposes_B.tolist() == [1, 0, 1, 0, 0]
    for field_B in (group.read_slots_B, group.write_slots_B, group.replay_B, group.num_drafts_B):
        assert field_B.tolist()[3:] == [0, 0]
    assert group.saves is not None and group.saves.first_S.tolist() == [0, 2, 2, 2, 2, 2]
    exact = list(of_packed(packer.pack(WINDOWS).step.windows))  # type: ignore[arg-type]
    packer.pack(WINDOWS, bounds)
    again = list(of_packed(packer.view(bounds).step.windows))  # type: ignore[arg-type]
    assert again[:3] == exact


def test_a_step_at_a_fixed_address_stays_there() -> None:
    packer, bounds = inputs(), bucket(3, 3)
    view = packer.view(bounds)
    packed = packer.pack(WINDOWS, bounds, into=view)
    assert packed is view
    fresh = packer.pack(WINDOWS, bounds)
    assert [item.data_ptr() for item in _tensors(view)] == [
        item.data_ptr() for item in _tensors(fresh)
    ]
    addresses = [item.data_ptr() for item in _tensors(view)]
    # Kernels are specialised on addresses that are multiples of 16 bytes.
    assert len({address % 16 for address in addresses}) == 1


def test_a_cleared_step_is_nobodys() -> None:
    packer, bounds = inputs(), bucket(3, 3)
    packer.pack(WINDOWS, bounds)
    packer.clear(bounds)
    packed = packer.view(bounds)
    [group] = _groups(packed)
    assert packed.step.num_real_1 is not None and packed.step.num_real_1.item() == 0
    assert (group.segment_T == -1).all() and (packed.step.cache_rows_T == -1).all()
    assert (group.offsets_S == 0).all() and (group.write_slots_B == 0).all()
    assert (packed.sampling_rows_B == -1).all() and (packed.proposes_B == 0).all()


@pytest.mark.parametrize(
    ("bounds", "size"),
    [
        (bucket(2, 3), 4096),
        (bucket(3, 2), 4096),
        (bucket(3, 3, num_saves=1), 4096),
        (bucket(3, 3), num_values(bucket(3, 3), 9)),
        (StepBounds(None, bucket(3, 3).windows), 4096),
    ],
)
def test_what_does_not_fit_is_seen_before(bounds: StepBounds, size: int) -> None:
    assert not inputs(size).fits(WINDOWS, bounds)
    assert inputs().fits(WINDOWS, bucket(3, 3))


def test_a_chunk_fits_no_place_for_windows() -> None:
    assert not inputs().fits(plan_of(segment(1, 0, 3)), bucket(3, 3))


def test_a_plan_that_is_larger_than_the_block_gets_its_own() -> None:
    packer = inputs(64)
    large = plan_of(segment(1, 5, 60))
    held = packer.view(bucket(1, 1)).step.token_ids_T.data_ptr()
    packed = packer.pack(large)
    assert packed.step.token_ids_T.tolist() == list(large.segments[0].token_ids)
    assert packer.view(bucket(1, 1)).step.token_ids_T.data_ptr() == held
    again = packer.pack(WINDOWS)
    assert list(of_packed(again.step.windows)) == list(  # type: ignore[arg-type]
        of_reference(build_step_tensors(WINDOWS, BLOCK_SIZE).windows)  # type: ignore[arg-type]
    )


def test_a_table_that_is_too_short_is_noticed() -> None:
    with pytest.raises(AssertionError, match="too few pages"):
        inputs().pack(plan_of(_short()))


def _short() -> Segment:
    return msgspec.structs.replace(segment(1, 5, 1), page_table=pack_page_table([7]))


def _tensors(packed: PackedStep) -> list[Tensor]:
    step = packed.step
    [group] = _groups(packed)
    fields = (*step, *packed, *group, *(group.saves or ()))
    return [item for item in fields if isinstance(item, Tensor)]


def test_numbers_are_int32() -> None:
    packed = inputs().pack(WINDOWS)
    assert {item.dtype for item in _tensors(packed)} == {torch.int32}
