"""The sampler: exact distributions, and rows that never see their neighbours."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.kernels.sampling.noise import DRAFT_STREAM, TOKEN_STREAM, gumbel_noise
from stagecoach.request import SamplingParams
from stagecoach.runner.sampler import choose_tokens, probabilities
from tests.cpu.runner.sampling import (
    STOP_ID,
    HostRows,
    chi_square,
    exact_probabilities,
    make_table,
    pending_tokens,
    sample,
)

torch.set_num_threads(1)


LOGITS = [1.0, -0.5, 2.0, 0.3, -2.0, 1.0, 0.0, -1.0]
PROMPT, OUTPUT = (0, 1, 1), (2, 2, 5)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 2.5},
        {"top_p": 0.8},
        {"top_p": 0.05},
        {"top_k": 3},
        {"top_k": 2, "top_p": 0.5},
        {"top_k": 5, "top_p": 0.9, "temperature": 1.7},
        {"min_p": 0.2},
        {"min_p": 0.1, "top_p": 0.7, "top_k": 6, "temperature": 0.8},
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.2, "frequency_penalty": 0.4},
        {"repetition_penalty": 0.7, "presence_penalty": -1.0, "top_p": 0.9},
        {"logit_bias": {4: 3.0, 2: -5.0}},
        {"min_tokens": 4},
        {"min_tokens": 4, "logit_bias": {3: 100.0}, "top_k": 4},
        {"min_tokens": 3, "logit_bias": {3: 2.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distribution_is_exact(values: dict[str, Any], dtype: torch.dtype) -> None:
    num_draws = 6000
    table = make_table(len(LOGITS), [values] * num_draws, prompt=PROMPT, output=OUTPUT)
    logits_RV = torch.tensor(LOGITS, dtype=dtype).repeat(num_draws, 1)
    position = len(PROMPT) + len(OUTPUT)
    token_ids_R = sample(logits_RV, range(num_draws), [position] * num_draws, table).token_ids_R
    expected = exact_probabilities(LOGITS, SamplingParams(**values), PROMPT, OUTPUT)
    assert chi_square(token_ids_R, expected) < 3.09


@pytest.mark.parametrize("values", [{}, {"top_p": 0.8}, {"top_k": 4}], ids=str)
def test_positions_of_one_request_are_independent_draws(values: dict[str, Any]) -> None:
    num_draws = 6000
    table = make_table(len(LOGITS), [values], seeds=[12345])
    logits_RV = torch.tensor(LOGITS).repeat(num_draws, 1)
    token_ids_R = sample(logits_RV, [0] * num_draws, range(num_draws), table).token_ids_R
    expected = exact_probabilities(LOGITS, SamplingParams(**values), (0, 1), ())
    assert chi_square(token_ids_R, expected) < 3.09
    pairs_R = token_ids_R[0::2] * len(LOGITS) + token_ids_R[1::2]
    pair_p = [first * second for first in expected for second in expected]
    assert chi_square(pairs_R, pair_p) < 3.09


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(num_rows, vocab_size, generator=generator)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.9]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.9, 0.9999999, 1.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 7, 40, 700, 5000]),
        "min_p": st.sampled_from([0.0, 0.001, 0.2, 1.0]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
        "logit_bias": st.dictionaries(st.integers(0, 699), st.sampled_from([-100.0, 5.0])),
        "min_tokens": st.integers(0, 6),
        "max_tokens": st.just(20),
        "logprobs": st.none() | st.integers(0, 20),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=7), st.integers(0, 100), st.randoms())
def test_a_row_is_the_same_alone_in_a_batch_and_in_any_order(
    params: list[dict[str, Any]], seed: int, random: Any
) -> None:
    vocab_size = 700
    logits_RV = random_logits(len(params), vocab_size, seed)
    logits_RV[:, 5:300:7] = logits_RV[:, 5:6]  # ties
    table = make_table(vocab_size, params, output=(2, 5, 5))
    positions = [5 + row for row in range(len(params))]
    together = sample(logits_RV, range(len(params)), positions, table)
    order = list(range(len(params)))
    random.shuffle(order)
    shuffled = sample(logits_RV[order], order, [positions[row] for row in order], table)
    for place, row in enumerate(order):
        alone = sample(logits_RV[row : row + 1], [row], [positions[row]], table)
        in_batch = HostRows([together.token_ids[row]], [together.logprobs[row]])
        in_shuffle = HostRows([shuffled.token_ids[place]], [shuffled.logprobs[place]])
        assert alone == in_batch == in_shuffle


@settings(max_examples=60, deadline=None)
@given(PARAMS, st.integers(0, 1000))
def test_the_choice_is_the_noisy_argmax_over_the_reference_distribution(
    values: dict[str, Any], seed: int
) -> None:
    vocab_size = 700
    logits_RV = random_logits(1, vocab_size, seed).to(torch.float64)
    table = make_table(vocab_size, [values], output=(2, 5, 5), seeds=[seed])
    (token_id,) = sample(logits_RV, [0], [5], table).token_ids
    params = SamplingParams(**values)
    is_greedy = params.is_greedy
    if is_greedy:
        params = SamplingParams(**{**values, "temperature": 1.0, "top_k": 1})
    exact = torch.tensor(
        exact_probabilities(logits_RV[0].tolist(), params, (0, 1), (2, 5, 5)),
        dtype=torch.float64,
    )
    p_RV = probabilities(logits_RV, [0], torch.tensor([5]), table)
    assert p_RV.dtype == torch.float64
    assert torch.allclose(p_RV[0], exact, rtol=1e-9, atol=0.0)
    noise_V = gumbel_noise(torch.tensor([seed]), torch.tensor([5]), vocab_size, "cpu")[0]
    assert token_id == int((exact.log() + (0.0 if is_greedy else noise_V)).argmax())


@settings(max_examples=40, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 100), st.sampled_from([12, 700]))
def test_probabilities_are_what_tokens_are_drawn_from(
    params: list[dict[str, Any]], seed: int, vocab_size: int
) -> None:
    """For rows of every kind beside each other, and with noise from elsewhere."""
    params = [
        values | {"logit_bias": {key % vocab_size: 5.0 for key in values.get("logit_bias", {})}}
        for values in params
    ]
    logits_RV = random_logits(len(params), vocab_size, seed)
    logits_RV[:, 1:10:3] = logits_RV[:, 1:2]  # ties
    table = make_table(vocab_size, params, output=(2, 5, 5))
    rows, positions_R = list(range(len(params))), torch.arange(5, 5 + len(params))
    pending = pending_tokens([[row % 4] * (row % 3) for row in rows])
    p_RV = probabilities(logits_RV, rows, positions_R, table, pending)
    assert torch.allclose(p_RV.sum(-1), torch.ones(len(params)))
    for stream in (TOKEN_STREAM, DRAFT_STREAM):
        noise_RV = gumbel_noise(table.seeds_N, positions_R, vocab_size, "cpu", stream)
        other_RV = None if stream == TOKEN_STREAM else noise_RV
        chosen_R = choose_tokens(logits_RV, rows, positions_R, table, pending, other_RV)
        # Probabilities are rounded once more than what is chosen from.
        scores_RV = p_RV.log() + noise_RV
        best_R = scores_RV.amax(-1)
        chosen_score_R = scores_RV.gather(-1, chosen_R.unsqueeze(-1)).squeeze(-1)
        assert (chosen_score_R >= best_R - 1e-5).all()
        greedy = [row for row in rows if table.traits(row).is_greedy]
        assert torch.equal(chosen_R[greedy], p_RV[greedy].argmax(-1))


def test_seeds_decide_and_neighbours_do_not() -> None:
    logits_RV = torch.zeros(6, 32)
    params: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2}, {}, {"temperature": 0.0}, {}, {}]
    table = make_table(32, params, seeds=[1, 2, 77, 78, 1, 79])
    streams = [
        sample(logits_RV, range(6), [position] * 6, table).token_ids_R.tolist()
        for position in range(40)
    ]
    by_row = [list(tokens) for tokens in zip(*streams, strict=True)]
    assert by_row[0] == by_row[4]
    assert by_row[3] == [0] * 40
    different = {tuple(by_row[row]) for row in (0, 1, 2, 5)}
    assert len(different) == 4 and all(len(set(tokens)) > 10 for tokens in different)


def test_all_greedy_is_the_argmax_and_ties_go_to_the_lowest_id() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    for extra in ({}, {"logprobs": 1}, {"repetition_penalty": 1.5}):
        table = make_table(4, [{"temperature": 0.0, **extra}] * 2, prompt=(3,))
        assert sample(logits_RV, [0, 1], [1, 1], table).token_ids_R.tolist() == [1, 0]


def test_greedy_is_the_same_in_bfloat16_and_beside_random_rows() -> None:
    logits_RV = random_logits(2, 50).to(torch.bfloat16)
    table = make_table(50, [{"temperature": 0.0}, {"temperature": 1.0}])
    both = sample(logits_RV, [0, 1], [2, 2], table).token_ids_R
    alone = sample(logits_RV[:1], [0], [2], table).token_ids_R
    assert both[0] == alone[0] == logits_RV[0].float().argmax()


@pytest.mark.parametrize("values", [{"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}], ids=str)
def test_a_cut_to_one_token_is_greedy(values: dict[str, Any]) -> None:
    logits_RV = random_logits(200, 600)
    table = make_table(600, [{"temperature": 5.0, **values}])
    token_ids_R = sample(logits_RV, [0] * 200, range(200), table).token_ids_R
    assert torch.equal(token_ids_R, logits_RV.argmax(-1))


@pytest.mark.parametrize("vocab_size", [6, 3000])
def test_tied_tokens_are_cut_by_id(vocab_size: int) -> None:
    logits_RV = torch.zeros(400, vocab_size)
    logits_RV[:, 4] = 0.5
    table = make_table(vocab_size, [{"top_k": 3}, {"top_p": 2.2 / (vocab_size + 0.6487212707)}])
    for row in (0, 1):
        token_ids_R = sample(logits_RV, [row] * 400, range(400), table).token_ids_R
        kept = {0, 1, 4} if row == 0 else {0, 4}
        assert set(token_ids_R.tolist()) == kept


def test_a_flat_nucleus_reaches_beyond_the_first_look() -> None:
    vocab_size, num_draws = 5000, 600
    table = make_table(vocab_size, [{"top_p": 0.5}, {"top_p": 0.01}])
    logits_RV = torch.zeros(num_draws, vocab_size)
    rows = [index % 2 for index in range(num_draws)]
    token_ids_R = sample(logits_RV, rows, range(num_draws), table).token_ids_R
    assert 2400 < int(token_ids_R[0::2].max()) < 2500
    assert 40 < int(token_ids_R[1::2].max()) < 50


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_and_overflows_nowhere(temperature: float) -> None:
    logits_RV = random_logits(20, 40)
    table = make_table(40, [{"temperature": temperature}])
    token_ids_R = sample(logits_RV, [0] * 20, range(20), table).token_ids_R
    assert torch.equal(token_ids_R, logits_RV.argmax(-1))


def test_min_tokens_ends_by_position() -> None:
    logits_RV = torch.zeros(4, 8)
    logits_RV[:, STOP_ID] = 50.0
    for temperature in (0.0, 1.0):
        table = make_table(8, [{"temperature": temperature, "min_tokens": 2}])
        token_ids = sample(logits_RV, [0] * 4, [2, 3, 4, 5], table).token_ids_R.tolist()
        assert STOP_ID not in token_ids[:2] and token_ids[2:] == [STOP_ID, STOP_ID]


def test_bias_and_masks_stay_in_their_row_and_the_logits_are_not_changed() -> None:
    logits_RV = random_logits(3, 20)
    before = logits_RV.clone()
    params: list[dict[str, Any]] = [
        {"temperature": 0.0, "logit_bias": {7: 100.0}},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.0, "frequency_penalty": 1.0, "min_tokens": 9},
    ]
    table = make_table(20, params, output=(4,))
    host = sample(logits_RV, [0, 1, 2], [3, 3, 3], table)
    assert host.token_ids[:2] == [7, int(before[1].argmax())]
    assert torch.equal(logits_RV, before)


def test_penalties_need_not_be_asked_for_by_every_row() -> None:
    logits_RV = torch.tensor([[2.0, 1.9, 0.0], [2.0, 1.9, 0.0]])
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "presence_penalty": 1.0},
    ]
    table = make_table(3, params, prompt=(2,))
    for expected in ([0, 0], [0, 1], [0, 0]):
        token_ids_R = sample(logits_RV, [0, 1], [1, 1], table).token_ids_R
        assert token_ids_R.tolist() == expected
        table.append([0, 1], token_ids_R)


WINDOW_PARAMS = [
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"presence_penalty": 2.0, "repetition_penalty": 1.4, "top_p": 0.9},
    {"frequency_penalty": 0.7, "top_k": 6, "min_tokens": 3, "logprobs": 2},
]


@pytest.mark.parametrize("values", WINDOW_PARAMS, ids=str)
def test_a_window_equals_one_token_at_a_time(values: dict[str, Any]) -> None:
    width = 5
    logits_RV = random_logits(width, 12) / 3.0
    table = make_table(12, [{}, values], output=(4,), seeds=[0, 5])
    one_by_one = []
    for index in range(width):
        sampled = sample(logits_RV[index : index + 1], [1], [3 + index], table)
        table.append([1], sampled.token_ids_R)
        one_by_one.append(sampled)
    token_ids = [host.token_ids[0] for host in one_by_one]
    window_table = make_table(12, [{}, values], output=(4,), seeds=[0, 5])
    window = sample(
        logits_RV,
        [1] * width,
        range(3, 3 + width),
        window_table,
        pending=[token_ids[:index] for index in range(width)],
    )
    assert window.token_ids == token_ids
    assert window.logprobs == [host.logprobs[0] for host in one_by_one]
    window_table.append([1] * width, torch.tensor(token_ids))
    row = torch.tensor([1])
    assert torch.equal(window_table.output_counts(row), table.output_counts(row))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_poisoned_row_does_not_disturb_its_neighbours(poison: float) -> None:
    vocab_size = 700
    params: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 4},
        {"logprobs": 4},
        {"top_p": 0.7, "logprobs": 4},
        {"top_k": 9, "min_p": 0.01},
        {"frequency_penalty": 1.0, "logprobs": 2},
    ]
    table = make_table(vocab_size, [*params, *params], output=(3,))
    logits_RV = random_logits(10, vocab_size)
    clean = sample(logits_RV[:5], range(5), [3] * 5, table)
    for is_whole_row in (False, True):
        poisoned_RV = logits_RV.clone()
        poisoned_RV[5:, slice(None) if is_whole_row else 17] = poison
        host = sample(poisoned_RV, range(10), [3] * 10, table)
        assert host.token_ids[:5] == clean.token_ids
        assert host.logprobs[:5] == clean.logprobs
        assert all(0 <= token_id < vocab_size for token_id in host.token_ids)
        if poison == math.inf and not is_whole_row:
            assert host.token_ids[5:] == [17] * 5


def test_no_rows_give_no_tokens() -> None:
    table = make_table(5, [{}])
    assert sample(torch.empty(0, 5), [], [], table) == HostRows([], [])
