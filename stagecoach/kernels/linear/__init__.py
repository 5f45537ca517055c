"""Products with a weight matrix that lies [outputs, inputs]."""

from stagecoach.kernels.linear.door import float32_sums, grouped_linear, linear

__all__ = ["float32_sums", "grouped_linear", "linear"]
