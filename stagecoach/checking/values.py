"""Whether stored values can be weights: finite, of a sane size, and not all zero.

Owns the bounds, and a reader that looks at whatever is read through it. Values are judged as they
are stored; that a part of a file was never written shows as a tensor of zeros.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.checking.verdict import CheckFailedError
from stagecoach.model.checkpoint_reader import CheckpointReader, Naming, name_list
from stagecoach.model.read_ahead import PartRead, read_ahead
from stagecoach.model.shard_file import WantedPart
from stagecoach.model.slot_reads import SERIAL_VALUES
from stagecoach.model.weight_formats import PACKED, SCALE
from stagecoach.model.weight_upload import PIECE_BYTES, WeightUpload

# Of each kind, for a page that is read.
_MOST_NAMES = 5
# The largest float16: no trained weight comes near.
_LARGEST = 65504.0
# An E8M0 scale is a power of two, stored plus 127; 255 is NaN. Codes go up to 6.
_SCALE_NAN = 255
_LARGEST_SCALE = 127 + 13


class _Range(NamedTuple):
    """Least and largest value of what was read of a tensor; NaN if one of them is."""

    low: float
    high: float

    def joined(self, other: "_Range") -> "_Range":
        # A comparison with NaN is false: it is kept, whichever side it is on.
        low = self.low if self.low != self.low or self.low < other.low else other.low
        high = self.high if self.high != self.high or self.high > other.high else other.high
        return _Range(low, high)


class ScannedReader(CheckpointReader):
    """A reader that remembers the range of each tensor; any number of threads may read.

    Args:
        is_scanning: False for one that does not look.
    """

    def __init__(self, folder: Path, naming: Naming, *, is_scanning: bool) -> None:
        super().__init__(folder, naming)
        self._is_scanning = is_scanning
        self._ranges: dict[str, _Range] = {}
        self._lock = threading.Lock()

    @property
    def num_scanned(self) -> int:
        """Tensors that were looked at."""
        return len(self._ranges)

    def read_parts(self, wanted: Sequence[WantedPart]) -> list[Tensor]:
        tensors = super().read_parts(wanted)
        for part, tensor in zip(wanted, tensors, strict=True):
            if self._is_scanning and tensor.numel():
                seen = _range(tensor)
                with self._lock:
                    before = self._ranges.get(part.name)
                    self._ranges[part.name] = seen if before is None else before.joined(seen)
        return tensors

    def judge(self) -> str:
        """One line on all that was read.

        Raises:
            CheckFailedError: lists the tensors, by what is wrong with them.
        """
        faults: dict[str, list[str]] = {}
        for name, span in sorted(self._ranges.items()):
            fault = self._fault(name, span)
            if fault is not None:
                faults.setdefault(fault, []).append(name)
        if faults:
            raise CheckFailedError(
                "; ".join(
                    f"{fault}: {name_list(names, _MOST_NAMES)}" for fault, names in faults.items()
                )
            )
        return f"{self.num_scanned} tensors are finite, none all zero or beyond {_LARGEST:.0f}"

    def _fault(self, name: str, span: _Range) -> str | None:
        if name.endswith(SCALE):
            if span.high >= _SCALE_NAN:
                return "NaN"
            if span.high > _LARGEST_SCALE:
                return "absurdly large"
            return "all zero" if span.high == 0 else None
        if span.low != span.low or span.high != span.high:
            return "NaN"
        largest = max(-span.low, span.high)
        if largest == float("inf"):
            return "infinite"
        if largest > _LARGEST and not name.endswith(PACKED):
            return "absurdly large"
        is_matrix = sum(size > 1 for size in self.extent(name).shape) > 1
        return "all zero" if is_matrix and largest == 0 else None


def read_all(reader: ScannedReader, on_progress: Callable[[int], None]) -> None:
    """Read every tensor that is not skipped once, in the order of the files.

    Args:
        on_progress: told the bytes of each piece.
    """
    names = sorted(
        reader.stored, key=lambda name: (str(reader.stored[name].path), reader.extent(name).start)
    )
    jobs = ((part, (part,)) for name in names for part in _pieces(reader, name))
    upload = WeightUpload(torch.device("cpu"))
    with closing(read_ahead(reader, jobs, upload)) as reads:
        for piece in reads:
            on_progress(piece.tensors[0].nbytes)
    upload.finish()


def _pieces(reader: CheckpointReader, name: str) -> list[PartRead]:
    """Rows of a tensor that fit a buffer."""
    extent = reader.extent(name)
    num_bytes = extent.end - extent.start
    if num_bytes <= PIECE_BYTES or not extent.shape:
        return [PartRead(name, ())]
    num_rows, *row = extent.shape
    step = max(1, PIECE_BYTES * num_rows // num_bytes)
    inner = tuple(slice(0, size) for size in row)
    return [
        PartRead(name, (slice(start, min(start + step, num_rows)), *inner))
        for start in range(0, num_rows, step)
    ]


def _range(part: Tensor) -> _Range:
    if part.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        part = part.float()
    # Runs in threads that read: few enough values at a time that each looks by itself.
    ends = [few.aminmax() for few in part.flatten().split(SERIAL_VALUES)]
    lows, highs = (torch.stack(values) for values in zip(*ends, strict=True))
    return _Range(float(lows.amin()), float(highs.amax()))
