"""Short causal convolution with its per-request history."""

from stagecoach.kernels.short_conv.reference import short_convolution

__all__ = ["short_convolution"]
