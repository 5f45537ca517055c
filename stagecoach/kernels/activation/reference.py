"""Gated activations in plain PyTorch: the specification and the CPU implementation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stagecoach.kernels.precision import accumulate_dtype


def situ_and_mul(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta · tanh(gate / beta) · sigmoid(gate) · linear_beta · tanh(up / linear_beta).

    Formula: SiTU of Kimi-K3 (`activation_situ_beta`, `activation_situ_linear_beta`).

    Args:
        gate: [...], any floating type.
        up: the same shape and type.
        beta: bound of the gate.
        linear_beta: bound of `up`; None passes `up` unchanged.

    Returns:
        [...] in `gate.dtype`, computed in the accumulate type.
    """
    dtype = accumulate_dtype(gate.dtype)
    gate_acc, up_acc = gate.to(dtype), up.to(dtype)
    out = torch.tanh(gate_acc / beta).mul_(gate_acc.sigmoid())
    if linear_beta is None:
        out.mul_(up_acc).mul_(beta)
    else:
        out.mul_((up_acc / linear_beta).tanh_()).mul_(beta * linear_beta)
    return out.to(gate.dtype)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate · sigmoid(gate) · up, in the accumulate type, rounded once to `gate.dtype`."""
    dtype = accumulate_dtype(gate.dtype)
    return F.silu(gate.to(dtype)).mul_(up.to(dtype)).to(gate.dtype)
