"""Links between processes over torch.distributed.

Owns the process groups of this process: set once, taken down once. On CPU the backend is
gloo, whose blocking send waits for its receiver; only isend is used, so that two stages can
never wait for each other's receives.
"""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stagecoach.errors import WorkerDiedError
from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.pipeline.links import Handle, Links
from stagecoach.pipeline.topology import Topology, WorkerId

# A rank that waits longer than this for a neighbour reports it; a dead neighbour is noticed
# at once by its closed connection and by the process that started the workers.
_TIMEOUT = datetime.timedelta(minutes=30)


def connect(worker: WorkerId, topology: Topology, rendezvous_file: Path) -> Links:
    """Join the process groups of this engine; every worker calls it once at start.

    Args:
        rendezvous_file: a path that all workers share and nobody used before.
    """
    dist.init_process_group(
        backend="gloo",
        init_method=f"file://{rendezvous_file}",
        rank=worker.rank,
        world_size=topology.num_workers,
        timeout=_TIMEOUT,
    )
    tensor_parallel: TensorParallel = SingleRank()
    if topology.tp_size > 1:
        # Every rank makes every group, in the same order.
        groups = [
            dist.new_group(list(topology.stage_ranks(stage)), timeout=_TIMEOUT)
            for stage in range(topology.num_stages)
        ]
        tensor_parallel = ProcessTensorParallel(
            groups[worker.stage], worker.tp_rank, topology.tp_size
        )
    return Links(ProcessTransport(), tensor_parallel)


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class ProcessTransport:
    """Transport over torch.distributed's default group."""

    def send(self, tensor: Tensor, to_rank: int, tag: int) -> Handle:
        with _neighbours():
            work = dist.isend(tensor, dst=to_rank, tag=tag)
        assert work is not None, f"not a member of the group: send to {to_rank}"
        return _Transfer(work)

    def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle:
        with _neighbours():
            work = dist.irecv(into, src=from_rank, tag=tag)
        assert work is not None, f"not a member of the group: receive from {from_rank}"
        return _Transfer(work)


class _Transfer:
    """A Handle over torch.distributed's work."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        with _neighbours():
            self._work.wait()


class ProcessTensorParallel:
    """Collectives among the ranks of one stage."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        with _neighbours():
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors, of one shape, along `dim`."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with _neighbours():
            dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank, in place where it is contiguous."""
        tensor = tensor.contiguous()
        with _neighbours():
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor


@contextmanager
def _neighbours() -> Iterator[None]:
    """What gloo raises when a connection breaks, in our words."""
    try:
        yield
    except RuntimeError as error:
        [first_line, *_] = str(error).splitlines() or [repr(error)]
        raise WorkerDiedError(f"the link to a neighbour broke: {first_line}") from error
