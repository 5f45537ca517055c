"""The way of weights from the disk to where they stay: host memory to read into, and, to a GPU,
copies out of it while the next is read.

Owns these buffers and the stream of the copies; knows no file and no slot.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# A row that does not fit gets a buffer of its own size.
BUFFER_BYTES = 2**24
# What is planned to be read at once: the parts of a job begin where any type may.
PIECE_BYTES = BUFFER_BYTES - 64


class StagingBuffer:
    """Host memory, page-locked where it is copied to a GPU."""

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.num_filled = 0  # from the beginning on; what is brought lies there
        self._copied = torch.cuda.Event() if is_pinned else None

    def note_copy(self) -> None:
        """What was enqueued on the current stream so far reads from here."""
        assert self._copied is not None, "only copies to a GPU are enqueued"
        self._copied.record(torch.cuda.current_stream())

    def wait(self) -> None:
        """Return when nothing reads from here any more."""
        if self._copied is not None:
            self._copied.synchronize()


class WeightUpload:
    """Brings what was read to one device.

    Args:
        device: where the weights stay. Copies to a GPU begin behind what is enqueued on its
            current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._buffers: list[StagingBuffer | None] = []
        self._next = 0
        # The buffer brought last, and its bytes on the device.
        self._brought: tuple[StagingBuffer, Tensor] | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def provide(self, num_buffers: int) -> None:
        """Have so many buffers: the one that `take` gives is free again so many calls later."""
        self._buffers = [None] * num_buffers
        self._next = 0

    def take(self, num_bytes: int) -> StagingBuffer:
        """The buffer used least recently, with room for so many bytes; waits for copies out of
        it."""
        place = self._next
        self._next = (place + 1) % len(self._buffers)
        buffer = self._buffers[place]
        if buffer is not None:
            buffer.wait()
        if buffer is None or len(buffer.bytes) < num_bytes:
            size = max(num_bytes, BUFFER_BYTES)
            buffer = self._buffers[place] = StagingBuffer(size, is_pinned=self._stream is not None)
        if self._brought is not None and self._brought[0] is buffer:
            self._brought = None
        return buffer

    @contextmanager
    def bring(self, tensors: tuple[Tensor, ...], buffer: StagingBuffer) -> Iterator[list[Tensor]]:
        """The tensors on the device, for the work of this block.

        What is in a buffer travels in one copy, in the stored types: the device converts faster
        than the host, and to the same.

        Args:
            tensors: among the first `num_filled` bytes of `buffer`, which is not written before
                they are copied.
        """
        if self._stream is None:
            yield list(tensors)
            return
        with torch.cuda.stream(self._stream):
            brought = self._bring_all(buffer)
            yield [_same_place(tensor, buffer.bytes, brought) for tensor in tensors]

    def _bring_all(self, buffer: StagingBuffer) -> Tensor:
        if self._brought is None or self._brought[0] is not buffer:
            filled = buffer.bytes[: buffer.num_filled]
            self._brought = buffer, filled.to(self._device, non_blocking=True)
            buffer.note_copy()
        return self._brought[1]

    def finish(self) -> None:
        """Wait for all copies, and let go of the buffers."""
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers = []
        self._brought = None


def _same_place(tensor: Tensor, source: Tensor, copy: Tensor) -> Tensor:
    """The part of `copy` that `tensor` is of `source`, both uint8 [bytes]."""
    start = tensor.data_ptr() - source.data_ptr()
    assert start >= 0 and start + tensor.nbytes <= len(copy), "a tensor outside its buffer"
    return copy[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
