"""A plan as tensors, against a plain loop over segments and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.kernels.chunk_layout import lay_out_chunks
from stagecoach.kernels.ragged import BlockRun, SegmentGroup, StepTensors
from stagecoach.runner.step_inputs import (
    build_block_inputs,
    build_sample_inputs,
    build_step_tensors,
    build_target_inputs,
    split_by_shape,
)
from stagecoach.schedule.step_plan import Save, Segment, StepPlan, pack_page_table

pytestmark = pytest.mark.cpu

FREE_PADDING = 4096  # work that costs less than one more kernel call


@dataclass
class Case:
    plan: StepPlan
    block_size: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Windows, then chunks, with lengths and starts around the page size."""
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    num_windows = draw(st.integers(0, 4))
    num_chunks = draw(st.integers(0 if num_windows else 1, 3))
    around = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1]
    free_pages = draw(st.permutations(range(1, 80)))
    segments = []
    for index in range(num_windows + num_chunks):
        is_window = index < num_windows
        start = draw(st.sampled_from(around))
        length = draw(st.integers(1, 4) if is_window else st.sampled_from(around[1:]))
        length = max(1 if is_window else 2, length)
        num_pages = -(-(start + length) // block_size) + draw(st.integers(0, 2))
        pages, free_pages = free_pages[:num_pages], free_pages[num_pages:]
        # Only what is sampled has drafts.
        can_rest = not is_window or length == 1
        sampling_row = draw(st.none() | st.integers(0, 9) if can_rest else st.integers(0, 9))
        has_targets = draw(st.booleans())
        num_targets = draw(st.integers(1, length)) if has_targets else 0
        token_ids = draw(st.lists(st.integers(0, 999), min_size=length, max_size=length))
        targets = draw(st.lists(st.integers(0, 999), min_size=num_targets, max_size=num_targets))
        replay = draw(st.integers(0, 3)) if start else 0
        first, last = (start - replay, start + 1) if is_window else (start, start + length)
        positions = draw(st.lists(st.integers(first + 1, last), max_size=3, unique=True))
        segments.append(
            Segment(
                request_id=100 + index,
                epoch=0,
                start=start,
                token_ids=tuple(token_ids),
                num_draft_tokens=length - 1 if is_window else 0,
                read_slot=0 if start == 0 else 20 + index,
                replay=replay,
                write_slot=40 + index,
                saves=tuple(
                    Save(position, 100 + 3 * index + number)
                    for number, position in enumerate(positions)
                ),
                page_table=pack_page_table(pages),
                sampling_row=sampling_row,
                proposes=sampling_row is not None and draw(st.booleans()),
                prompt_logprob_targets=tuple(targets),
                num_prompt_logprobs=draw(st.integers(0, 3)) if targets else 0,
            )
        )
    return Case(StepPlan(step=3, segments=tuple(segments)), block_size)


def cache_row(segment: Segment, position: int, block_size: int) -> int:
    return segment.page_ids[position // block_size] * block_size + position % block_size


def groups_of(case: Case) -> list[tuple[SegmentGroup, list[Segment]]]:
    """Each group with its segments; the groups share out the plan's segments in order."""
    step = build_step_tensors(case.plan, case.block_size)
    left = list(case.plan.segments)
    groups = []
    for span in step.spans():
        num_segments = len(span.group.lengths_B)
        segments, left = left[:num_segments], left[num_segments:]
        assert all(segment.is_window == span.is_window for segment in segments)
        groups.append((span.group, segments))
    assert not left
    return groups


@settings(deadline=None)
@given(cases())
def test_the_flat_axis_holds_every_token_with_the_cache_row_of_its_position(case: Case) -> None:
    step = build_step_tensors(case.plan, case.block_size)
    token_ids, rows = [], []
    for segment in case.plan.segments:
        for place, token_id in enumerate(segment.token_ids):
            token_ids.append(token_id)
            rows.append(cache_row(segment, segment.start + place, case.block_size))
    assert step.num_tokens == len(token_ids)
    assert step.token_ids_T.tolist() == token_ids
    assert step.cache_rows_T.tolist() == rows
    assert step.token_ids_T.dtype == step.cache_rows_T.dtype == torch.int64
    # The null page is never written.
    assert min(rows) >= case.block_size


@settings(deadline=None)
@given(cases())
def test_a_group_holds_its_segments_numbers_and_contexts(case: Case) -> None:
    for group, segments in groups_of(case):
        assert group.num_tokens == sum(segment.num_tokens for segment in segments)
        assert group.max_length == max(segment.num_tokens for segment in segments)
        assert group.lengths_B.tolist() == [segment.num_tokens for segment in segments]
        assert group.starts_B.tolist() == [segment.start for segment in segments]
        assert group.context_lengths_B.tolist() == [segment.end for segment in segments]
        assert group.read_slots_B.tolist() == [segment.read_slot for segment in segments]
        assert group.write_slots_B.tolist() == [segment.write_slot for segment in segments]
        assert group.replay_B.tolist() == [segment.replay for segment in segments]
        longest = max(segment.end for segment in segments)
        assert group.context_rows_BL.tolist() == [
            [
                cache_row(segment, position, case.block_size) if position < segment.end else 0
                for position in range(longest)
            ]
            for segment in segments
        ]
        for tensor in tensors(group):
            assert tensor.dtype == (torch.bool if tensor is group.is_real_BW else torch.int64)


@settings(deadline=None)
@given(cases())
def test_saves_are_in_the_order_in_which_their_states_are_passed(case: Case) -> None:
    for group, segments in groups_of(case):
        expected = []
        for index, segment in enumerate(segments):
            for save in segment.saves:
                num_tokens = save.position - segment.start
                # Replayed rows come first, then tokens; a segment has its own rows of them.
                before = segment.replay if num_tokens <= 0 else group.max_replay
                expected.append((before + num_tokens, index, num_tokens, save.slot))
        if not expected:
            assert group.saves is None
            continue
        assert group.saves is not None
        states, num_tokens_E = group.saves
        rows = zip(
            states.stops,
            states.rows_E.tolist(),
            num_tokens_E.tolist(),
            states.slots_E.tolist(),
            strict=True,
        )
        assert sorted(rows) == sorted(expected)
        assert list(states.stops) == sorted(states.stops) and min(states.stops) > 0
        for tensor in (states.rows_E, states.slots_E, num_tokens_E):
            assert tensor.dtype == torch.int64


@settings(deadline=None)
@given(cases())
def test_chunks_know_their_layout_and_the_saves_in_it(case: Case) -> None:
    for group, segments in groups_of(case):
        if segments[0].is_window:
            assert group.chunk_layout is None
            continue
        layout = group.chunk_layout
        expected = lay_out_chunks(group.lengths_B.numpy(), group.saves)
        assert layout is not None
        assert (layout.saves is None) == (group.saves is None)
        assert layout.num_segments_N == expected.num_segments_N
        assert torch.equal(layout.token_JC, expected.token_JC)


def chunk(index: int, start: int, length: int) -> Segment:
    return Segment(
        request_id=index,
        epoch=0,
        start=start,
        token_ids=(1,) * length,
        read_slot=50 + index if start else 0,
        write_slot=1 + index,
        page_table=pack_page_table([1]),
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), min_size=1, max_size=8))
def test_neighbours_share_a_group_unless_padding_would_more_than_double_the_work(
    spans: list[tuple[int, int]],
) -> None:
    """Tokens x context of every segment, padded to the group's largest, as attention does."""
    spans.sort(key=sum)
    segments = tuple(chunk(index, *span) for index, span in enumerate(spans))
    runs = split_by_shape(segments)
    assert sum(runs, ()) == segments
    for run in runs:
        assert run and padded_work(run) <= 2 * sum(map(work, run)) + FREE_PADDING
    for run, following in pairwise(runs):
        joined = (*run, following[0])
        assert padded_work(joined) > 2 * sum(map(work, joined)) + FREE_PADDING


