"""One safetensors file: what its header says, and reads of parts of its tensors by position.

Owns the format (huggingface/safetensors, "Format": length of the header, header, data) and how few
bytes a part takes. Any number of threads may read at once: nothing but the file's descriptor is
shared, and no thread holds the interpreter while it waits for the disk. Knows no name's meaning.
"""

import json
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stagecoach.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Bytes of a value -> a type of as many bytes, which nobody interprets.
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LENGTH_BYTES = 8
# The format's own bound: a longer header is no header.
_MOST_HEADER_BYTES = 100_000_000
# Pieces of rows that lie closer are read with what is between them: a disk reads pages ahead, and
# a call costs more than copying the rest.
_NEAR_BYTES = 16 * 1024
# Of one call (Linux, UIO_MAXIOV).
_MOST_SPANS = 1024
# Of the thread, not of a file: a checkpoint has a hundred files.
_scratch = threading.local()


class StoredExtent(NamedTuple):
    """What a header says of one tensor."""

    dtype: str  # as the format spells it
    shape: tuple[int, ...]
    start: int  # first byte in the file
    end: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None: torch has no such type."""
        return _DTYPES.get(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Of one step along the first dim."""
        return (self.end - self.start) // max(1, self.shape[0] if self.shape else 1)


class WantedPart(NamedTuple):
    """What to read.

    Attributes:
        region: one slice a dim, with start and stop; empty for all of it.
        into: uint8 [bytes] on the host, at least as long as the part; the result lies at its
            beginning. None: fresh memory.
    """

    name: str
    region: tuple[slice, ...]
    into: Tensor | None


class _Span(NamedTuple):
    """Bytes that lie in one piece on both sides."""

    name: str
    target: memoryview
    start: int  # in the file


