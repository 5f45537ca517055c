"""The short convolution against published code and over every cut of a sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear import modeling_kimi_linear as hf

from stagecoach.kernels.short_conv import short_convolution
from tests.cpu.kernels.group_builder import cut, make_group
from tests.cpu.kernels.oracles import torch_path


def make_case(num_tokens: int, *, channels: int = 6, taps: int = 4, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x_TC = torch.randn(num_tokens, channels, generator=generator, dtype=torch.float64)
    weight_CW = torch.randn(channels, taps, generator=generator, dtype=torch.float64)
    rows_SRC = torch.full((9, taps - 1, channels), float("nan"), dtype=torch.float64)
    rows_SRC[0] = 0
    return x_TC, weight_CW, rows_SRC


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 50])
def test_equals_published_convolution(num_tokens: int, taps: int) -> None:
    """transformers causal_conv1d_fn (SiLU after) in float64: 5e-16."""
    x_TC, weight_CW, rows_SRC = make_case(num_tokens, taps=taps)
    expected_1CT = torch_path(hf.causal_conv1d_fn)(
        x_TC.t().unsqueeze(0), weight_CW, activation="silu"
    )
    y_TC = short_convolution(x_TC, weight_CW, rows_SRC, make_group([num_tokens], [0], [0], [3]))
    torch.testing.assert_close(y_TC, expected_1CT[0].t(), rtol=1e-13, atol=1e-14)
    history = torch.cat((torch.zeros(taps - 1, 6, dtype=torch.float64), x_TC))[1 - taps :]
    assert torch.equal(rows_SRC[3], history)


def test_decode_equals_published_update() -> None:
    """transformers causal_conv1d_update, whose cache holds one row more: 5e-16."""
    x_TC, weight_CW, rows_SRC = make_case(3)
    rows_SRC[1:4] = torch.randn(3, 3, 6, dtype=torch.float64)
    cache = torch.cat((torch.zeros(3, 6, 1), rows_SRC[1:4].mT), dim=2)
    expected = torch_path(hf.causal_conv1d_update)(
        x_TC.unsqueeze(2), cache, weight_CW, activation="silu"
    )
    group = make_group([1, 1, 1], [9, 9, 9], [1, 2, 3], [5, 2, 4])
    y_TC = short_convolution(x_TC, weight_CW, rows_SRC, group)
    torch.testing.assert_close(y_TC, expected[:, :, 0], rtol=1e-13, atol=1e-14)
    for row, slot in enumerate((5, 2, 4)):
        assert torch.equal(rows_SRC[slot], cache[row, :, 1:].t())


@settings(max_examples=40, deadline=None)
@given(
    totals=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    taps=st.sampled_from([2, 4, 5]),
)
def test_any_split_in_any_company_is_the_same(
    totals: list[int], sizes: list[int], taps: int
) -> None:
    """Ragged steps, segments shorter than the history, slots moving, NaN elsewhere.

    float64: required 1e-13, reached 2e-15.

    The reference runs each sequence alone and whole.
    """
    x_TC, weight_CW, rows_SRC = make_case(sum(totals), taps=taps)
    sequences = x_TC.split(totals)
    whole = []
    for sequence in sequences:
        scratch_SRC = make_case(1, taps=taps)[2]
        group = make_group([len(sequence)], [0], [0], [1])
        whole.append(short_convolution(sequence, weight_CW, scratch_SRC, group))
    spans = [cut(total, sizes[index:] or sizes) for index, total in enumerate(totals)]
    outputs: list[list[torch.Tensor]] = [[] for _ in totals]
    for step in range(max(map(len, spans))):
        live = [index for index, row in enumerate(spans) if step < len(row)]
        now = [spans[index][step] for index in live]
        read = [0 if step == 0 else 1 + 2 * index + (step - 1) % 2 for index in live]
        write = [1 + 2 * index + step % 2 for index in live]
        group = make_group([e - s for s, e in now], [s for s, _ in now], read, write)
        flat = torch.cat([sequences[i][s:e] for i, (s, e) in zip(live, now, strict=True)])
        y_TC = short_convolution(flat, weight_CW, rows_SRC, group)
        pieces = y_TC.split([e - s for s, e in now])
        for index, piece in zip(live, pieces, strict=True):
            outputs[index].append(piece)
    for pieces, expected in zip(outputs, whole, strict=True):
        torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-13, atol=1e-13)
    assert not rows_SRC[0].any()


@pytest.mark.parametrize("taps", [2, 4, 5])
def test_a_saved_history_ends_at_its_position(taps: int) -> None:
    """Of chunks, across their starts; of windows, among replayed rows and behind the anchor."""
    num_rows = taps - 1
    x_TC, weight_CW, _ = make_case(12, taps=taps)
    rows_SNC = torch.full((30, num_rows + 4, 6), float("nan"), dtype=torch.float64)
    rows_SNC[0] = 0
    padded_TC = torch.cat((torch.zeros(num_rows, 6, dtype=torch.float64), x_TC))

    def check(saves: list[tuple[int, int, int]]) -> None:
        for _, position, slot in saves:
            assert torch.equal(rows_SNC[slot, :num_rows], padded_TC[position : position + num_rows])
            assert rows_SNC[slot, num_rows:].isnan().all()

    saves = [(0, 2, 10), (0, 1, 11), (1, 5, 12), (1, 1, 13), (1, 2, 14)]
    group = make_group([2, 5], write_slots=[1, 2], saves=saves)
    short_convolution(torch.cat((x_TC[:2], x_TC[:5])), weight_CW, rows_SNC, group)
    check(saves)
    # Two windows over tokens 5 to 9, and what follows them: one kept all drafts, one two.
    group = make_group([5, 5], [5, 5], [2, 2], [3, 4], num_drafts=[4, 4])
    short_convolution(x_TC[5:10].repeat(2, 1), weight_CW, rows_SNC, group)
    rows_SNC[4, num_rows + 2 :] = torch.nan
    saves = [(0, position, 12 + position) for position in range(7, 12)]
    saves += [(1, position, 20 + position) for position in range(7, 10)]
    group = make_group([1, 1], [10, 8], [3, 4], [3, 4], replay=[4, 2], saves=saves)
    short_convolution(x_TC[[10, 8]], weight_CW, rows_SNC, group)
    check(saves)


def test_half_precision_sums_are_wide() -> None:
    """bfloat16 in and out, float32 weights and sums, rounded once; inputs are left alone."""
    x_TC, weight_CW, rows_SRC = (x.bfloat16() for x in make_case(70, channels=40))
    weight_CW = weight_CW.float()
    for lengths in ([70], [1] * 7, [3, 40]):
        group = make_group(lengths, write_slots=list(range(1, len(lengths) + 1)))
        x = x_TC[: sum(lengths)]
        before = x.clone()
        wide_rows_SRC = rows_SRC.double()
        y_TC = short_convolution(x, weight_CW, rows_SRC, group)
        exact_TC = short_convolution(x.double(), weight_CW.double(), wide_rows_SRC, group)
        assert y_TC.dtype == torch.bfloat16
        torch.testing.assert_close(y_TC.double(), exact_TC, rtol=2**-8, atol=1e-6)
        assert torch.equal(x, before)
