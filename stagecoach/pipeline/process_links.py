"""Links between processes over torch.distributed.

Owns the process groups of this process: set once, taken down once. On CPU the backend is
gloo, whose blocking send waits for its receiver; only isend is used, so that two stages can
never wait for each other's receives. With GPUs, `cuda_links.py` carries what lies on them.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.pipeline.links import Handle, Links
from stagecoach.pipeline.process_groups import TIMEOUT, naming_neighbours
from stagecoach.pipeline.topology import Topology, WorkerId

_CPU = torch.device("cpu")
# A GPU is given this long to leave its groups.
_LEAVE_SECONDS = 3.0


def connect(
    worker: WorkerId,
    topology: Topology,
    rendezvous_file: Path,
    device: torch.device = _CPU,
) -> Links:
    """Join the process groups of this engine; every worker calls it once at start.

    Args:
        rendezvous_file: a path that all workers share and nobody used before.
        device: this worker's; where it is a GPU, the current one, and another worker's on none.
    """
    has_gpus = device.type == "cuda" and topology.num_workers > 1
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo",
        init_method=f"file://{rendezvous_file}",
        rank=worker.rank,
        world_size=topology.num_workers,
        timeout=TIMEOUT,
        device_id=device if has_gpus else None,
    )
    if has_gpus:
        from stagecoach.pipeline import cuda_links

        return cuda_links.connect(worker, topology, device, ProcessTransport())
    tensor_parallel: TensorParallel = SingleRank()
    if topology.tp_size > 1:
        # Every rank makes every group, in the same order.
        groups = [
            dist.new_group(list(topology.stage_ranks(stage)), timeout=TIMEOUT)
            for stage in range(topology.num_stages)
        ]
        tensor_parallel = ProcessTensorParallel(
            groups[worker.stage], worker.tp_rank, topology.tp_size
        )
    return Links(ProcessTransport(), tensor_parallel)


def disconnect() -> None:
    """Leave the groups; graphs that captured a collective must be gone by then."""
    if not dist.is_initialized():
        return
    if "nccl" in dist.get_backend_config():
        from stagecoach.pipeline import cuda_links

        cuda_links.disconnect(_LEAVE_SECONDS)
    else:
        dist.destroy_process_group()


class ProcessTransport:
    """Transport over torch.distributed's default group."""

    def place(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_values, dtype=dtype)

    def copies(self, num_values: int, dtype: torch.dtype) -> bool:
        return False

    def send(self, tensor: Tensor, to_rank: int, tag: int) -> Handle:
        with naming_neighbours():
            work = dist.isend(tensor, dst=to_rank, tag=tag)
        assert work is not None, f"not a member of the group: send to {to_rank}"
        return _Transfer(work)

    def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle:
        with naming_neighbours():
            work = dist.irecv(into, src=from_rank, tag=tag)
        assert work is not None, f"not a member of the group: receive from {from_rank}"
        return _Transfer(work)


class _Transfer:
    """A Handle over torch.distributed's work."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        with naming_neighbours():
            self._work.wait()


class ProcessTensorParallel:
    """Collectives among the ranks of one stage."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        with naming_neighbours():
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors, of one shape, along `dim`."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with naming_neighbours():
            dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank, in place where it is contiguous."""
        tensor = tensor.contiguous()
        with naming_neighbours():
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor
