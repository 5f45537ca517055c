"""What quantised weights, inputs and cache rows mean, and how far they are from the plain ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.kernels.activation import Activation
from stagecoach.kernels.cache_rows import store_rows
from stagecoach.kernels.linear import grouped_linear, linear
from stagecoach.kernels.mla import mla_decode, mla_prefill, write_rows
from stagecoach.kernels.moe import SharedExpert, routed_experts
from stagecoach.kernels.quantization import (
    FP8_DTYPE,
    Fp8Weight,
    Mxfp4Weight,
    dequantize_fp8,
    quantize_fp8,
    unpack_mxfp4,
)
from tests.cpu.kernels.group_builder import make_group

pytestmark = pytest.mark.cpu

# Half a unit of the last of three mantissa bits, and half the least step, of values up to 448.
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-10


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def random_packed(*shape: int, seed: int = 0) -> Mxfp4Weight:
    """Any codes, scales around one."""
    generator = torch.Generator().manual_seed(seed)
    *rows, columns = shape
    return Mxfp4Weight(
        torch.randint(256, (*rows, columns // 2), dtype=torch.uint8, generator=generator),
        torch.randint(124, 128, (*rows, columns // 32), dtype=torch.uint8, generator=generator),
    )


def test_the_shape_is_the_dense_one_and_a_part_is_a_view() -> None:
    packed = random_packed(3, 8, 64)
    assert packed.shape == (3, 8, 64) and packed.nbytes == 3 * 8 * (32 + 2)
    assert packed.part(1).shape == (8, 64)
    assert packed.part(1).part(slice(2, 5)).packed.data_ptr() == packed.packed[1, 2].data_ptr()
    quantized = quantize_fp8(random(6, 10))
    assert quantized.shape == (6, 10) and quantized.nbytes == 6 * (10 + 4)
    assert quantized.part(slice(2, 4)).scale.tolist() == quantized.scale[2:4].tolist()
    assert not packed.is_cuda and not quantized.is_cuda


@given(st.integers(-30, 30), st.integers(1, 9), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_an_fp8_row_is_within_half_a_unit(magnitude: int, rows: int, width: int, seed: int) -> None:
    x = random(rows, width, seed=seed) * 2.0**magnitude
    quantized = quantize_fp8(x)
    assert quantized.weight.dtype == FP8_DTYPE and quantized.scale.dtype == torch.float32
    factor = quantized.scale.double().unsqueeze(1)
    bound = torch.maximum(x.abs() * RELATIVE, factor * ABSOLUTE) * (1 + 1e-6)
    assert ((dequantize_fp8(quantized, torch.float64) - x).abs() <= bound).all()
    # The largest of a row is met but for the rounding of its factor.
    largest = quantized.weight.float().abs().amax(1)
    assert (largest == 448).all() or not x.any()


def test_rounding_is_to_nearest_and_ties_to_even() -> None:
    # With 448 in the row the factor is one. 17 and 19 lie half-way between steps of two.
    row = torch.tensor([[448.0, 17.0, 19.0, 17.01, -17.0, 0.0, 2.0**-10, 1.5 * 2.0**-9]])
    values = quantize_fp8(row).weight.float()[0].tolist()
    assert values == [448.0, 16.0, 20.0, 18.0, -16.0, 0.0, 0.0, 2.0**-8]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_of_zeros_and_one_that_is_not_finite(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 5, dtype=dtype)
    x[1, 2] = float("nan")
    x[2] = 1.0
    y = linear(x, quantize_fp8(torch.ones(4, 5)))
    assert not y[0].any() and y[1].isnan().all() and y.dtype == dtype
    torch.testing.assert_close(y[2].double(), torch.full((4,), 5.0, dtype=torch.float64))


def test_fp8_linear_is_the_product_of_what_was_quantised() -> None:
    x, weight = random(7, 24), quantize_fp8(random(10, 24, seed=1))
    expected = dequantize_fp8(quantize_fp8(x), torch.float64) @ (
        dequantize_fp8(weight, torch.float64).t()
    )
    torch.testing.assert_close(linear(x, weight), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(linear(x.float(), weight), expected.float(), rtol=1e-4, atol=1e-4)
    half = linear(x.bfloat16(), weight)
    assert half.dtype == torch.bfloat16
    exact = linear(x.bfloat16().double(), weight)
    torch.testing.assert_close(half.double(), exact, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_fp8_linear_is_near_the_plain_product(seed: int) -> None:
    """Each addend is off by at most two roundings; in all by far less."""
    x, dense = random(9, 256, seed=seed), random(33, 256, seed=seed + 10)
    error = (linear(x, quantize_fp8(dense)) - x @ dense.t()).abs()
    one = (1 + RELATIVE) ** 2 - 1
    tiny = ABSOLUTE * 5 / 448 * 256 * 8  # of elements below the least normal value
    assert (error <= one * (x.abs() @ dense.abs().t()) + tiny).all()
    assert error.square().mean().sqrt() < 0.05 * (x @ dense.t()).square().mean().sqrt()


def test_a_token_does_not_depend_on_its_company() -> None:
    x, weight = random(5, 40), quantize_fp8(random(6, 40, seed=1))
    whole = linear(x, weight)
    for token in range(5):
        torch.testing.assert_close(linear(x[token : token + 1], weight)[0], whole[token])
    assert torch.equal(linear(x.view(1, 5, 40), weight)[0], whole)


def test_grouped_products_have_weights_of_their_own() -> None:
    x, dense = random(4, 3, 16), random(3, 8, 16, seed=1)
    weight = quantize_fp8(dense)
    both = grouped_linear(x, weight)
    assert both.shape == (3, 4, 8)
    for group in range(3):
        assert torch.equal(both[group], linear(x[:, group], quantize_fp8(dense[group])))


@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_packed_experts_are_the_decoded_ones(num_tokens: int, dtype: torch.dtype) -> None:
    gate_up, down = random_packed(5, 64, 96), random_packed(5, 96, 32, seed=1)
    x = (random(num_tokens, 96, seed=2) / 96).to(dtype)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)])
    weights = random(num_tokens, 2, seed=3, dtype=torch.promote_types(dtype, torch.float32))
    activation = Activation("silu")
    packed = routed_experts(x, weights, ids, gate_up, down, activation)
    decoded = routed_experts(
        x, weights, ids, unpack_mxfp4(gate_up, dtype), unpack_mxfp4(down, dtype), activation
    )
    assert packed.dtype == dtype and torch.equal(packed, decoded)


def test_experts_that_nobody_chose_are_not_decoded() -> None:
    gate_up, down = random_packed(3, 64, 32), random_packed(3, 32, 32, seed=1)
    for weight in (gate_up, down):
        weight.scale[1] = 255  # NaN
    ids = torch.tensor([[0, 2], [2, 0]])
    x, weights = random(2, 32), random(2, 2)
    assert routed_experts(x, weights, ids, gate_up, down, Activation("silu")).isfinite().all()
    ids[0, 0] = 1
    assert routed_experts(x, weights, ids, gate_up, down, Activation("silu"))[0].isnan().all()


def test_a_quantised_shared_expert_is_added() -> None:
    gate_up, down = random_packed(2, 64, 32), random_packed(2, 32, 32, seed=1)
    shared = SharedExpert(
        quantize_fp8(random(64, 32, seed=2)), quantize_fp8(random(32, 32, seed=3))
    )
    x, weights, ids = random(3, 32), random(3, 1), torch.zeros(3, 1, dtype=torch.int64)
    activation = Activation("silu")
    alone = routed_experts(x, weights, ids, gate_up, down, activation)
    both = routed_experts(x, weights, ids, gate_up, down, activation, shared)
    torch.testing.assert_close(both, alone + shared(x, activation))


def test_rows_of_an_fp8_cache_saturate_and_keep_nan() -> None:
    latent, pe = random(4, 6) * 2.0, random(4, 3, seed=1)
    pe[0, 0], pe[1, 1], pe[2, 2] = 1e9, -1e9, float("nan")
    cache = torch.zeros(9, 9).to(FP8_DTYPE)
    weight, places = torch.ones(6, dtype=torch.float64), torch.tensor([5, 2, 8, 1])
    write_rows(cache, latent, pe, weight, 1e-6, places)
    stored = cache.double()[places]
    assert stored[0, 6] == 448 and stored[1, 7] == -448 and stored[2, 8].isnan()
    plain = torch.zeros(9, 9, dtype=torch.float64)
    write_rows(plain, latent, pe, weight, 1e-6, places)
    error = (stored[:, :6] - plain[places, :6]).abs()
    assert (error <= torch.maximum(plain[places, :6].abs() * RELATIVE, error * 0 + ABSOLUTE)).all()
    assert not cache.double()[[0, 3, 4, 6, 7]].any()
    several = torch.zeros(2, 9, 4).to(FP8_DTYPE)
    store_rows(torch.full((3, 2, 4), 500.0), several, torch.tensor([4, -1, 6]))
    assert (several.float()[:, [4, 6]] == 448).all() and several.float().sum() == 448 * 16


@pytest.mark.parametrize("form", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_reads_an_fp8_cache_as_its_values(form: str, dtype: torch.dtype) -> None:
    """Rows that no context has hold NaN."""
    num_heads, nope, pe, latent, value = 2, 5, 3, 8, 4
    cache = torch.full((20, latent + pe), float("nan")).to(FP8_DTYPE)
    cache[0].zero_()
    rows = [[4, 9, 2, 7, 3], [11, 15]]
    for row in (*rows[0], *rows[1]):
        cache[row] = random(latent + pe, seed=row).to(FP8_DTYPE)
    group = make_group([2, 1], [3, 1], context_rows=rows)
    wide = cache.to(dtype)
    if form == "decode":
        q_latent, q_pe = random(3, num_heads, latent, dtype=dtype), random(3, 2, pe, dtype=dtype)
        narrow, expected = (mla_decode(q_latent, q_pe, each, group, 0.3) for each in (cache, wide))
    else:
        q, kv_up = random(3, num_heads, nope + pe, dtype=dtype), random(18, latent, dtype=dtype)
        narrow, expected = (mla_prefill(q, each, kv_up, group, 0.3) for each in (cache, wide))
        assert narrow.shape == (3, num_heads, value)
    assert torch.equal(narrow, expected) and narrow.isfinite().all()


def test_a_weight_of_nan_shows() -> None:
    weight = quantize_fp8(random(3, 8))
    weight.scale[1] = float("nan")
    y = linear(random(2, 8, seed=1), weight)
    assert y[:, 1].isnan().all() and y[:, [0, 2]].isfinite().all()
    assert isinstance(weight, Fp8Weight)
