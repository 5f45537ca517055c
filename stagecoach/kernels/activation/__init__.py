"""Gated activations of the feed-forward blocks."""

from stagecoach.kernels.activation.reference import silu_and_mul, situ_and_mul

__all__ = ["silu_and_mul", "situ_and_mul"]
