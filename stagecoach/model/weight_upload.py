"""Copies tensors from the host into parameters, on a GPU through page-locked memory.

While one piece travels, the next is read and converted. Owns the two buffers; knows no file.
"""

import torch
from torch import Tensor

_BUFFER_BYTES = 2**26


class _Buffer:
    """Page-locked memory and the end of the newest copy out of it."""

    def __init__(self) -> None:
        self.bytes = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()


class WeightUpload:
    """Fills parameters one after the other; `finish` waits for the last of them."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def copy(self, target: Tensor, source: Tensor) -> None:
        """`target.copy_(source)`; on a GPU it may end after the call.

        Args:
            target: a parameter or a part of one, of the source's shape.
            source: on the host, of any floating type.
        """
        if not target.is_cuda:
            target.copy_(source)
            return
        assert target.shape == source.shape, (target.shape, source.shape)
        if target.dim() == 0:
            target, source = target[None], source[None]
        if not target.numel():
            return
        row_bytes = target[0].numel() * target.element_size()
        assert row_bytes <= _BUFFER_BYTES, f"a row of {row_bytes} bytes"
        num_rows = _BUFFER_BYTES // row_bytes
        for start in range(0, len(target), num_rows):
            rows = slice(start, start + num_rows)
            self._copy_piece(target[rows], source[rows])

    def finish(self) -> None:
        """Wait for all copies."""
        for buffer in self._buffers:
            buffer.copied.synchronize()

    def _copy_piece(self, target: Tensor, source: Tensor) -> None:
        buffer = self._next_buffer()
        buffer.copied.synchronize()
        staged = buffer.bytes[: target.numel() * target.element_size()].view(target.dtype)
        staged = staged.view(target.shape)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        buffer.copied.record(torch.cuda.current_stream(target.device))

    def _next_buffer(self) -> _Buffer:
        """The one used least recently."""
        if len(self._buffers) < 2:
            self._buffers.append(_Buffer())
        else:
            self._buffers.reverse()
        return self._buffers[-1]
