"""Gated activations against an independent implementation and their limits."""

import math

import mlx.core as mx
import pytest
import torch
import torch.nn.functional as F
from mlx_lm.models.kimi_k3 import SiTU

from stagecoach.kernels.activation import silu_and_mul, situ_and_mul


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_equals_plain_arithmetic(linear_beta: float | None) -> None:
    """The formula number by number in Python floats: 1e-14 relative in float64."""
    gate, up = 6 * torch.randn(2, 40, dtype=torch.float64)
    out = situ_and_mul(gate, up, 4.0, linear_beta)
    for g, u, value in zip(gate.tolist(), up.tolist(), out.tolist(), strict=True):
        linear = u if linear_beta is None else linear_beta * math.tanh(u / linear_beta)
        expected = 4.0 * math.tanh(g / 4.0) / (1 + math.exp(-g)) * linear
        assert value == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_situ_equals_published_activation() -> None:
    """mlx-lm 0.32.2 SiTU in float32: 8e-6 on values up to 100."""
    gate, up = 6 * torch.randn(2, 300)
    expected = SiTU(4.0, 25.0)(mx.array(up.numpy()), mx.array(gate.numpy()))
    out = situ_and_mul(gate, up, 4.0, 25.0)
    torch.testing.assert_close(out, torch.tensor(expected.tolist()), rtol=1e-5, atol=1e-6)


def test_situ_bounds_what_it_lets_through() -> None:
    huge = torch.tensor([1e4, -1e4])
    assert situ_and_mul(huge.abs(), huge, 4.0, 25.0).tolist() == [100.0, -100.0]
    assert situ_and_mul(-huge.abs(), huge, 4.0, 25.0).tolist() == [0.0, 0.0]


def test_silu_equals_torch() -> None:
    gate, up = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(silu_and_mul(gate, up), F.silu(gate) * up, rtol=1e-15, atol=0)


@pytest.mark.parametrize("function", [silu_and_mul, lambda g, u: situ_and_mul(g, u, 4.0, 25.0)])
def test_half_precision_rounds_once_and_keeps_its_inputs(function) -> None:
    gate, up = (3 * torch.randn(2, 200)).bfloat16()
    before = gate.clone(), up.clone()
    out = function(gate, up)
    exact = function(gate.double(), up.double())
    assert (out.dtype, exact.dtype) == (torch.bfloat16, torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-30)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])
    narrow = gate.float(), up.float()
    kept = narrow[0].clone(), narrow[1].clone()
    function(*narrow)
    assert torch.equal(narrow[0], kept[0]) and torch.equal(narrow[1], kept[1])
