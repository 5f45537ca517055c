"""Windows, their records and what follows them, against stepping token by token.

Both operators with state are run side by side: the recurrence and the short convolution.
Outputs and states of the recurrence and histories of the convolution are equal bit for bit.
Rows that were rejected or never written hold NaN.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.kernels.kda import kda_chunked, kda_recurrent
from stagecoach.kernels.short_conv import short_convolution
from tests.cpu.kernels.layer_slots import (
    NUM_DRAFTS,
    NUM_HISTORY,
    KdaOperator,
    Slots,
    Stepper,
    assert_equal,
    draw,
    join,
    make_group,
    prefill,
)
from tests.cpu.kernels.oracles import fla_function, in_float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
@pytest.mark.parametrize("write_slot", [1, 2], ids=["in place", "to another slot"])
@pytest.mark.parametrize("following", ["decode", "window", "chunk"])
def test_what_follows_a_window_starts_at_its_last_accepted_token(
    following: str, write_slot: int, num_accepted: int, dtype: torch.dtype
) -> None:
    """I32, I33, I67: after a prompt and one window, for every accepted count."""
    prompt, truth, wrong = draw(9, 1, dtype), draw(12, 2, dtype), draw(NUM_DRAFTS, 3, dtype)
    slots, stepper = Slots(3, NUM_DRAFTS, dtype), Stepper(2, dtype)
    for pools in (slots, stepper):
        prefill(pools, prompt, 1)

    window = join(truth.span(0, 1 + num_accepted), wrong.span(num_accepted, NUM_DRAFTS))
    group = make_group([1 + NUM_DRAFTS], [9], [1], [1], num_drafts=[NUM_DRAFTS])
    outputs = slots.run(kda_recurrent, window, group)
    assert_equal(
        outputs.span(0, 1 + num_accepted), stepper.step(truth.span(0, 1 + num_accepted), 1)
    )
    slots.poison(1, num_accepted)

    start = 1 + num_accepted
    num_drafts = 3 if following == "window" else 0
    length = {"decode": 1, "window": 4, "chunk": 5}[following]
    operator = kda_chunked if following == "chunk" else kda_recurrent
    group = make_group(
        [length], [9 + start], [1], [write_slot], replay=[num_accepted], num_drafts=[num_drafts]
    )
    tokens = truth.span(start, start + length)
    outputs = slots.run(operator, tokens, group)
    if following == "chunk":
        plain = make_group([length], [9 + start], [1], [1])
        assert_equal(outputs, stepper.run(kda_chunked, tokens, plain))
    else:
        # The state after the anchor, and after its drafts, is compared below.
        assert_equal(outputs.span(0, 1), stepper.step(tokens.span(0, 1), 1))
    assert torch.equal(slots.state_SHVK[write_slot], stepper.state_SHVK[1])
    history_RC = slots.conv_rows_SNC[write_slot, :NUM_HISTORY]
    assert torch.equal(history_RC, stepper.conv_rows_SNC[1])
    if num_drafts:
        assert_equal(outputs.span(1, length), stepper.step(tokens.span(1, length), 1))


@st.composite
def rounds_of_requests(draw_one: st.DrawFn) -> tuple[int, list[list[tuple[int, int, bool]]]]:
    """Requests, and for each round what each does: (drafts or −chunk, accepted, moves)."""
    num_requests = draw_one(st.integers(1, 4))
    rounds = []
    for _ in range(draw_one(st.integers(1, 6))):
        row = []
        is_chunk = draw_one(st.sampled_from([False, False, False, True]))
        for _ in range(num_requests):
            size = draw_one(st.integers(1, 6) if is_chunk else st.integers(0, NUM_DRAFTS))
            accepted = 0 if is_chunk else draw_one(st.integers(0, size))
            row.append((-size if is_chunk else size, accepted, draw_one(st.booleans())))
        rounds.append(row)
    return num_requests, rounds


@settings(max_examples=60, deadline=None)
@given(
    case=rounds_of_requests(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_any_rounds_of_windows_and_chunks_equal_stepping(case, dtype, seed: int) -> None:
    """I32, I33, I70: ragged windows and replays, plain decodes and chunks between them.

    Each request has two slots and moves between them at will; what it left is NaN, and so are
    recorded rows that were rejected or that no draft stands behind.
    """
    num_requests, rounds = case
    slots, stepper = Slots(1 + 2 * num_requests, NUM_DRAFTS, dtype), Stepper(20, dtype)
    truths = [draw(60, seed + index, dtype) for index in range(num_requests)]
    wrong = draw(NUM_DRAFTS, seed + 100, dtype)
    own_slots = [index + 1 for index in range(num_requests)]
    lengths = [1 + (seed + index) % 5 for index in range(num_requests)]
    group = make_group(lengths, write_slots=own_slots)
    prompts = join(*(truth.span(0, end) for truth, end in zip(truths, lengths, strict=True)))
    for pools in (slots, stepper):
        pools.run(kda_chunked, prompts, group)
    done, replay, slot_now = list(lengths), [0] * num_requests, list(own_slots)

    for row in rounds:
        is_chunk = row[0][0] < 0
        sizes = [-size if is_chunk else 1 + size for size, _, _ in row]
        read_slots = list(slot_now)
        for index, (_, _, moves) in enumerate(row):
            if moves:
                others = {own_slots[index], own_slots[index] + num_requests}
                (slot_now[index],) = others - {slot_now[index]}
        group = make_group(
            sizes,
            done,
            read_slots,
            slot_now,
            replay=replay,
            num_drafts=None if is_chunk else [size for size, _, _ in row],
        )
        tokens = join(
            *(
                join(truth.span(start, start + size - bad), wrong.span(0, bad))
                for truth, start, size, bad in zip(
                    truths,
                    done,
                    sizes,
                    [0 if is_chunk else size - accepted for size, accepted, _ in row],
                    strict=True,
                )
            )
        )
        outputs = slots.run(kda_chunked if is_chunk else kda_recurrent, tokens, group)
        if is_chunk:
            plain = make_group(sizes, done, own_slots, own_slots)
            assert_equal(outputs, stepper.run(kda_chunked, tokens, plain))
        offset = 0
        for index, (size, (_, accepted, _)) in enumerate(zip(sizes, row, strict=True)):
            kept = size if is_chunk else 1 + accepted
            if not is_chunk:
                good = truths[index].span(done[index], done[index] + kept)
                assert_equal(
                    outputs.span(offset, offset + kept), stepper.step(good, own_slots[index])
                )
            offset += size
            done[index] += kept
            replay[index] = accepted
            slots.poison(slot_now[index], accepted)
            if read_slots[index] != slot_now[index]:
                slots.poison_all(read_slots[index])
    assert not any(pool.any() for pool in slots.of(0)), "the zero slot was written"

    # What stands in the slots, seen by one more token.
    tokens = join(*(t.span(end, end + 1) for t, end in zip(truths, done, strict=True)))
    group = make_group([1] * num_requests, done, slot_now, slot_now, replay=replay)
    outputs = slots.run(kda_recurrent, tokens, group)
    for index, slot in enumerate(slot_now):
        reference = stepper.step(tokens.span(index, index + 1), own_slots[index])
        assert_equal(outputs.span(index, index + 1), reference)
        assert torch.equal(slots.state_SHVK[slot], stepper.state_SHVK[own_slots[index]])
        history_RC = slots.conv_rows_SNC[slot, :NUM_HISTORY]
        assert torch.equal(history_RC, stepper.conv_rows_SNC[own_slots[index]])


@pytest.mark.parametrize("operator", [kda_recurrent, kda_chunked], ids=["recurrent", "chunked"])
def test_one_slot_serves_a_reader_at_every_accepted_count(operator: KdaOperator) -> None:
    """I67: k + 1 segments of one group fork from one window, each with its own replay."""
    truth = draw(20, 4)
    slots, steppers = Slots(8, NUM_DRAFTS, torch.float64), Stepper(8, torch.float64)
    prefill(slots, truth.span(0, 6), 1)
    group = make_group([1 + NUM_DRAFTS], [6], [1], [1], num_drafts=[NUM_DRAFTS])
    slots.run(kda_recurrent, truth.span(6, 7 + NUM_DRAFTS), group)
    source = slots.of(1)

    forks = range(NUM_DRAFTS + 1)
    lengths = [1 if operator is kda_recurrent else 2 + fork for fork in forks]
    starts = [7 + fork for fork in forks]
    written = [2 + fork for fork in forks]
    tokens = join(
        *(truth.span(start, start + length) for start, length in zip(starts, lengths, strict=True))
    )
    forked = make_group(lengths, starts, [1] * len(lengths), written, replay=list(forks))
    outputs = slots.run(operator, tokens, forked)

    for fork in forks:
        prefill(steppers, truth.span(0, 6), written[fork])
        steppers.step(truth.span(6, starts[fork]), written[fork])
    reference = steppers.run(operator, tokens, make_group(lengths, starts, written, written))
    assert_equal(outputs, reference)
    assert torch.equal(slots.state_SHVK[2:7], steppers.state_SHVK[2:7])
    assert all(torch.equal(a, b) for a, b in zip(source, slots.of(1), strict=True))


@pytest.mark.parametrize("leftover", [float("nan"), 1e3])
def test_the_record_of_the_tenant_before_is_never_folded_in(leftover: float) -> None:
    """I70: a slot full of another's rows gives what a clean one gives, also after a window."""
    truth = draw(20, 5)
    clean, dirty = (Slots(3, NUM_DRAFTS, torch.float64) for _ in range(2))
    for pool in (dirty.state_SHVK, dirty.record_SNHX, dirty.conv_rows_SNC):
        pool[1:] = leftover
    segments = [
        (kda_chunked, make_group([5], [0], [0], [1])),
        (kda_recurrent, make_group([1], [5], [1], [1])),
        (kda_recurrent, make_group([3], [6], [1], [2], num_drafts=[2])),
        (kda_recurrent, make_group([1], [8], [2], [2], replay=[1])),
        # The rows of the window before are still there, and none of them counts.
        (kda_recurrent, make_group([2], [9], [2], [1], num_drafts=[1])),
        (kda_chunked, make_group([4], [11], [1], [2], replay=[1])),
        (kda_recurrent, make_group([1], [15], [2], [2])),
    ]
    for operator, group in segments:
        start, end = int(group.starts_B), int(group.context_lengths_B)
        outputs = [pools.run(operator, truth.span(start, end), group) for pools in (clean, dirty)]
        assert_equal(*outputs)
        assert outputs[0].o_THV.isfinite().all() and outputs[0].y_TC.isfinite().all()


