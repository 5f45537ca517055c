"""Links between processes over torch.distributed.

Owns the process groups of this process: set once, taken down once. On CPU the backend is
gloo, whose blocking send waits for its receiver; only isend is used, so that two stages can
never wait for each other's receives. With GPUs, `cuda_links.py` carries what lies on them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from stagecoach.config.engine import option
from stagecoach.errors import RendezvousError
from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.pipeline.links import Handle, Links
from stagecoach.pipeline.process_groups import TIMEOUT, naming_neighbours
from stagecoach.pipeline.rendezvous import Rendezvous
from stagecoach.pipeline.topology import Topology, WorkerId

_CPU = torch.device("cpu")
# A GPU is given this long to leave its groups.
_LEAVE_SECONDS = 3.0


def connect(
    worker: WorkerId,
    topology: Topology,
    rendezvous: Rendezvous,
    device: torch.device = _CPU,
    *,
    generation: int = 0,
    hosts: tuple[int, ...] | None = None,
) -> Links:
    """Join the process groups of this engine; all workers call it together.

    Args:
        device: this worker's; where it is a GPU, the current one, and another worker's on none.
        generation: how often the workers have met before; the same number on all.
        hosts: on which host each rank is; None: all on one.

    Raises:
        RendezvousError: the workers do not reach each other within the time.
    """
    has_gpus = device.type == "cuda" and topology.num_workers > 1
    with _naming_the_meeting(rendezvous):
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo",
            store=rendezvous.store(generation, topology.num_workers),
            rank=worker.rank,
            world_size=topology.num_workers,
            timeout=TIMEOUT,
            device_id=device if has_gpus else None,
        )
    if worker.rank == 0:
        # All are connected, so nobody is at an earlier meeting any more.
        rendezvous.forget_earlier(generation)
    if has_gpus:
        from stagecoach.pipeline import cuda_links

        return cuda_links.connect(
            worker, topology, device, ProcessTransport(), hosts or (0,) * topology.num_workers
        )
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


@contextmanager
def _naming_the_meeting(rendezvous: Rendezvous) -> Iterator[None]:
    """What a library raises where ranks do not meet, in our words."""
    try:
        yield
    except RuntimeError as error:
        [first_line, *_] = str(error).splitlines() or [repr(error)]
        raise RendezvousError(
            f"the workers did not reach each other ({option('network_interface')}, "
            f"{option('distributed_timeout_seconds')}={rendezvous.timeout_seconds:g}): {first_line}"
        ) from error


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
