"""Parts of a checkpoint, read by threads ahead of their consumer, through bounded memory.

Owns the order and how far ahead is read; the buffers are the upload's. Knows no slot: a job is
whatever the consumer wants together. What goes wrong in a thread is raised where its job is due,
and nothing waits for jobs that nobody will take.
"""

import os
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from math import prod
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from stagecoach.model.checkpoint_reader import CheckpointReader
from stagecoach.model.weight_upload import StagingBuffer, WeightUpload

Job = TypeVar("Job")
AnyJob = TypeVar("AnyJob", contravariant=True)

# A disk gives all it has to a few requests at once; the memory of each is staged.
NUM_THREADS = min(8, os.cpu_count() or 1)
# What is read but not taken yet, beside what is being read.
_NUM_SPARE = 2
# Every part begins where any type may.
_ALIGNMENT = 16


class PartRead(NamedTuple):
    """A region of a stored tensor; empty for all of it."""

    name: str
    region: tuple[slice, ...]


class ReadPart(NamedTuple, Generic[Job]):
    """A job that was read.

    Attributes:
        tensors: its parts in their stored types, inside `buffer`: valid until the next is taken;
            none where the thread that read them has put them in their place.
    """

    job: Job
    tensors: tuple[Tensor, ...]
    buffer: StagingBuffer


class Placement(Protocol, Generic[AnyJob]):
    """What the threads that read do with a job themselves."""

    def homes(self, job: AnyJob, parts: Sequence[PartRead]) -> Sequence[Tensor] | None:
        """Where the parts may be read to at once, uint8 [bytes] of each; None: nowhere."""

    def place(self, job: AnyJob, tensors: Sequence[Tensor]) -> bool:
        """Use what was read elsewhere; True if nothing is left to do with it."""


def read_ahead(
    reader: CheckpointReader,
    jobs: Iterable[tuple[Job, tuple[PartRead, ...]]],
    upload: WeightUpload,
    num_threads: int = NUM_THREADS,
    placement: Placement[Job] | None = None,
) -> Generator[ReadPart[Job], None, None]:
    """Jobs with their tensors, in the order given; close it when leaving early.

    Args:
        placement: None: all that was read is the consumer's to use.

    Raises:
        CheckpointError: a file is missing, damaged or unreadable; names file and tensor.
    """
    waiting: deque[Future[ReadPart[Job]]] = deque()
    upload.provide(num_threads + _NUM_SPARE)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read") as pool:
        try:
            for job, parts in jobs:
                if len(waiting) == num_threads + _NUM_SPARE:
                    yield waiting.popleft().result()
                homes = placement.homes(job, parts) if placement is not None else None
                num_bytes = [_aligned(part_bytes(reader, part)) for part in parts]
                buffer = upload.take(sum(num_bytes) if homes is None else 0)
                if homes is None:
                    ends = list(accumulate(num_bytes, initial=0))
                    places = [buffer.bytes[start:end] for start, end in pairwise(ends)]
                    future = pool.submit(_read, reader, job, parts, places, buffer, placement)
                else:
                    future = pool.submit(_read_home, reader, job, parts, homes, buffer)
                waiting.append(future)
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def part_bytes(reader: CheckpointReader, part: PartRead) -> int:
    """Of the region in its stored type."""
    extent = reader.extent(part.name)
    num_values = prod(extent.shape)
    if not part.region or not num_values:
        return extent.end - extent.start
    wanted = prod(span.stop - span.start for span in part.region)
    return (extent.end - extent.start) * wanted // num_values


def _read(
    reader: CheckpointReader,
    job: Job,
    parts: Sequence[PartRead],
    places: Sequence[Tensor],
    buffer: StagingBuffer,
    placement: Placement[Job] | None,
) -> ReadPart[Job]:
    tensors = tuple(
        reader.read(part.name, part.region, into) for part, into in zip(parts, places, strict=True)
    )
    is_done = placement is not None and placement.place(job, tensors)
    return ReadPart(job, () if is_done else tensors, buffer)


def _read_home(
    reader: CheckpointReader,
    job: Job,
    parts: Sequence[PartRead],
    homes: Sequence[Tensor],
    buffer: StagingBuffer,
) -> ReadPart[Job]:
    for part, home in zip(parts, homes, strict=True):
        reader.read(part.name, part.region, home)
    return ReadPart(job, (), buffer)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
