"""Where the chunks of a group lie, and the saves in them, against a plain walk over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.kernels.chunk_layout import ChunkLayout, lay_out_chunks
from tests.cpu.kernels.group_builder import make_saves

Lengths = st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33]), min_size=1, max_size=5)


def walk(layout: ChunkLayout) -> dict[tuple[int, int], int]:
    """Segment and number of a chunk -> its index, as the operator comes to them."""
    chunk_of: dict[tuple[int, int], int] = {}
    for number, num_segments in enumerate(layout.num_segments_N):
        for segment in layout.order_B[:num_segments].tolist():
            chunk_of[segment, number] = len(chunk_of)
    return chunk_of


@settings(deadline=None)
@given(lengths=Lengths, most=st.sampled_from([1, 4, 8, 64]))
def test_every_token_has_its_place(lengths: list[int], most: int) -> None:
    layout = lay_out_chunks(np.array(lengths), None, most)
    num_chunks, chunk_size = layout.token_JC.shape
    assert chunk_size <= most and (chunk_size == most or chunk_size < 2 * max(lengths))
    chunk_of = walk(layout)
    assert len(chunk_of) == num_chunks
    flat = 0
    for segment, length in enumerate(lengths):
        for token in range(length):
            number, place = divmod(token, chunk_size)
            chunk = chunk_of[segment, number]
            assert layout.token_JC[chunk, place] == flat
            assert layout.is_real_JC[chunk, place]
            assert (layout.chunk_T[flat], layout.place_T[flat]) == (chunk, place)
            flat += 1
    assert layout.is_real_JC.sum() == flat == len(layout.chunk_T)
    assert layout.token_JC.max() < flat
    assert layout.saves is None

    x_THD = torch.randn(flat, 2, 3)
    x_MCD = layout.chunks(x_THD)
    assert torch.equal(layout.tokens(x_MCD, 2), x_THD)
    is_padded_MC = ~layout.is_real_JC.repeat_interleave(2, dim=0)
    assert not x_MCD[is_padded_MC].any()


@settings(deadline=None)
@given(data=st.data(), lengths=Lengths, chunk_size=st.sampled_from([4, 8]))
def test_a_save_is_taken_at_the_border_before_it_or_at_the_end(
    data: st.DataObject, lengths: list[int], chunk_size: int
) -> None:
    segments = [index for index, length in enumerate(lengths) for _ in range(length)]
    positions = [1 + token for length in lengths for token in range(length)]
    picked = data.draw(
        st.lists(st.integers(0, len(segments) - 1), min_size=1, max_size=8, unique=True)
    )
    saves = [(segments[at], positions[at], 10 + at) for at in picked]
    zeros = [0] * len(lengths)
    layout = lay_out_chunks(np.array(lengths), make_saves(saves, zeros, zeros), chunk_size)
    chunk_of, num_numbers = walk(layout), len(layout.num_segments_N)
    order, chunk_size = layout.order_B.tolist(), layout.token_JC.shape[1]
    passed, inside = set(), set()
    for segment, position, slot in saves:
        number, rest = divmod(position, chunk_size)
        if position == lengths[segment]:
            number, rest = num_numbers, 0
        passed.add((number, order.index(segment), slot))
        if rest:
            inside.add((slot, chunk_of[segment, number], rest))
    assert layout.saves is not None
    states, *parts = layout.saves
    assert list(states.stops) == sorted(states.stops)
    rows = zip(states.stops, states.rows_E.tolist(), states.slots_E.tolist(), strict=True)
    assert set(rows) == passed
    assert set(zip(*(part.tolist() for part in parts), strict=True)) == inside


def test_a_chunk_is_a_power_of_two() -> None:
    with pytest.raises(AssertionError, match="chunk_size=48"):
        lay_out_chunks(np.array([100]), None, 48)