def test_windows_equal_the_published_recurrence() -> None:
    """fla 0.6.0 naive_recurrent_kda in float64 over the committed tokens: 3e-16.

    Windows of 5 of which 3, 1 and 5 tokens hold; their outputs and the state after them.
    """
    truth, wrong = draw(13, 6), draw(NUM_DRAFTS, 7)
    slots = Slots(2, NUM_DRAFTS, torch.float64)
    prefill(slots, truth.span(0, 3), 1)
    state_1HKV = slots.state_SHVK[1:].mT.clone()
    pieces, start, replay = [], 3, 0
    for num_kept in (3, 1, 5):
        window = join(truth.span(start, start + num_kept), wrong.span(0, 1 + NUM_DRAFTS - num_kept))
        group = make_group([5], [start], [1], [1], replay=[replay], num_drafts=[NUM_DRAFTS])
        outputs = slots.run(kda_recurrent, window, group)
        pieces.append(outputs.o_THV[:num_kept])
        start, replay = start + num_kept, num_kept - 1
        slots.poison(1, replay)
    group = make_group([1], [start], [1], [1], replay=[replay])
    pieces.append(slots.run(kda_recurrent, truth.span(start, start + 1), group).o_THV)

    fla = in_float64(fla_function("ops/kda/naive.py", "naive_recurrent_kda"))
    batched = [x[3:].unsqueeze(0) for x in truth[1:]]
    fla_o, fla_state = fla(*batched, scale=1.0, initial_state=state_1HKV, output_final_state=True)
    torch.testing.assert_close(torch.cat(pieces), fla_o[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(slots.state_SHVK[1].mT, fla_state[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("operator", [kda_recurrent, kda_chunked], ids=["recurrent", "chunked"])
def test_a_chunk_has_no_drafts(operator: KdaOperator) -> None:
    """Two certain tokens and a draft are no window."""
    slots = Slots(2, NUM_DRAFTS, torch.float64)
    group = make_group([3], [0], [0], [1], num_drafts=[1])
    with pytest.raises(AssertionError, match="a chunk with drafts"):
        operator(*draw(3, 8)[1:], slots.state_SHVK, slots.record_SNHX, group)
    with pytest.raises(AssertionError, match="a chunk with drafts"):
        short_convolution(draw(3, 8).x_TC, slots.weight_CW, slots.conv_rows_SNC, group)
