"""The attention residual mixture against published code and its promises."""

import pytest
import torch

from stagecoach.kernels.attn_res import mix
from tests.cpu.kernels.oracles import fla_function


@pytest.mark.parametrize("num_blocks", [1, 2, 8])
def test_equals_published_mixture(num_blocks: int) -> None:
    """fla 0.6.0 naive_attnres in float32: 4e-6 on values up to 9.

    Its query is the projection weight.
    """
    bank_TBH = 3 * torch.randn(5, num_blocks, 24)
    partial_TH = torch.randn(5, 24)
    norm_weight_H, projection_H = torch.randn(24), torch.randn(24)
    expected = fla_function("ops/attnres/naive.py", "naive_attnres")(
        projection_H,
        [*(block.contiguous() for block in bank_TBH.unbind(1)), partial_TH],
        norm_weight_H,
        rms_eps=1e-5,
    )
    key_weight_H = norm_weight_H * projection_H
    mixed_TH = mix(bank_TBH, partial_TH, key_weight_H, 1e-5)
    torch.testing.assert_close(mixed_TH, expected, rtol=1e-5, atol=1e-5)
    wide_TH = mix(bank_TBH.double(), partial_TH.double(), key_weight_H.double(), 1e-5)
    assert wide_TH.dtype == torch.float64
    torch.testing.assert_close(wide_TH.float(), expected, rtol=1e-5, atol=1e-5)


def test_without_blocks_the_partial_sum_passes() -> None:
    partial_TH = torch.randn(3, 8)
    assert mix(torch.empty(3, 0, 8), partial_TH, torch.randn(8), 1e-5) is partial_TH


def test_tokens_do_not_see_each_other() -> None:
    """float64: a token alone equals the token in a batch to the last bit; inputs are left alone."""
    bank_TBH = torch.randn(7, 3, 16, dtype=torch.float64)
    partial_TH = torch.randn(7, 16, dtype=torch.float64)
    key_weight_H = torch.randn(16, dtype=torch.float64)
    before = bank_TBH.clone(), partial_TH.clone()
    mixed_TH = mix(bank_TBH, partial_TH, key_weight_H, 1e-5)
    for token in range(7):
        now = slice(token, token + 1)
        alone_1H = mix(bank_TBH[now], partial_TH[now], key_weight_H, 1e-5)
        torch.testing.assert_close(mixed_TH[now], alone_1H, rtol=1e-13, atol=1e-13)
    assert torch.equal(bank_TBH, before[0]) and torch.equal(partial_TH, before[1])


def test_half_precision_rounds_once() -> None:
    bank_TBH, partial_TH = torch.randn(20, 3, 16).bfloat16(), torch.randn(20, 16).bfloat16()
    key_weight_H = torch.randn(16)
    mixed_TH = mix(bank_TBH, partial_TH, key_weight_H, 1e-5)
    exact_TH = mix(bank_TBH.double(), partial_TH.double(), key_weight_H.double(), 1e-5)
    assert mixed_TH.dtype == torch.bfloat16
    torch.testing.assert_close(mixed_TH.double(), exact_TH, rtol=2**-8, atol=1e-6)
