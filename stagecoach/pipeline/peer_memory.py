"""Memory that the GPUs of one host write into.

Owns one allocation a worker, of one size and layout everywhere, and knows where each lies in this
process: that of another GPU is reached by ordinary stores over NVLink. Multicast is never used.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagecoach.observe import log

_logger = log.get_logger(__name__)


class PeerMemory:
    """The regions of all workers, uint8 [num_bytes] each, zeroed at the start.

    Attributes:
        rank: whose region is this worker's own.
        addresses: of the region of each worker of this host in this process, by global rank.
    """

    def __init__(self, own: Tensor, handle: Any, ranks: Sequence[int] | None = None) -> None:
        """
        Args:
            handle: what torch's rendezvous returned for `own`.
            ranks: those of this host, in the order of the handle; None: all.
        """
        self._ranks = tuple(range(len(handle.buffer_ptrs)) if ranks is None else ranks)
        self.rank: int = self._ranks[handle.rank]
        self.addresses: dict[int, int] = dict(zip(self._ranks, handle.buffer_ptrs, strict=True))
        self._own = own
        self._handle = handle

    def view(self, rank: int, offset: int, num_values: int, dtype: torch.dtype) -> Tensor:
        """[num_values] of a worker's region, `offset` bytes behind its start."""
        end = offset + num_values * dtype.itemsize
        assert offset % dtype.itemsize == 0, f"offset {offset} of {dtype}"
        assert end <= self._own.numel(), f"bytes up to {end} of {self._own.numel()}"
        if rank == self.rank:
            return self._own[offset:end].view(dtype)
        view: Tensor = self._handle.get_buffer(
            self._ranks.index(rank), (num_values,), dtype, offset // dtype.itemsize
        )
        return view


def share_memory(
    num_bytes: int, device: torch.device, hosts: Sequence[int] | None = None
) -> PeerMemory | None:
    """Allocate on every worker and make it known to those of its host; all call it together.

    Args:
        hosts: on which host each rank is; None: all on one.

    Returns:
        None on every worker where one of them cannot: the GPUs do not reach each other, this
        torch has no symmetric memory, or it would use multicast. The log says why.
    """
    memory = reason = None
    try:
        memory = _rendezvous(num_bytes, device, hosts)
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
    # Over gloo: all go on with it, or none.
    num_able = torch.tensor([int(memory is not None)])
    dist.all_reduce(num_able)
    if int(num_able) == dist.get_world_size():
        return memory
    _logger.warning("GPUs exchange through NCCL alone: %s", reason or "another worker cannot")
    return None


def _rendezvous(num_bytes: int, device: torch.device, hosts: Sequence[int] | None) -> PeerMemory:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory as symmetric

    assert device.index is not None
    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
        raise RuntimeError("multicast is not turned off in this process")
    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    own.zero_()
    group = dist.group.WORLD
    assert group is not None, "join the process groups first"
    ranks = None
    if hosts is not None and len(set(hosts)) > 1:
        # Every rank makes every group, in the same order.
        for host in sorted(set(hosts)):
            members = [rank for rank, number in enumerate(hosts) if number == host]
            made = dist.new_group(members)
            if dist.get_rank() in members:
                group, ranks = made, members
    handle = symmetric.rendezvous(own, group)
    torch.cuda.synchronize(device)
    return PeerMemory(own, handle, ranks)
