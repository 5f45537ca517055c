"""Links between processes that each have a GPU.

Small messages go through peer memory, larger ones through NCCL: a communicator of its own for each
way from stage to stage, so that transfers overlap what the stage computes, and one for each stage.
Tensors on the host go through gloo. No call waits on the host for a GPU: what `wait` holds up is
the current stream.
"""

import threading

import torch
import torch.distributed as dist
from torch import Tensor

from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.observe import log
from stagecoach.pipeline.links import Handle, Links, Transport
from stagecoach.pipeline.peer_links import PeerLinks, StageExchange, connect_peers, takes_hop
from stagecoach.pipeline.process_groups import TIMEOUT, naming_neighbours
from stagecoach.pipeline.topology import Topology, WorkerId

_logger = log.get_logger(__name__)
_SUMMED_DTYPES = (torch.bfloat16, torch.float32)


def connect(
    worker: WorkerId,
    topology: Topology,
    device: torch.device,
    host: Transport,
    hosts: tuple[int, ...],
) -> Links:
    """Make the groups and send a first message over each; the default group has been joined.

    Args:
        device: this worker's, already the current one.
        host: carries tensors that are not on a GPU.
        hosts: on which host each rank is; those of a stage are on one.
    """
    # Every rank makes every group, in the same order.
    ways = {
        (rank, rank + topology.tp_size): dist.new_group(
            [rank, rank + topology.tp_size], timeout=TIMEOUT, backend="nccl"
        )
        for rank in range(topology.num_workers - topology.tp_size)
    }
    stages = [
        dist.new_group(list(topology.stage_ranks(stage)), timeout=TIMEOUT)
        for stage in range(topology.num_stages)
        if topology.tp_size > 1
    ]
    peers = connect_peers(worker, topology, device, hosts)
    transport = CudaTransport(ways, peers, device, host)
    tensor_parallel: TensorParallel = SingleRank()
    if stages:
        tensor_parallel = CudaTensorParallel(
            stages[worker.stage],
            worker.tp_rank,
            topology.tp_size,
            peers.exchange if peers is not None else None,
        )
    _warm_up(worker, topology, transport, tensor_parallel, device)
    # On one host a rank's way to the next stage is as fast as that to its own stage's ranks, so
    # that gathering parts takes longer than sending all. Between hosts it is much slower.
    return Links(transport, tensor_parallel, shares_fields=len(set(hosts)) > 1)


def disconnect(seconds: float) -> None:
    """Leave the groups; returns after so long in any case.

    A neighbour that is already gone may hold this up for ever; the process then ends without.
    """

    def leave(device: int) -> None:
        torch.cuda.set_device(device)
        dist.destroy_process_group()

    thread = threading.Thread(
        target=leave, args=(torch.cuda.current_device(),), name="disconnect", daemon=True
    )
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _logger.debug("the process groups did not end within %g s", seconds)


class CudaTransport:
    """Transport between GPUs; to another host small messages go through NCCL, too.

    A send reads its tensor in the order of the current stream.
    """

    def __init__(
        self,
        ways: dict[tuple[int, int], dist.ProcessGroup],
        peers: PeerLinks | None,
        device: torch.device,
        host: Transport,
    ) -> None:
        """`ways`: a group for each (sender, receiver); those of others are no groups."""
        self._ways = ways
        self._peers = peers
        self._device = device
        self._host = host
        # Receives are posted here, before the stream that computes gets to them.
        self._receive_stream = torch.cuda.Stream(device)

    def place(self, num_values: int, dtype: torch.dtype) -> Tensor:
        if self._hops_in(num_values, dtype):
            return torch.empty(num_values, dtype=dtype, device=self._device)
        # Memory of the receiving stream: a receive waits for nothing that the other computes.
        with torch.cuda.stream(self._receive_stream):
            return torch.empty(num_values, dtype=dtype, device=self._device)

    def copies(self, num_values: int, dtype: torch.dtype) -> bool:
        return self._hops_out(num_values, dtype)

    def send(self, tensor: Tensor, to_rank: int, tag: int) -> Handle:
        if not tensor.is_cuda:
            return self._host.send(tensor, to_rank, tag)
        if self._hops_out(tensor.numel(), tensor.dtype):
            assert self._peers is not None and self._peers.sender is not None
            self._peers.sender.send(tensor)
            return _Done()
        return self._send_nccl(tensor, to_rank)

    def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle:
        if not into.is_cuda:
            return self._host.receive(into, from_rank, tag)
        if self._hops_in(into.numel(), into.dtype):
            assert self._peers is not None
            return _Hop(self._peers, into)
        return self._receive_nccl(into, from_rank)

    def warm_up(self, rank: int, previous_rank: int | None, next_rank: int | None) -> None:
        """One value over each of this rank's ways, also those that small messages do not take."""
        value = torch.full((1,), float(rank), device=self._device)
        handles = []
        if next_rank is not None:
            handles.append(self._send_nccl(value, next_rank))
            if self._hops_out(1, value.dtype):
                handles.append(self.send(value, next_rank, 0))
        if previous_rank is not None:
            received = torch.empty(1, device=self._device)
            self._receive_stream.wait_stream(torch.cuda.current_stream())
            handles.append(self._receive_nccl(received, previous_rank))
            if self._hops_in(1, value.dtype):
                handles.append(self.receive(torch.empty_like(received), previous_rank, 0))
        for handle in handles:
            handle.wait()

    def _hops_out(self, num_values: int, dtype: torch.dtype) -> bool:
        """Whether a message to the next stage goes through peer memory."""
        has_way = self._peers is not None and self._peers.sender is not None
        return has_way and takes_hop(num_values, dtype)

    def _hops_in(self, num_values: int, dtype: torch.dtype) -> bool:
        has_way = self._peers is not None and self._peers.receiver is not None
        return has_way and takes_hop(num_values, dtype)

    def _send_nccl(self, tensor: Tensor, to_rank: int) -> Handle:
        way = self._ways[dist.get_rank(), to_rank]
        with naming_neighbours():
            work = dist.isend(tensor, dst=to_rank, group=way)
        assert work is not None, f"not a member of the group: send to {to_rank}"
        return _NcclTransfer(work, tensor)

    def _receive_nccl(self, into: Tensor, from_rank: int) -> Handle:
        way = self._ways[from_rank, dist.get_rank()]
        with naming_neighbours(), torch.cuda.stream(self._receive_stream):
            work = dist.irecv(into, src=from_rank, group=way)
        assert work is not None, f"not a member of the group: receive from {from_rank}"
        return _NcclTransfer(work, into)


