"""MXFP4: groups of 32 weights with one power-of-two scale and four bits each."""

import torch
from torch import Tensor

GROUP_SIZE = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fake_quantize(weight: Tensor) -> Tensor:
    """`weight` rounded to MXFP4, with the gradient passed straight through."""
    with torch.no_grad():
        values, exponents = _round_groups(weight)
        rounded = torch.ldexp(values, exponents).reshape(weight.shape)
    return weight + (rounded - weight).detach()


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack `[out, in]` weights to `weight_packed [out, in/2]` and `weight_scale [out, in/32]`."""
    values, exponents = _round_groups(weight.detach().float())
    magnitudes = torch.tensor(MAGNITUDES, device=weight.device)
    codes = (values.abs().unsqueeze(-1) - magnitudes).abs().argmin(-1)
    codes = (codes + 8 * (values < 0)).to(torch.uint8).reshape(weight.shape)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scale = (exponents.squeeze(-1) + 127).to(torch.uint8)
    return packed.contiguous(), scale.contiguous()


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """The float32 weights of `quantize`'s two tensors."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(packed.shape[0], -1).long()
    magnitudes = torch.tensor(MAGNITUDES, device=packed.device)
    values = magnitudes[codes & 7] * (1 - 2 * (codes >> 3))
    factor = torch.exp2(scale.float() - 127).repeat_interleave(GROUP_SIZE, dim=1)
    return values * factor


def _round_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Four-bit values and exponents of groups, each with the better of two exponents."""
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP_SIZE)
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    low = torch.floor(torch.log2(largest)) - 2
    candidates = []
    for exponent in (low, low + 1):
        values = _round_values(groups * torch.exp2(-exponent))
        error = (values * torch.exp2(exponent) - groups).square().sum(-1, keepdim=True)
        candidates.append((values, exponent, error))
    (low_values, _, low_error), (high_values, high, high_error) = candidates
    is_low = low_error <= high_error
    values = torch.where(is_low, low_values, high_values)
    return values, torch.where(is_low, low, high).to(torch.int32)


def _round_values(scaled: Tensor) -> Tensor:
    """The nearest representable values: steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6."""
    size = scaled.abs().clamp_max(6.0)
    rounded = torch.where(
        size < 2.0,
        torch.round(size * 2) / 2,
        torch.where(size < 4.0, torch.round(size), torch.round(size / 2) * 2),
    )
    return torch.where(scaled < 0, -rounded, rounded)
