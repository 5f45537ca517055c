"""Links between workers that are threads of one process.

Same contract as over processes, so that the same stages run: for debugging, and for tests
that need many stages and ranks without starting any process. Workers may be on GPUs, all on one or
each on its own: a thread waits until the other has enqueued its part, and a stream for the rest.
"""

import queue
import threading
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.errors import WorkerDiedError
from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.pipeline.links import Handle, Links
from stagecoach.pipeline.topology import Topology, WorkerId

_CPU = torch.device("cpu")


class _Parcel(NamedTuple):
    """A tensor that one thread hands to others."""

    tensor: Tensor
    is_made: torch.cuda.Event | None  # on a GPU: recorded where it was made

    @staticmethod
    def of(tensor: Tensor) -> "_Parcel":
        if not tensor.is_cuda:
            return _Parcel(tensor, None)
        is_made = torch.cuda.Event()
        is_made.record(torch.cuda.current_stream(tensor.device))
        return _Parcel(tensor, is_made)

    def open(self) -> Tensor:
        """The tensor, for work of the current stream."""
        if self.is_made is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.is_made)
            # It is freed as memory of the stream where it was made.
            self.tensor.record_stream(stream)
        return self.tensor


class ThreadMesh:
    """Mailboxes and meeting points of all workers of one engine."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[_Parcel | None]] = defaultdict(
            queue.SimpleQueue
        )
        self._lock = threading.Lock()
        self._is_closed = False
        self._meetings = [_Meeting(topology.tp_size) for _ in range(topology.num_stages)]

    def links(self, worker: WorkerId, device: torch.device = _CPU) -> Links:
        """`device`: that worker's; where it is a GPU, its thread's current one."""
        tensor_parallel: TensorParallel = SingleRank()
        if self._topology.tp_size > 1:
            tensor_parallel = ThreadTensorParallel(self._meetings[worker.stage], worker.tp_rank)
        return Links(ThreadTransport(self, worker.rank, device), tensor_parallel)

    def box(self, from_rank: int, to_rank: int, tag: int) -> "queue.SimpleQueue[_Parcel | None]":
        with self._lock:
            box = self._boxes[from_rank, to_rank, tag]
            if self._is_closed:
                box.put(None)
            return box

    def close(self) -> None:
        """Wake every waiting worker with a WorkerDiedError."""
        with self._lock:
            self._is_closed = True
            for box in self._boxes.values():
                box.put(None)
        for meeting in self._meetings:
            meeting.barrier.abort()


class ThreadTransport:
    """Transport of one worker thread."""

    def __init__(self, mesh: ThreadMesh, rank: int, device: torch.device) -> None:
        self._mesh = mesh
        self._rank = rank
        self._device = device

    def place(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_values, dtype=dtype, device=self._device)

    def copies(self, num_values: int, dtype: torch.dtype) -> bool:
        return self._device.type == "cuda"

    def send(self, tensor: Tensor, to_rank: int, tag: int) -> Handle:
        # The receiver's stream reads a GPU's tensor later, when a graph may have rewritten it.
        sent = tensor.clone() if tensor.is_cuda else tensor
        self._mesh.box(self._rank, to_rank, tag).put(_Parcel.of(sent))
        return _Sent()

    def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle:
        return _Receiving(self._mesh.box(from_rank, self._rank, tag), into)


class _Sent:
    # The receiver holds a reference; nobody rewrites a tensor that was handed over.
    def wait(self) -> None:
        return


class _Receiving:
    def __init__(self, box: "queue.SimpleQueue[_Parcel | None]", into: Tensor) -> None:
        self._box = box
        self._into = into

    def wait(self) -> None:
        parcel = self._box.get()
        if parcel is None:
            raise WorkerDiedError("a neighbouring worker thread ended")
        tensor = parcel.open()
        assert tensor.shape == self._into.shape, (
            f"received {tuple(tensor.shape)}, expected {tuple(self._into.shape)}"
        )
        self._into.copy_(tensor, non_blocking=True)


class _Meeting:
    """A barrier and one place a rank to lay its tensor."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.places: list[_Parcel | None] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        try:
            self.places[rank] = _Parcel.of(tensor.clone())
            self.barrier.wait()
            tensors = [place.open() for place in self.places if place is not None]
            assert len(tensors) == len(self.places), "a rank came without its tensor"
            # Nobody lays the next tensor before all have picked these up.
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise WorkerDiedError("a worker thread of this stage ended") from None
        return tensors


class ThreadTensorParallel:
    """Collectives among the threads of one stage; sums in rank order on every rank."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = len(meeting.places)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        first, *others = self._meeting.exchange(self.rank, tensor)
        tensor.copy_(first)
        for other in others:
            tensor += other.to(tensor.device)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors, of one shape, along `dim`."""
        parts = self._meeting.exchange(self.rank, tensor)
        return torch.cat([part.to(tensor.device) for part in parts], dim=dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank, in place."""
        first, *_ = self._meeting.exchange(self.rank, tensor)
        return tensor.copy_(first)
