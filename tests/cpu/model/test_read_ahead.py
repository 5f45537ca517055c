"""Jobs read by threads come in order, through few buffers, and their errors where they are due."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stagecoach.errors import CheckpointError
from stagecoach.model.checkpoint_reader import CheckpointReader, target_naming
from stagecoach.model.read_ahead import PartRead, read_ahead
from stagecoach.model.shard_file import WantedPart
from stagecoach.model.weight_upload import WeightUpload

pytestmark = pytest.mark.cpu

NUM_THREADS = 3
MATRIX = torch.arange(4000.0).view(200, 20)
BYTES = torch.arange(60, dtype=torch.uint8)


class SlowReader(CheckpointReader):
    """Some reads take longer than those behind them, one fails."""

    failing_row: int | None = None

    def read_parts(self, wanted: Sequence[WantedPart]) -> list[Tensor]:
        for name, region, _ in wanted:
            if region and region[0].start == self.failing_row:
                raise self.error(name, "cannot be read")
        if wanted[-1].region and wanted[-1].region[0].start % 7 == 0:
            time.sleep(0.002)
        return super().read_parts(wanted)


@pytest.fixture
def reader(tmp_path: Path) -> SlowReader:
    save_file({"matrix": MATRIX, "bytes": BYTES}, tmp_path / "model.safetensors")
    return SlowReader(tmp_path, target_naming(has_tied_head=False))


def jobs() -> Iterator[tuple[int, tuple[PartRead, ...]]]:
    for row in range(200):
        rows = PartRead("matrix", (slice(row, row + 1), slice(0, 20)))
        yield row, (PartRead("bytes", (slice(row % 7, 60),)), rows)


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read")]


@pytest.mark.parametrize("batch_bytes", [1, 1000, 1 << 20])
def test_jobs_come_in_order_with_all_their_parts(reader: SlowReader, batch_bytes: int) -> None:
    upload = WeightUpload(torch.device("cpu"))
    rows, buffers = [], set()
    reads = read_ahead(reader, jobs(), upload, NUM_THREADS, batch_bytes=batch_bytes)
    for job, (codes, row), buffer in reads:
        assert torch.equal(row, MATRIX[job : job + 1]) and torch.equal(codes, BYTES[job % 7 :])
        rows.append(job)
        buffers.add(id(buffer))
    assert rows == list(range(200))
    assert len(buffers) <= NUM_THREADS + 2, "memory is bounded"
    assert not reading_threads()


@pytest.mark.parametrize("batch_bytes", [1, 1000, 1 << 20])
def test_an_error_comes_where_its_job_is_due_and_ends_the_threads(
    reader: SlowReader, batch_bytes: int
) -> None:
    reader.failing_row = 50
    upload = WeightUpload(torch.device("cpu"))
    done = []
    with (
        pytest.raises(CheckpointError, match=r"model\.safetensors: matrix cannot be read"),
        closing(read_ahead(reader, jobs(), upload, NUM_THREADS, batch_bytes=batch_bytes)) as reads,
    ):
        for item in reads:
            done.append(item.job)
    # What is read together is lost together.
    assert done == list(range(len(done))) and len(done) <= 50 and not reading_threads()
    assert len(done) == 50 or batch_bytes > 1


def test_who_leaves_early_leaves_no_thread(reader: SlowReader) -> None:
    upload = WeightUpload(torch.device("cpu"))
    with closing(read_ahead(reader, jobs(), upload, NUM_THREADS)) as reads:
        assert next(reads).job == 0
    assert not reading_threads()


def test_an_error_in_the_list_of_jobs_is_raised(reader: SlowReader) -> None:
    def broken() -> Iterator[tuple[int, tuple[PartRead, ...]]]:
        yield 0, (PartRead("matrix", ()),)
        raise CheckpointError("no such part")

    reads = read_ahead(reader, broken(), WeightUpload(torch.device("cpu")), NUM_THREADS)
    with pytest.raises(CheckpointError, match="no such part"):
        list(reads)
    assert not reading_threads()


def test_threads_write_what_the_calling_thread_may_write(reader: SlowReader) -> None:
    """Tensors that were made in inference mode are written in no other."""

    class Copies:
        def homes(self, job: int, parts: Sequence[PartRead]) -> None:
            return None

        def place(self, job: int, tensors: Sequence[Tensor]) -> bool:
            copy[job].copy_(tensors[1][0])
            return True

    with torch.inference_mode():
        copy = torch.zeros_like(MATRIX)
        reads = read_ahead(reader, jobs(), WeightUpload(torch.device("cpu")), NUM_THREADS, Copies())
        assert not any(item.tensors for item in reads)
    assert torch.equal(copy, MATRIX)
