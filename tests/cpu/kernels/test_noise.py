"""Noise: published vectors, and dependence on (seed, position, token id) alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.kernels.sampling.noise import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    TOKEN_STREAM,
    gumbel_noise,
    gumbel_noise_at,
    philox4x32,
    uniform_noise,
)

torch.set_num_threads(1)

SEEDS = st.integers(0, 2**63 - 1)


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1 = (p1 >> 32) ^ x1 ^ k0, p1 & 0xFFFFFFFF
        x2, x3 = (p0 >> 32) ^ x3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [x0, x1, x2, x3]


def run_philox(counter: list[int], key: list[int]) -> list[int]:
    words = philox4x32(
        tuple(torch.tensor([word]) for word in counter),
        (torch.tensor([key[0]]), torch.tensor([key[1]])),
    )
    return words[0].tolist()


# Random123 1.14, tests/kat_vectors, lines "philox4x32 10".
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_matches_the_published_vectors(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    assert run_philox(words(counter), words(key)) == words(expected)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_philox_equals_plain_integer_arithmetic(words: list[int]) -> None:
    assert run_philox(words[:4], words[4:]) == philox_in_python(words[:4], words[4:])


STREAMS = st.sampled_from([TOKEN_STREAM, DRAFT_STREAM, ACCEPT_STREAM])


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(0, 2**40), st.integers(1, 70), STREAMS)
def test_noise_is_the_documented_word(
    seed: int, position: int, vocab_size: int, stream: int
) -> None:
    seeds_1, positions_1 = torch.tensor([seed]), torch.tensor([position])
    noise_1V = gumbel_noise(seeds_1, positions_1, vocab_size, "cpu", stream)
    assert noise_1V.shape == (1, vocab_size) and noise_1V.dtype == torch.float64
    token_id = vocab_size - 1
    words = philox_in_python(
        [token_id // 4, position & 0xFFFFFFFF, position >> 32, stream],
        [seed & 0xFFFFFFFF, seed >> 32],
    )
    uniform = (words[token_id % 4] + 0.5) / 2**32
    assert noise_1V[0, token_id].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-14)
    first = math.exp(-math.exp(-noise_1V[0, 0].item()))
    assert uniform_noise(seeds_1, positions_1, stream).item() == pytest.approx(first, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**33)), min_size=1, max_size=6))
def test_rows_do_not_see_each_other(pairs: list[tuple[int, int]]) -> None:
    seeds_R = torch.tensor([seed for seed, _ in pairs])
    positions_R = torch.tensor([position for _, position in pairs])
    noise_RV = gumbel_noise(seeds_R, positions_R, 101, "cpu")
    for row in range(len(pairs)):
        alone = gumbel_noise(seeds_R[row : row + 1], positions_R[row : row + 1], 101, "cpu")
        assert torch.equal(noise_RV[row], alone[0])


def test_chosen_tokens_have_the_same_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds_R = torch.tensor([7, 2**63 - 1, 0])
    positions_R = torch.tensor([0, 5, 2**35])
    token_ids_RK = torch.randint(0, 4099, (3, 57), generator=generator)
    dense_RV = gumbel_noise(seeds_R, positions_R, 4099, "cpu")
    at_RK = gumbel_noise_at(seeds_R, positions_R, token_ids_RK)
    assert torch.equal(at_RK, dense_RV.gather(1, token_ids_RK))


def test_a_smaller_vocabulary_is_a_prefix() -> None:
    seeds_R, positions_R = torch.tensor([3]), torch.tensor([9])
    whole = gumbel_noise(seeds_R, positions_R, 64, "cpu")
    assert torch.equal(gumbel_noise(seeds_R, positions_R, 13, "cpu"), whole[:, :13])


def test_seed_and_position_words_all_matter() -> None:
    pairs = [(0, 0), (1, 0), (2**32, 0), (0, 1), (0, 2**32)]
    noise_RV = gumbel_noise(
        torch.tensor([seed for seed, _ in pairs]),
        torch.tensor([position for _, position in pairs]),
        8,
        "cpu",
    )
    assert len({tuple(row) for row in noise_RV.tolist()}) == len(pairs)


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.arange(50), torch.zeros(50, dtype=torch.int64), 4000, "cpu")
    uniforms = torch.exp(-torch.exp(-noise)).flatten().sort().values
    expected = (torch.arange(len(uniforms)) + 0.5) / len(uniforms)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed by chance once in a thousand.
    assert (uniforms - expected).abs().max() < 1.95 / math.sqrt(len(uniforms))
    assert torch.isfinite(noise).all()


def test_the_extreme_words_give_finite_noise() -> None:
    from stagecoach.kernels.sampling.noise import _gumbel

    noise = _gumbel(torch.tensor([0, 2**32 - 1]))
    assert torch.isfinite(noise).all() and noise[0] < -3 and noise[1] > 22


def test_streams_are_independent() -> None:
    seeds_R, positions_R = torch.arange(40), torch.zeros(40, dtype=torch.int64)
    token, draft = (
        gumbel_noise(seeds_R, positions_R, 1000, "cpu", stream).flatten()
        for stream in (TOKEN_STREAM, DRAFT_STREAM)
    )
    correlation = torch.corrcoef(torch.stack([token, draft]))[0, 1]
    # Of 40,000 independent pairs, beyond 4 / sqrt(n) once in 16,000 times.
    assert correlation.abs() < 4 / math.sqrt(len(token))
    uniforms = (
        uniform_noise(torch.zeros(4000, dtype=torch.int64), torch.arange(4000), ACCEPT_STREAM)
        .sort()
        .values
    )
    expected = (torch.arange(4000) + 0.5) / 4000
    assert (uniforms - expected).abs().max() < 1.95 / math.sqrt(4000)
