"""How a slot is stored, which parts of files fill it, and how these become its target's values.

Owns the checks of shape and type, and the pieces in which a slot is read: rows of its target, so
that staged memory stays small however large a tensor is. Reads nothing but headers.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.quantization import (
    MXFP4_GROUP_SIZE,
    Fp8Weight,
    Mxfp4Weight,
    unpack_mxfp4,
)
from stagecoach.model.checkpoint_reader import CheckpointReader
from stagecoach.model.quantization import store_fp8
from stagecoach.model.read_ahead import PartRead
from stagecoach.model.weight_formats import packed_names
from stagecoach.model.weight_slots import WeightKind, WeightSlot

# Types, as safetensors spells them, in which unpacked weights may be stored.
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_CODES_PER_BYTE = 2
_TURNED_ROWS = 256
# From 32,768 values on, torch divides a copy among its threads and waits for the slowest.
SERIAL_VALUES = 32767


class SlotPiece(NamedTuple):
    """Some rows of a slot's target."""

    slot: WeightSlot
    rows: slice
    is_last: bool  # of its slot

    @property
    def num_bytes(self) -> int:
        """Of these rows in the target."""
        num_rows = self.slot.target.shape[0] if self.slot.region else 1
        return self.slot.target.nbytes * (self.rows.stop - self.rows.start) // max(1, num_rows)


class StoredAs(NamedTuple):
    """Where a slot's values are, as its checkpoint has them.

    Attributes:
        names: one tensor, or the codes and the scales of a packed one.
    """

    names: tuple[str, ...]
    path: str
    start: int  # first byte of the first of them


def check_slot(reader: CheckpointReader, slot: WeightSlot) -> StoredAs:
    """Find a slot's tensors and compare shapes and types with what it needs.

    Raises:
        CheckpointError: names the tensor and both shapes or types, or the file that is wrong.
    """
    names: tuple[str, ...] = (slot.name,)
    if slot.name not in reader.stored:
        names = packed_names(slot.name)
        _check_packed(reader, slot, *names)
    elif slot.kind in (WeightKind.DECAY, WeightKind.DECAY_BIAS):
        _check_vector(reader, slot)
    else:
        _check(reader, slot.name, slot.shape, _FLOAT_DTYPES)
    return StoredAs(names, str(reader.stored[names[0]].path), reader.extent(names[0]).start)