class _Done:
    def wait(self) -> None:
        return


class _Hop:
    """A message that is copied out of the ring when the current stream gets there."""

    def __init__(self, peers: PeerLinks, into: Tensor) -> None:
        assert peers.receiver is not None, "the first stage receives from nobody"
        self._receiver = peers.receiver
        self._into = into

    def wait(self) -> None:
        self._receiver.receive(self._into)


class _NcclTransfer:
    """A Handle over NCCL's work on a stream of its own."""

    def __init__(self, work: dist.Work, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> None:
        """What the current stream does from here on finds the transfer complete."""
        with naming_neighbours():
            self._work.wait()
        # It may come from another stream's memory, and is freed while this one still reads it.
        self._tensor.record_stream(torch.cuda.current_stream())


class CudaTensorParallel:
    """Collectives among the ranks of one stage; all can be captured in a CUDA graph."""

    def __init__(
        self, group: dist.ProcessGroup, rank: int, size: int, exchange: StageExchange | None
    ) -> None:
        self._group = group
        self._exchange = exchange
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place where the tensor is contiguous."""
        tensor = tensor.contiguous()
        if self._is_small(tensor) and tensor.dtype in _SUMMED_DTYPES:
            assert self._exchange is not None
            return self._exchange.all_reduce(tensor)
        with naming_neighbours():
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors, of one shape, along `dim`."""
        tensor = tensor.contiguous()
        if self._is_small(tensor):
            assert self._exchange is not None
            parts = self._exchange.all_gather(tensor)
        else:
            parts = tensor.new_empty(self.size, *tensor.shape)
            with naming_neighbours():
                dist.all_gather_into_tensor(parts.view(-1), tensor.view(-1), group=self._group)
        if dim == 0:
            return parts.flatten(0, 1)
        return torch.cat(parts.unbind(), dim=dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank."""
        tensor = tensor.contiguous()
        if self._is_small(tensor):
            assert self._exchange is not None
            return self._exchange.all_gather(tensor)[0]
        with naming_neighbours():
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def warm_up(self, device: torch.device) -> None:
        """One value through each collective, both ways."""
        value = torch.zeros(self.size, device=device)
        with naming_neighbours():
            dist.all_reduce(value, group=self._group)
            dist.all_gather_into_tensor(value, value[:1].clone(), group=self._group)
            dist.broadcast(value, group=self._group, group_src=0)
        self.all_reduce(value)
        self.all_gather(value, 0)

    def _is_small(self, tensor: Tensor) -> bool:
        return self._exchange is not None and self._exchange.takes(tensor)


def _warm_up(
    worker: WorkerId,
    topology: Topology,
    transport: CudaTransport,
    tensor_parallel: TensorParallel,
    device: torch.device,
) -> None:
    """Communicators connect at their first message: at the start rather than in the first step."""
    is_first, is_last = worker.stage == 0, worker.stage == topology.num_stages - 1
    transport.warm_up(
        worker.rank,
        None if is_first else worker.rank - topology.tp_size,
        None if is_last else worker.rank + topology.tp_size,
    )
    if isinstance(tensor_parallel, CudaTensorParallel):
        tensor_parallel.warm_up(device)
    torch.cuda.synchronize(device)
    # Over gloo.
    dist.all_reduce(torch.zeros(1))