class ShardFile:
    """An open file whose header is sound and whose length is what the header says.

    Args:
        purpose: what the file is needed for, as the end of a sentence; errors carry it.

    Raises:
        CheckpointError: the file is missing, unreadable, damaged or cut short.
    """

    def __init__(self, path: Path, purpose: str = "") -> None:
        self.path = path
        try:
            if not path.is_file():
                raise CheckpointError(f"{path}: missing shard{purpose}")
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self.num_bytes = os.fstat(self._descriptor).st_size
            self.tensors: Mapping[str, StoredExtent] = self._read_header()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read{purpose} ({error.strerror})") from None
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged or cut short{purpose} ({error})") from None

    def read(self, name: str, region: tuple[slice, ...] = (), into: Tensor | None = None) -> Tensor:
        """A part of a tensor in its stored dtype, contiguous; as `read_parts`, of one part.

        Args:
            into: None: fresh memory.
        """
        return self.read_parts([WantedPart(name, region, into)])[0]

    def read_parts(self, wanted: Sequence[WantedPart]) -> list[Tensor]:
        """Parts of tensors in their stored dtypes, contiguous.

        Parts that follow each other in the file are read in one call.

        Raises:
            CheckpointError: the file is shorter than it was, or the disk fails; names the tensor.
        """
        tensors: list[Tensor] = []
        spans: list[_Span] = []
        for name, region, into in wanted:
            extent = self.tensors[name]
            dtype = extent.torch_dtype
            if dtype is None:
                raise self._error(name, f"has dtype {extent.dtype}, which cannot be read")
            shape = tuple(span.stop - span.start for span in region) if region else extent.shape
            num_bytes = prod(shape) * dtype.itemsize
            if into is None:
                into = torch.empty(num_bytes, dtype=torch.uint8)
            part = into[:num_bytes]
            if num_bytes:
                spans += self._fill(name, extent, region, part)
            tensors.append(part.view(dtype).view(shape))
        self._read_spans(spans)
        return tensors

    def _fill(
        self, name: str, extent: StoredExtent, region: tuple[slice, ...], part: Tensor
    ) -> list[_Span]:
        """What is to be read into `part`; nothing, where it had to be read and cut."""
        if is_one_piece(extent.shape, region):
            first = extent.start + (region[0].start * extent.row_bytes if region else 0)
            return [_Span(name, part.numpy().data, first)]
        rows, *inner = region
        row_bytes = extent.row_bytes
        first = extent.start + rows.start * row_bytes
        num_rows = rows.stop - rows.start
        part_RB = part.numpy().reshape(num_rows, -1)
        if len(inner) == 1 and row_bytes - part_RB.shape[1] >= _NEAR_BYTES:
            item_bytes = row_bytes // extent.shape[1]
            first += inner[0].start * item_bytes
            return [
                _Span(name, row_B.data, first + number * row_bytes)
                for number, row_B in enumerate(part_RB)
            ]
        whole = _own_scratch(num_rows * row_bytes).numpy()
        self._read_spans([_Span(name, whole.data, first)])
        # With numpy: an operator of torch would start threads beside the one that it runs in.
        unit = _UNITS[_DTYPES[extent.dtype].itemsize]
        source = whole.view(unit).reshape(num_rows, *extent.shape[1:])
        target = part.numpy().view(unit)
        target.reshape(num_rows, *(span.stop - span.start for span in inner))[:] = source[
            (slice(None), *inner)
        ]
        return []

    def _read_spans(self, spans: Sequence[_Span]) -> None:
        run: list[_Span] = []
        end = 0
        for span in spans:
            if run and (span.start != end or len(run) == _MOST_SPANS):
                self._read_run(run)
                run = []
            run.append(span)
            end = span.start + len(span.target)
        if run:
            self._read_run(run)

    def _read_run(self, run: Sequence[_Span]) -> None:
        """Read spans that lie one behind the other in the file."""
        position, number, done = run[0].start, 0, 0
        try:
            while number < len(run):
                left = [span.target for span in run[number:]]
                left[0] = left[0][done:]
                count = os.preadv(self._descriptor, left, position)
                if not count:
                    raise self._error(run[number].name, "cannot be read (the file was cut short)")
                position += count
                done += count
                while number < len(run) and done >= len(run[number].target):
                    done -= len(run[number].target)
                    number += 1
        except OSError as error:
            raise self._error(run[number].name, f"cannot be read ({error.strerror})") from None

    def _error(self, name: str, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} {text}")

    def _read_header(self) -> dict[str, StoredExtent]:
        """Raises ValueError with what is wrong."""
        length = int.from_bytes(os.pread(self._descriptor, _LENGTH_BYTES, 0), "little")
        data_start = _LENGTH_BYTES + length
        if self.num_bytes < _LENGTH_BYTES or not 0 < length <= _MOST_HEADER_BYTES:
            raise ValueError(f"no header in {self.num_bytes} bytes")
        text = os.pread(self._descriptor, length, _LENGTH_BYTES)
        if len(text) < length:
            raise ValueError(f"{len(text)} of the header's {length} bytes")
        try:
            header = json.loads(text)
        except RecursionError:
            raise ValueError("the header is nested too deeply") from None
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
        header.pop("__metadata__", None)
        tensors = {name: _extent(name, entry, data_start) for name, entry in header.items()}
        end = data_start
        # One without values begins where the next does.
        for name, extent in sorted(tensors.items(), key=lambda item: item[1][2:]):
            if extent.start != end:
                raise ValueError(f"{name} begins at byte {extent.start}, not at {end}")
            end = extent.end
        if end != self.num_bytes:
            raise ValueError(f"{self.num_bytes} bytes where the header says {end}")
        return tensors


def is_one_piece(shape: tuple[int, ...], region: tuple[slice, ...]) -> bool:
    """Whether a region's values follow each other in a tensor of that shape."""
    return all(
        span.start == 0 and span.stop == size
        for span, size in zip(region[1:], shape[1:], strict=False)
    )


def read_names(path: Path) -> list[str]:
    """Names of the tensors in a file; errors as of ShardFile."""
    return list(ShardFile(path).tensors)


def _own_scratch(num_bytes: int) -> Tensor:
    """Memory of this thread, kept for its next read of any file."""
    scratch: Tensor | None = getattr(_scratch, "bytes", None)
    if scratch is None or len(scratch) < num_bytes:
        scratch = _scratch.bytes = torch.empty(num_bytes, dtype=torch.uint8)
    return scratch[:num_bytes]


def _extent(name: str, entry: Any, data_start: int) -> StoredExtent:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        start, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the entry of {name} is incomplete") from None
    # bool is an int to Python, and no size.
    if not all(type(number) is int for number in (*shape, start, end)):
        raise ValueError(f"{name} has shape {list(shape)} and offsets {[start, end]}, not integers")
    if not 0 <= start <= end:
        raise ValueError(f"{name} has offsets {[start, end]}")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} has shape {list(shape)}")
    if dtype in _DTYPES and end - start != prod(shape) * _DTYPES[dtype].itemsize:
        raise ValueError(f"{name}: {end - start} bytes for {list(shape)} of {dtype}")
    return StoredExtent(dtype, shape, data_start + start, data_start + end)
