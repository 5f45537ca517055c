"""Parts of a checkpoint, read by threads ahead of their consumer, through bounded memory.

Owns the order, what one thread reads together and how far ahead; the buffers are the upload's.
Knows no slot: a job is whatever the consumer wants together. What goes wrong in a thread is raised
where what it reads is due, and nothing waits for jobs that nobody will take.
"""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, islice
from math import prod
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from stagecoach.model.checkpoint_reader import CheckpointReader
from stagecoach.model.shard_file import WantedPart
from stagecoach.model.weight_upload import BUFFER_BYTES, StagingBuffer, WeightUpload

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


class _Planned(NamedTuple, Generic[Job]):
    """A job and where its parts are read to."""

    job: Job
    parts: tuple[PartRead, ...]
    homes: Sequence[Tensor] | None  # None: in the buffer, at `starts`
    starts: list[int]


class _Batch(NamedTuple, Generic[Job]):
    """Jobs that one thread reads into one buffer, one after the other."""

    jobs: list[_Planned[Job]]
    num_staged: int  # bytes in the buffer


def read_ahead(
    reader: CheckpointReader,
    jobs: Iterable[tuple[Job, tuple[PartRead, ...]]],
    upload: WeightUpload,
    num_threads: int = NUM_THREADS,
    placement: Placement[Job] | None = None,
    batch_bytes: int = BUFFER_BYTES,
) -> Generator[ReadPart[Job], None, None]:
    """Jobs with their tensors, in the order given; close it when leaving early.

    Args:
        placement: None: all that was read is the consumer's to use.
        batch_bytes: small jobs that follow each other are read together up to so many bytes.

    Raises:
        CheckpointError: a file is missing, damaged or unreadable; names file and tensor.
    """
    waiting: deque[Future[list[ReadPart[Job]]]] = deque()
    upload.provide(num_threads + _NUM_SPARE)
    # Of the calling thread: what is written may be a tensor that only this mode may write.
    read = torch.inference_mode(torch.is_inference_mode_enabled())(_read)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read") as pool:
        try:
            for batch in _batches(reader, jobs, placement, batch_bytes):
                if len(waiting) == num_threads + _NUM_SPARE:
                    yield from waiting.popleft().result()
                buffer = upload.take(batch.num_staged)
                waiting.append(pool.submit(read, reader, batch, buffer, placement))
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _batches(
    reader: CheckpointReader,
    jobs: Iterable[tuple[Job, tuple[PartRead, ...]]],
    placement: Placement[Job] | None,
    batch_bytes: int,
) -> Iterator[_Batch[Job]]:
    planned: list[_Planned[Job]] = []
    num_read = num_staged = 0
    for job, parts in jobs:
        sizes = [_aligned(part_bytes(reader, part)) for part in parts]
        if planned and num_read + sum(sizes) > batch_bytes:
            yield _Batch(planned, num_staged)
            planned, num_read, num_staged = [], 0, 0
        num_read += sum(sizes)
        homes = placement.homes(job, parts) if placement is not None else None
        starts = [] if homes is not None else list(accumulate(sizes, initial=num_staged))
        num_staged = starts.pop() if starts else num_staged
        planned.append(_Planned(job, parts, homes, starts))
    if planned:
        yield _Batch(planned, num_staged)


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
    batch: _Batch[Job],
    buffer: StagingBuffer,
    placement: Placement[Job] | None,
) -> list[ReadPart[Job]]:
    places = [
        planned.homes
        if planned.homes is not None
        else [buffer.bytes[start:] for start in planned.starts]
        for planned in batch.jobs
    ]
    tensors = iter(
        reader.read_parts(
            [
                WantedPart(part.name, part.region, into)
                for planned, into_each in zip(batch.jobs, places, strict=True)
                for part, into in zip(planned.parts, into_each, strict=True)
            ]
        )
    )
    buffer.num_filled = batch.num_staged
    reads = []
    for planned in batch.jobs:
        parts = tuple(islice(tensors, len(planned.parts)))
        is_done = planned.homes is not None or (
            placement is not None and placement.place(planned.job, parts)
        )
        reads.append(ReadPart(planned.job, () if is_done else parts, buffer))
    return reads


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