def test_a_long_chunk_is_not_padded_to_by_short_ones() -> None:
    segments = tuple(chunk(index, 0, length) for index, length in enumerate((2, 2, 3, 500, 510)))
    runs = split_by_shape(segments)
    assert [[segment.num_tokens for segment in run] for run in runs] == [[2, 2, 3], [500, 510]]


def work(segment: Segment) -> int:
    return segment.num_tokens * segment.end


def padded_work(segments: Sequence[Segment]) -> int:
    longest = max(segment.num_tokens for segment in segments)
    return len(segments) * longest * max(segment.end for segment in segments)


@settings(deadline=None)
@given(cases())
def test_padding_and_flattening_are_inverse_and_padding_points_at_token_0(case: Case) -> None:
    for group, segments in groups_of(case):
        pad_index, flat_index, token = [], [], 0
        for row, segment in enumerate(segments):
            pad_index.append([0] * group.max_length)
            for place in range(segment.num_tokens):
                pad_index[row][place] = token
                flat_index.append(row * group.max_length + place)
                token += 1
        assert group.pad_index_BW.tolist() == pad_index
        assert group.flat_index_T.tolist() == flat_index
        assert group.is_real_BW.tolist() == [
            [place < segment.num_tokens for place in range(group.max_length)]
            for segment in segments
        ]
        x_T2 = torch.randn(group.num_tokens, 2)
        padded = group.pad(x_T2, fill=-7.0)
        assert torch.equal(group.flat(padded), x_T2)
        assert (padded[~group.is_real_BW] == -7.0).all()


