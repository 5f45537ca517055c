"""Norm layers and the activation that the config names.

Owns their weights; the arithmetic is in `kernels/norm` and `kernels/activation`.
"""

from torch import Tensor

from stagecoach.config.model import ModelConfig
from stagecoach.kernels.activation import Activation
from stagecoach.kernels.norm import rms_norm
from stagecoach.model.weight_slots import WeightKind, WeightScope


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""

    def __init__(self, weights: WeightScope, name: str, size: int, eps: float) -> None:
        self.weight_H = weights.parameter(size)
        self.eps = eps
        weights.bind(f"{name}.weight", self.weight_H, WeightKind.NORM)

    def __call__(self, x_TH: Tensor) -> Tensor:
        return rms_norm(x_TH, self.weight_H, self.eps)


def make_activation(config: ModelConfig) -> Activation:
    """SiTU for Kimi-K3, SwiGLU for Kimi-Linear."""
    if config.activation == "silu":
        return Activation("silu")
    return Activation("situ", config.situ_beta, config.situ_linear_beta)
