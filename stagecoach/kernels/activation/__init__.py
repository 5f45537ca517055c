"""Gated activations of the feed-forward blocks."""

from stagecoach.kernels.activation.door import Activation, silu_and_mul, situ_and_mul

__all__ = ["Activation", "silu_and_mul", "situ_and_mul"]
