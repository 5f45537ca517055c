"""Which floating type the operators compute in.

Owns one rule: float64 stays float64, every narrower type accumulates in float32.
"""

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of sums, norms, gates and recurrent states for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