@settings(deadline=None)
@given(cases())
def test_sampling_reads_the_anchor_and_every_draft_of_each_segment_that_samples(case: Case) -> None:
    """A loop over segments; ragged, missing and full rows of drafts alike."""
    inputs = build_sample_inputs(case.plan)
    indices, first_rows, tokens, rows, positions, offset = [], [], [], [], [], 0
    segment_of_row, places, drafts, pending = [], [], [], []
    for index, segment in enumerate(case.plan.segments):
        offset += segment.num_tokens
        if segment.sampling_row is None:
            continue
        num_drafts = segment.num_draft_tokens
        window = segment.token_ids[segment.num_tokens - 1 - num_drafts :]
        first_rows.append(len(tokens))
        for place in range(1 + num_drafts):
            tokens.append(offset - 1 - num_drafts + place)
            rows.append(segment.sampling_row)
            positions.append(segment.end - num_drafts + place)
            segment_of_row.append(len(indices))
            places.append(place)
            drafts.append(window[place + 1] if place < num_drafts else -1)
            pending.append(list(window[1 : place + 1]))
        indices.append(index)
    assert list(inputs.segments) == indices
    assert inputs.first_rows == first_rows
    assert inputs.token_index_R.tolist() == tokens
    assert inputs.token_index_R.dtype == inputs.positions_R.dtype == torch.int64
    assert inputs.sampling_rows == rows
    assert inputs.positions_R.tolist() == positions
    windows = inputs.windows
    assert (windows is None) == (len(tokens) == len(indices))
    if windows is None:
        return
    assert windows.segment_R.tolist() == segment_of_row
    assert windows.place_R.tolist() == places
    assert windows.draft_ids_R.tolist() == drafts
    ends = [*first_rows[1:], len(tokens)]
    assert windows.num_drafts_S == [
        end - first - 1 for first, end in zip(first_rows, ends, strict=True)
    ]
    widest = max(windows.num_drafts_S) + 1
    assert windows.rows_SW.tolist() == [
        [min(first + place, end - 1) for place in range(widest)]
        for first, end in zip(first_rows, ends, strict=True)
    ]
    assert [
        ids[is_real].tolist()
        for ids, is_real in zip(
            windows.pending.token_ids_RJ, windows.pending.is_real_RJ, strict=True
        )
    ] == pending
    assert (windows.pending.token_ids_RJ >= 0).all()