def pieces(
    reader: CheckpointReader, slot: WeightSlot, stored: StoredAs, most_bytes: int
) -> Iterator[tuple[SlotPiece, tuple[PartRead, ...]]]:
    """What to read for a slot, in pieces of about `most_bytes` in the file, at least a row."""
    if slot.kind in (WeightKind.DECAY, WeightKind.DECAY_BIAS):
        # Small, and perhaps padded: read whole.
        yield SlotPiece(slot, slice(0, len(slot.target)), is_last=True), (PartRead(slot.name, ()),)
        return
    if not slot.region:
        yield SlotPiece(slot, slice(0, 1), is_last=True), (PartRead(slot.name, ()),)
        return
    if not slot.target.shape[0]:
        # A rank beyond the vocabulary's rows has none of them.
        yield SlotPiece(slot, slice(0, 0), is_last=True), ()
        return
    regions = [_stored_region(slot, name, stored) for name in stored.names]
    first, last = slot.region[0].start, slot.region[0].stop
    # Of a row that is split, more may be read than is kept.
    row_bytes = sum(reader.extent(name).row_bytes for name in stored.names)
    step = max(1, most_bytes // max(1, row_bytes))
    for start in range(first, last, step):
        end = min(last, start + step)
        yield (
            SlotPiece(slot, slice(start - first, end - first), is_last=end == last),
            tuple(
                PartRead(name, (slice(start, end), *region[1:]))
                for name, region in zip(stored.names, regions, strict=True)
            ),
        )


def write(piece: SlotPiece, parts: Sequence[Tensor]) -> None:
    """Fill the rows of a target.

    Args:
        parts: what `pieces` asked for, on the target's device.
    """
    slot, rows, target = piece.slot, piece.rows, piece.slot.target
    if isinstance(target, Mxfp4Weight):
        packed, scale = parts
        _copy(target.packed[rows], packed)
        _copy(target.scale[rows], scale)
    elif isinstance(target, Fp8Weight):
        store_fp8(target.part(rows), _plain(slot, parts, torch.float32))
    elif slot.kind in (WeightKind.DECAY, WeightKind.DECAY_BIAS):
        (size,) = slot.shape
        target.copy_(parts[0].flatten()[:size][slot.region])
    elif slot.region:
        _copy(target[rows], _plain(slot, parts, target.dtype))
    else:
        target.copy_(parts[0])


class HostPlacement:
    """What the threads that read do where the targets are on a CPU: read to there, or copy.

    Other pieces are computed on, by operators of torch that have threads of their own.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def homes(self, piece: SlotPiece, parts: Sequence[PartRead]) -> Sequence[Tensor] | None:
        """The rows themselves, where they lie as they are stored."""
        slot, target = piece.slot, piece.slot.target
        if isinstance(target, Fp8Weight) or slot.kind in (
            WeightKind.DECAY,
            WeightKind.DECAY_BIAS,
        ):
            return None
        if isinstance(target, Tensor) and (len(parts) != 1 or not slot.region):
            return None
        rows = [target] if isinstance(target, Tensor) else list(target)
        rows = [whole[piece.rows] for whole in rows]
        for part, home in zip(parts, rows, strict=True):
            stored = self._reader.extent(part.name).torch_dtype
            if stored != home.dtype or not home.is_contiguous():
                return None
        return [home.view(-1).view(torch.uint8) for home in rows]

    def place(self, piece: SlotPiece, parts: Sequence[Tensor]) -> bool:
        """`write` where that is a copy."""
        target = piece.slot.target
        is_copy = isinstance(target, Mxfp4Weight) or (
            isinstance(target, Tensor) and len(parts) == 1
        )
        if is_copy:
            write(piece, parts)
        return is_copy


def _copy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`, of two dims or any on a GPU.

    On a CPU by one thread, as others are reading. A matrix that lies as [inputs, outputs] is
    turned in blocks, each in a place of its own and copied from there row by row of where it goes:
    on one core 1.7 GB/s of bfloat16 instead of 0.2.
    """
    if not target.is_cpu or target.dim() != 2:
        target.copy_(source)
    elif target.stride(0) != 1 or target.stride(1) == 1:
        _copy_rows(target, source)
    else:
        turned = source.new_empty(source.shape[1], _TURNED_ROWS)
        blocks = zip(target.split(_TURNED_ROWS), source.split(_TURNED_ROWS), strict=True)
        for block, its_source in blocks:
            part = turned[:, : len(block)]
            part.copy_(its_source.t())
            _copy_rows(block.t(), part)


def _copy_rows(target: Tensor, source: Tensor) -> None:
    """Few enough at a time that the calling thread copies them by itself."""
    step = max(1, SERIAL_VALUES // max(1, target.shape[1]))
    for rows, its_source in zip(target.split(step), source.split(step), strict=True):
        rows.copy_(its_source)


def _plain(slot: WeightSlot, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The stored values; packed ones are decoded, and cut to the region's columns."""
    if len(parts) == 1:
        return parts[0]
    columns = slot.region[1]
    offset = columns.start // MXFP4_GROUP_SIZE * MXFP4_GROUP_SIZE
    weight = unpack_mxfp4(Mxfp4Weight(*parts), dtype)
    return weight[:, columns.start - offset : columns.stop - offset]


def _stored_region(slot: WeightSlot, name: str, stored: StoredAs) -> tuple[slice, ...]:
    """The region of a tensor that holds the slot's: of a packed one the groups that cover it."""
    if len(stored.names) == 1:
        return slot.region
    rows, columns = slot.region
    first, last = columns.start // MXFP4_GROUP_SIZE, -(-columns.stop // MXFP4_GROUP_SIZE)
    width = MXFP4_GROUP_SIZE // _CODES_PER_BYTE if name == stored.names[0] else 1
    return rows, slice(first * width, last * width)


def _check_vector(reader: CheckpointReader, slot: WeightSlot) -> None:
    """A vector stored with axes of length one around it; A_log may be padded at its end."""
    shape = _check(reader, slot.name, None, _FLOAT_DTYPES)
    (size,) = slot.shape
    longest = max(shape, default=1)
    num_values = torch.Size(shape).numel()
    is_padded = slot.kind is WeightKind.DECAY and num_values > size
    if longest != num_values or (num_values != size and not is_padded):
        raise reader.error(slot.name, f"has shape {list(shape)}, not [{size}]")


def _check_packed(reader: CheckpointReader, slot: WeightSlot, codes: str, scales: str) -> None:
    num_rows, num_columns = slot.shape
    if num_columns % MXFP4_GROUP_SIZE:
        raise reader.error(
            codes, f"packs {num_columns} columns, not a multiple of {MXFP4_GROUP_SIZE}"
        )
    _check(reader, codes, (num_rows, num_columns // _CODES_PER_BYTE), ("U8",))
    _check(reader, scales, (num_rows, num_columns // MXFP4_GROUP_SIZE), ("U8",))


def _check(
    reader: CheckpointReader,
    name: str,
    expected: tuple[int, ...] | None,
    dtypes: tuple[str, ...],
) -> tuple[int, ...]:
    shape, dtype = reader.shape_and_dtype(name)
    if expected is not None and shape != expected:
        raise reader.error(name, f"has shape {list(shape)}, not {list(expected)}")
    if dtype not in dtypes:
        choice = dtypes[0] if len(dtypes) == 1 else f"one of {', '.join(dtypes)}"
        raise reader.error(name, f"has dtype {dtype}, not {choice}")
    return shape
