"""Norm layers and the activation that the config names.

Owns their weights; the arithmetic is in `kernels/norm` and `kernels/activation`.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from stagecoach.kernels.activation.reference import silu_and_mul, situ_and_mul
from stagecoach.kernels.norm.reference import gated_rms_norm, rms_norm
from stagecoach.model.weight_slots import WeightKind, WeightScope
from stagecoach.model_config import ModelConfig

# (gate, up) -> their gated product
Activation = Callable[[Tensor, Tensor], Tensor]


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""

    def __init__(self, weights: WeightScope, name: str, size: int, eps: float) -> None:
        self.weight_H = weights.parameter(size)
        self._eps = eps
        weights.bind(f"{name}.weight", self.weight_H, WeightKind.NORM)

    def __call__(self, x_TH: Tensor) -> Tensor:
        return rms_norm(x_TH, self.weight_H, self._eps)


class GatedHeadNorm:
    """RMSNorm over each head's channels, times the sigmoid of a gate (KDA output)."""

    def __init__(self, weights: WeightScope, name: str, head_dim: int, eps: float) -> None:
        self.weight_V = weights.parameter(head_dim, kind=WeightKind.HEAD_NORM)
        self._eps = eps
        weights.bind(f"{name}.weight", self.weight_V, WeightKind.HEAD_NORM)

    def __call__(self, x_THV: Tensor, gate_THV: Tensor) -> Tensor:
        return gated_rms_norm(x_THV, gate_THV, self.weight_V, self._eps)


def make_activation(config: ModelConfig) -> Activation:
    """SiTU for Kimi-K3, SwiGLU for Kimi-Linear."""
    if config.activation == "silu":
        return silu_and_mul
    return partial(situ_and_mul, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