@settings(deadline=None)
@given(cases())
def test_a_block_reads_the_cache_rows_of_its_segment(case: Case) -> None:
    proposing = [segment for segment in case.plan.segments if segment.proposes]
    if not proposing:
        return
    step = build_step_tensors(case.plan, case.block_size)
    starts_N = torch.tensor([segment.end for segment in proposing])
    block = build_block_inputs(case.plan, step, torch.zeros_like(starts_N), starts_N, 3)
    assert block.context_rows_NL.dtype == torch.int64
    assert len(block.context_rows_NL) == len(proposing)
    assert sum(run.num_blocks for run in block.runs) == len(proposing)
    for rows_L, segment in zip(block.context_rows_NL.tolist(), proposing, strict=True):
        assert rows_L[: segment.end] == [
            cache_row(segment, position, case.block_size) for position in range(segment.end)
        ]


def test_blocks_behind_short_contexts_are_not_padded_to_a_long_one() -> None:
    segments = []
    for index, end in enumerate((600, 610, 4000)):
        pages = pack_page_table(tuple(range(1, 2 + end // 64)))
        segments.append(
            Segment(
                request_id=index,
                epoch=0,
                start=end - 1,
                token_ids=(1,),
                read_slot=1 + index,
                write_slot=1 + index,
                page_table=pages,
                sampling_row=index,
                proposes=True,
            )
        )
    plan = StepPlan(step=0, segments=tuple(segments))
    starts_N = torch.tensor([600, 610, 4000])
    block = build_block_inputs(plan, build_step_tensors(plan, 64), starts_N, starts_N, 7)
    assert block.runs == (BlockRun(2, 610), BlockRun(1, 4000))


@settings(deadline=None)
@given(cases())
def test_targets_are_predicted_by_the_first_tokens_of_their_segment(case: Case) -> None:
    expected, offset = [], 0
    for index, segment in enumerate(case.plan.segments):
        if segment.prompt_logprob_targets:
            tokens = [offset + place for place in range(len(segment.prompt_logprob_targets))]
            expected.append(
                (index, tokens, list(segment.prompt_logprob_targets), segment.num_prompt_logprobs)
            )
        offset += segment.num_tokens
    assert [
        (item.segment, item.token_index_P.tolist(), item.target_ids_P.tolist(), item.num_top)
        for item in build_target_inputs(case.plan)
    ] == expected


def tensors(group: SegmentGroup | StepTensors) -> list[Tensor]:
    return [value for value in group if isinstance(value, Tensor)]


@settings(deadline=None)
@given(cases())
def test_stages_that_decode_the_same_plan_index_with_equal_tensors(case: Case) -> None:
    encoded = case.plan.encode()
    first, second = (
        build_step_tensors(StepPlan.decode(encoded), case.block_size) for _ in range(2)
    )
    for ours, theirs in zip(
        (first, *first.windows, *first.chunks),
        (second, *second.windows, *second.chunks),
        strict=True,
    ):
        for one, other in zip(tensors(ours), tensors(theirs), strict=True):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype


def test_a_plan_that_samples_nothing_has_no_rows() -> None:
    segment = Segment(
        request_id=1,
        epoch=0,
        start=0,
        token_ids=(5, 6),
        read_slot=0,
        write_slot=1,
        page_table=pack_page_table([1]),
    )
    plan = StepPlan(step=0, segments=(segment,))
    inputs = build_sample_inputs(plan)
    assert inputs.segments == () and inputs.token_index_R.shape == (0,)
    assert inputs.token_index_R.dtype == torch.int64
    assert build_target_inputs(plan) == []


@pytest.mark.parametrize("num_others", [0, 1], ids=["alone", "beside a longer table"])
def test_tokens_without_a_page_are_our_mistake(num_others: int) -> None:
    """Without a page they would be written to the null page, where padding reads."""
    others = [
        Segment(
            request_id=2,
            epoch=0,
            start=0,
            token_ids=(1,) * 9,
            read_slot=0,
            write_slot=2,
            page_table=pack_page_table([7, 8, 9]),
        )
    ]
    short = Segment(
        request_id=1,
        epoch=0,
        start=0,
        token_ids=(1,) * 5,
        read_slot=0,
        write_slot=1,
        page_table=pack_page_table([3]),
    )
    plan = StepPlan(step=0, segments=(*others[:num_others], short))
    with pytest.raises(AssertionError, match="too few pages"):
        build_step_tensors(plan, 4)
