"""Numbers between host and device, without waiting for the device.

Owns the pinned copies in between; torch keeps each until its transfer has run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`; the same tensor where that is the host."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor on `device` of numbers, or of rows of numbers."""
    return to_device(torch.tensor(numbers, dtype=dtype), device)


class Download:
    """A tensor on its way to the host, behind all that the current stream was given so far."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def is_ready(self) -> bool:
        """Whether `read` would return at once."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> Tensor:
        """The tensor on the host; waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
