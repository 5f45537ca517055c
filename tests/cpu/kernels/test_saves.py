"""States that are filed on the way, against stepping to them, and against not filing them.

Free slots hold NaN, and so do recorded rows that nobody may fold in.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.kernels.chunk_layout import lay_out_chunks
from stagecoach.kernels.kda import kda_chunked, kda_gate, kda_recurrent
from stagecoach.kernels.ragged import SegmentGroup
from tests.cpu.kernels import group_builder
from tests.cpu.kernels.layer_slots import (
    NUM_DRAFTS,
    NUM_HEADS,
    NUM_HISTORY,
    NUM_KEYS,
    KdaOperator,
    Slots,
    Stepper,
    Tokens,
    draw,
    join,
    make_group,
    prefill,
)
from tests.cpu.kernels.oracles import fla_function, in_float64

NUM_TOKENS = 40
CHUNK_SIZE = 4  # of `make_group`

Save = tuple[int, int, int]  # segment, position, slot


class State(NamedTuple):
    """What a slot holds of a position."""

    recurrent_HVK: Tensor
    history_RC: Tensor


def state_of(slots: Slots, slot: int) -> State:
    return State(slots.state_SHVK[slot].clone(), slots.conv_rows_SNC[slot, :NUM_HISTORY].clone())


def states_along(tokens: Tokens) -> list[State]:
    """After 0, 1, 2 ... tokens, stepped."""
    stepper = Stepper(2, tokens.x_TC.dtype)
    stepper.state_SHVK.zero_()
    stepper.conv_rows_SNC.zero_()
    states = [state_of(stepper, 1)]
    for token in range(len(tokens.x_TC)):
        stepper.step(tokens.span(token, token + 1), 1)
        states.append(state_of(stepper, 1))
    return states


def assert_filed(slots: Slots, slot: int, expected: State, tolerance: float) -> None:
    """The state of a saved slot, its history bit for bit, and a record that nobody wrote."""
    filed = state_of(slots, slot)
    torch.testing.assert_close(
        filed.recurrent_HVK, expected.recurrent_HVK, rtol=tolerance, atol=tolerance
    )
    assert torch.equal(filed.history_RC, expected.history_RC)
    assert slots.record_SNHX[slot].isnan().all()
    assert slots.conv_rows_SNC[slot, NUM_HISTORY:].isnan().all()


def run_both(
    slots: Slots, operator: KdaOperator, tokens: Tokens, saving: SegmentGroup, plain: SegmentGroup
) -> Tensor:
    """Run with the saves and without; both leave the same bits but in the saved slots."""
    assert saving.saves is not None and plain.saves is None
    untouched = Slots(len(slots.state_SHVK), NUM_DRAFTS, slots.state_SHVK.dtype)
    pools = ("state_SHVK", "record_SNHX", "conv_rows_SNC")
    for name in pools:
        getattr(untouched, name).copy_(getattr(slots, name))
    outputs = slots.run(operator, tokens, saving)
    plain_outputs = untouched.run(operator, tokens, plain)
    for ours, theirs in zip(outputs, plain_outputs, strict=True):
        assert torch.equal(ours, theirs)
    saved = saving.saves.states.slots_E
    for name in pools:
        expected = getattr(untouched, name)
        assert expected[saved].isnan().all()
        expected[saved] = getattr(slots, name)[saved]
        torch.testing.assert_close(getattr(slots, name), expected, rtol=0, atol=0, equal_nan=True)
    return outputs.o_THV


class Source(NamedTuple):
    """Where a request may go on: `replay` rows onto `slot` make the state before `start`."""

    slot: int
    start: int
    replay: int


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_save_at_any_position_equals_stepping_there(data: st.DataObject, seed: int) -> None:
    """I61, I66, I67: rounds of windows or chunks that go on from any state filed or left before.

    float64: required 1e-12, reached 4e-16.
    """
    num_requests = data.draw(st.integers(1, 3))
    truths = [draw(NUM_TOKENS, seed + index) for index in range(num_requests)]
    wrong = draw(NUM_DRAFTS, seed + 100)
    along = [states_along(truth) for truth in truths]
    slots = Slots(400, NUM_DRAFTS, torch.float64)
    free = iter(range(1, 400))
    sources = [[Source(0, 0, 0)] for _ in truths]
    for _ in range(data.draw(st.integers(1, 4))):
        is_chunk = data.draw(st.booleans())
        reads = [
            data.draw(st.sampled_from(of_request[-6:]), label="source") for of_request in sources
        ]
        starts = [source.start for source in reads]
        writes = [next(free) for _ in reads]
        sizes = [
            data.draw(st.integers(1, 11) if is_chunk else st.integers(0, NUM_DRAFTS)) for _ in reads
        ]
        good = [
            size if is_chunk else 1 + data.draw(st.integers(0, size), label="kept")
            for size in sizes
        ]
        if max(start + 12 for start in starts) > NUM_TOKENS:
            break
        lengths = sizes if is_chunk else [1 + size for size in sizes]
        saves = []
        for index, source in enumerate(reads):
            first = source.start if is_chunk else source.start - source.replay
            last = source.start + (lengths[index] if is_chunk else 1)
            for position in data.draw(
                st.lists(st.integers(first + 1, last), max_size=4, unique=True), label="saves"
            ):
                saves.append((index, position, next(free)))
        build = partial(
            make_group,
            lengths=lengths,
            starts=starts,
            read_slots=[source.slot for source in reads],
            write_slots=writes,
            replay=[source.replay for source in reads],
            num_drafts=None if is_chunk else sizes,
        )
        tokens = join(
            *(
                join(truth.span(start, start + num_good), wrong.span(0, length - num_good))
                for truth, start, num_good, length in zip(
                    truths, starts, good, lengths, strict=True
                )
            )
        )
        operator = kda_chunked if is_chunk else kda_recurrent
        plain = build()
        if saves:
            run_both(slots, operator, tokens, build(saves=saves), plain)
        else:
            slots.run(operator, tokens, plain)
        for index, position, slot in saves:
            assert_filed(slots, slot, along[index][position], tolerance=1e-12)
            sources[index].append(Source(slot, position, 0))
        for index, start in enumerate(starts):
            if is_chunk:
                sources[index].append(Source(writes[index], start + sizes[index], 0))
                continue
            slots.poison(writes[index], good[index] - 1)
            sources[index] += [
                Source(writes[index], start + 1 + replay, replay) for replay in range(good[index])
            ]
    assert not any(pool.any() for pool in slots.of(0)), "the zero slot was written"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "to another slot"])
def test_a_window_files_every_folded_row_and_its_anchor(
    dtype: torch.dtype, *, in_place: bool
) -> None:
    """Bit for bit the stepped states, with ragged replays and several saves a segment."""
    replays, lengths = [4, 0, 2, 1], [2, 1, 2, 1]
    truths = [draw(20, 10 + index, dtype) for index in range(len(replays))]
    slots = Slots(40, NUM_DRAFTS, dtype)
    own = [1 + index for index in range(len(replays))]
    steppers = Stepper(9, dtype)
    expected: list[list[State]] = []
    for index, truth in enumerate(truths):
        for pools in (slots, steppers):
            prefill(pools, truth.span(0, 5), own[index])
        expected.append([])
        for token in range(5, 12):
            steppers.step(truth.span(token, token + 1), own[index])
            expected[index].append(state_of(steppers, own[index]))  # after tokens [0, token]
    window = make_group([5] * 4, [5] * 4, own, own, num_drafts=[4] * 4)
    slots.run(kda_recurrent, join(*(truth.span(5, 10) for truth in truths)), window)
    for slot, replay in zip(own, replays, strict=True):
        slots.poison(slot, replay)

    starts = [6 + replay for replay in replays]
    saves: list[Save] = []
    for index, (start, replay) in enumerate(zip(starts, replays, strict=True)):
        for position in range(start + 1, start - replay, -1):
            saves.append((index, position, 20 + len(saves)))
    build = partial(
        make_group,
        lengths=lengths,
        starts=starts,
        read_slots=own,
        write_slots=own if in_place else [slot + 4 for slot in own],
        replay=replays,
        num_drafts=[1, 0, 1, 0],
    )
    tokens = join(
        *(
            truth.span(start, start + length)
            for truth, start, length in zip(truths, starts, lengths, strict=True)
        )
    )
    run_both(slots, kda_recurrent, tokens, build(saves=saves), build())
    assert len(saves) == sum(replays) + 4
    for index, position, slot in saves:
        assert_filed(slots, slot, expected[index][position - 6], tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_chunk_files_its_running_state_at_borders_and_ends(dtype: torch.dtype) -> None:
    """Bit for bit what a call that ends there leaves, with ragged segments and a replay."""
    lengths, starts = [19, 8, 3, 12], [6, 2, 0, 9]
    replay, reads, writes = [2, 0, 0, 0], [1, 2, 0, 3], [1, 5, 6, 7]
    tokens = draw(sum(lengths), 3, dtype)
    slots = Slots(40, NUM_DRAFTS, dtype)
    before = draw(30, 4, dtype)
    for slot in (1, 2, 3):
        prefill(slots, before.span(slot, slot + 7), slot)
    window = make_group([5], [3], [1], [1], num_drafts=[4])
    slots.run(kda_recurrent, before.span(20, 25), window)
    slots.poison(1, 2)
    saves: list[Save] = []
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for border in {*range(CHUNK_SIZE, length, CHUNK_SIZE), length}:
            saves.append((index, start + border, 20 + len(saves)))
    build = partial(
        make_group,
        lengths=lengths,
        starts=starts,
        read_slots=reads,
        write_slots=writes,
        replay=replay,
    )
    shorter = {}
    offset = 0
    for index, length in enumerate(lengths):
        for segment, position, _ in saves:
            if segment == index:
                alone = Slots(40, NUM_DRAFTS, dtype)
                for name in ("state_SHVK", "record_SNHX", "conv_rows_SNC"):
                    getattr(alone, name).copy_(getattr(slots, name))
                size = position - starts[index]
                group = make_group(
                    [size], [starts[index]], [reads[index]], [30], replay=[replay[index]]
                )
                alone.run(kda_chunked, tokens.span(offset, offset + size), group)
                shorter[segment, position] = state_of(alone, 30)
        offset += length
    run_both(slots, kda_chunked, tokens, build(saves=saves), build())
    for segment, position, slot in saves:
        assert_filed(slots, slot, shorter[segment, position], tolerance=0)
        if position == starts[segment] + lengths[segment]:
            assert_filed(slots, slot, state_of(slots, writes[segment]), tolerance=0)


@pytest.mark.parametrize("operator", [kda_recurrent, kda_chunked], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("gate", ["bounded", "unbounded"])
def test_filed_states_equal_the_published_recurrence(operator: KdaOperator, gate: str) -> None:
    """fla 0.6.0 naive_recurrent_kda in float64 over each prefix of 200 tokens: 3e-16.

    The unbounded gate of Kimi-Linear reaches decays that float64 rounds to 0.
    """
    tokens = draw(200, 5)
    if gate == "unbounded":
        generator = torch.Generator().manual_seed(6)
        raw_THK = torch.randn(200, NUM_HEADS, NUM_KEYS, generator=generator, dtype=torch.float64)
        a_log_H, dt_bias_HK = torch.ones(NUM_HEADS), torch.zeros(NUM_HEADS, NUM_KEYS)
        tokens = tokens._replace(g_THK=kda_gate(300 * raw_THK, a_log_H, dt_bias_HK, None))
        assert tokens.g_THK.exp().eq(0).any() and tokens.g_THK.gt(-1e-3).any()
    slots = Slots(20, NUM_DRAFTS, torch.float64)
    prefill(slots, draw(9, 7), 1)
    state_1HKV = slots.state_SHVK[1:2].mT.clone()
    positions = [1, 2, 63, 64, 65, 100, 127, 128, 129, 191, 199, 200]
    saves = [(0, 9 + position, 3 + at) for at, position in enumerate(positions)]
    slots.run(operator, tokens, group_builder.make_group([200], [9], [1], [2], saves=saves))
    fla = in_float64(fla_function("ops/kda/naive.py", "naive_recurrent_kda"))
    for at, position in enumerate(positions):
        batched = [x[:position].unsqueeze(0) for x in tokens[1:]]
        _, fla_state = fla(*batched, scale=1.0, initial_state=state_1HKV, output_final_state=True)
        torch.testing.assert_close(slots.state_SHVK[3 + at].mT, fla_state[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("gate", [-5.0, -3.0, -1e-3, 0.0])
def test_states_inside_a_chunk_survive_constant_gates(gate: float) -> None:
    """float32 stays at rounding level: 1.2e-6 from the float64 recurrence."""
    tokens = draw(150, 8)
    tokens = tokens._replace(g_THK=torch.full_like(tokens.g_THK, gate))
    saves = [(0, position, 2 + position) for position in range(1, 151)]
    group = group_builder.make_group([150], saves=saves)
    wide, narrow = Slots(153, 0, torch.float64), Slots(153, 0, torch.float32)
    wide.run(kda_recurrent, tokens, group)
    narrow.run(kda_chunked, Tokens(*(x.float() for x in tokens)), group)
    torch.testing.assert_close(
        narrow.state_SHVK[3:].double(), wide.state_SHVK[3:], rtol=0, atol=3e-6
    )


@pytest.mark.parametrize("operator", [kda_recurrent, kda_chunked], ids=["recurrent", "chunked"])
def test_one_filed_state_serves_many_readers(operator: KdaOperator) -> None:
    """I62, I67: three segments of one group go on from a slot that nobody writes."""
    truth = draw(30, 9)
    slots, steppers = Slots(9, NUM_DRAFTS, torch.float64), Stepper(9, torch.float64)
    slots.run(kda_chunked, truth.span(0, 11), make_group([11], saves=[(0, 6, 2), (0, 8, 3)]))
    filed = slots.of(2)
    lengths, writes = [3, 1, 2], [4, 5, 6]
    ways = [draw(length, 20 + length) for length in lengths]
    outputs = slots.run(operator, join(*ways), make_group(lengths, [6] * 3, [2] * 3, writes))
    offset = 0
    for way, slot in zip(ways, writes, strict=True):
        prefill(steppers, truth.span(0, 6), slot)
        reference = steppers.step(way, slot)
        own = outputs.span(offset, offset + len(way.x_TC))
        torch.testing.assert_close(tuple(own), tuple(reference), rtol=0, atol=1e-13)
        torch.testing.assert_close(
            tuple(state_of(slots, slot)), tuple(state_of(steppers, slot)), rtol=0, atol=1e-13
        )
        offset += len(way.x_TC)
    for before, after in zip(filed, slots.of(2), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("position", range(1, 11))
def test_nan_behind_a_save_stays_behind_it(position: int) -> None:
    """Also within the chunk of the save, and in the drafts behind an anchor."""
    tokens = draw(11, 12)
    for x in tokens:
        x[position:] = torch.nan
    slots = Slots(4, NUM_DRAFTS, torch.float64)
    slots.run(kda_chunked, tokens, make_group([11], saves=[(0, position, 2)]))
    assert_filed(slots, 2, states_along(draw(11, 12))[position], tolerance=1e-13)
    assert slots.state_SHVK[1].isnan().any()

    tokens = draw(5, 13)
    for x in tokens:
        x[1:] = torch.nan
    slots.run(
        kda_recurrent, tokens, make_group([5], num_drafts=[4], write_slots=[1], saves=[(0, 1, 3)])
    )
    assert_filed(slots, 3, states_along(draw(5, 13))[1], tolerance=0)


def test_a_chunk_files_no_replayed_row() -> None:
    """It folds them in as one; the plan's constructor refuses such a save as well."""
    slots = Slots(4, NUM_DRAFTS, torch.float64)
    group = make_group([3], [7], [1], [1], replay=[2], saves=[(0, 6, 2)])
    with pytest.raises(AssertionError, match="no chunk layout"):
        slots.run(kda_chunked, draw(3, 14), group)
    with pytest.raises(AssertionError, match="files no replayed rows"):
        lay_out_chunks(group.lengths_B.numpy(), group.saves)
