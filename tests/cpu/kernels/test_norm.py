"""Norms against their definition and published modules."""

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as hf

from stagecoach.kernels.norm import gated_rms_norm, grouped_rms_norm, rms_norm


@pytest.mark.parametrize("shape", [(1, 7), (5, 256), (2, 3, 60)])
def test_rms_norm_equals_published_module(shape: tuple[int, ...]) -> None:
    """transformers KimiLinearRMSNorm in float32: equal bits; a float64 formula: 9e-16."""
    x = 3 * torch.randn(shape)
    x[0] *= 1e-3  # where eps counts
    weight = torch.randn(shape[-1])
    module = hf.KimiLinearRMSNorm(shape[-1], eps=1e-5)
    with torch.no_grad():
        module.weight.copy_(weight)
        expected = module(x)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=2e-6, atol=1e-6)
    wide, wide_weight = x.double(), weight.double()
    formula = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * wide_weight
    torch.testing.assert_close(rms_norm(wide, wide_weight, 1e-5), formula, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_rounds_once(weight_dtype: torch.dtype) -> None:
    """bfloat16 output is the rounded float64 result, up to float32 noise at a rounding edge."""
    x = torch.randn(50, 64).bfloat16()
    weight = torch.randn(64).to(weight_dtype)
    before = x.clone()
    normed = rms_norm(x, weight, 1e-6)
    exact = rms_norm(x.double(), weight.double(), 1e-6)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(x, before)
    assert (normed == exact.bfloat16()).double().mean() > 0.999
    torch.testing.assert_close(normed.double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_grouped_rms_norm_is_one_norm_a_group(dtype: torch.dtype) -> None:
    x_TGC, weight_GC = (3 * torch.randn(5, 3, 12)).to(dtype), torch.randn(3, 12).to(dtype)
    before = x_TGC.clone()
    expected = torch.stack(
        [rms_norm(x_TGC[:, group], weight_GC[group], 1e-5) for group in range(3)], dim=1
    )
    normed_TGC = grouped_rms_norm(x_TGC, weight_GC, 1e-5)
    assert normed_TGC.dtype == dtype and torch.equal(x_TGC, before)
    # Statistics and weight may be joined in another order before the only rounding.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(normed_TGC, expected, rtol=tolerance, atol=0)


def test_gated_rms_norm_equals_published_module() -> None:
    """transformers KimiLinearRMSNormGated in float32: equal bits."""
    x_THV, gate_THV = 2 * torch.randn(6, 3, 20), 4 * torch.randn(6, 3, 20)
    module = hf.KimiLinearRMSNormGated(20, eps=1e-5)
    with torch.no_grad():
        module.weight.normal_()
        expected = module(x_THV, gate_THV)
        before = x_THV.clone(), gate_THV.clone()
        normed_THV = gated_rms_norm(x_THV, gate_THV, module.weight, 1e-5)
    torch.testing.assert_close(normed_THV, expected, rtol=2e-6, atol=1e-6)
    assert torch.equal(x_THV, before[0]) and torch.equal(gate_THV, before[1])


def test_gated_rms_norm_takes_the_gates_type() -> None:
    x_THV, gate_THV = torch.randn(4, 2, 8), torch.randn(4, 2, 8).bfloat16()
    weight_V = torch.ones(8)
    normed_THV = gated_rms_norm(x_THV, gate_THV, weight_V, 1e-5)
    exact_THV = gated_rms_norm(x_THV.double(), gate_THV.double(), weight_V.double(), 1e-5)
    assert (normed_THV.dtype, exact_THV.dtype) == (torch.bfloat16, torch.float64)
    torch.testing.assert_close(normed_THV.double(), exact_THV, rtol=2**-8, atol=1e-6)
