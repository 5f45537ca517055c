"""Links that can be made anew, because a rank they led to was started anew.

Owns what of them outlives that: the layers of a loaded model hold one tensor-parallel group for
good, and the groups of one generation after the other stand behind it. Knows neither processes nor
who decides that all meet again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.pipeline.links import Handle, Links
from stagecoach.pipeline.process_groups import naming_neighbours
from stagecoach.pipeline.topology import Topology, WorkerId


class RenewableLinks:
    """The links of one worker, generation after generation; at first it is apart.

    Args:
        connect: joins the groups of a generation, which every worker does.
        disconnect: leaves them, also when others are gone; None: that cannot be done.
    """

    def __init__(
        self,
        worker: WorkerId,
        topology: Topology,
        connect: Callable[[int], Links],
        disconnect: Callable[[], None] | None,
    ) -> None:
        self._connect = connect
        self._disconnect = disconnect
        self._group: RenewableTensorParallel | None = None
        if topology.tp_size > 1:
            self._group = RenewableTensorParallel(worker.tp_rank, topology.tp_size)

    @property
    def can_part(self) -> bool:
        """Whether this worker can go on when one that it is linked with is gone."""
        return self._disconnect is not None

    def apart(self) -> Links:
        """What a worker that has met nobody is made with."""
        return Links(_Nowhere(), self._group or SingleRank())

    def meet(self, generation: int) -> Links:
        """Link with all others; returns once they have come.

        Raises:
            WorkerDiedError: one of them ended meanwhile.
        """
        with naming_neighbours():
            links = self._connect(generation)
        if self._group is None:
            return links
        self._group.renew(links.tensor_parallel)
        return links._replace(tensor_parallel=self._group)

    def part(self) -> None:
        """Let go of all links, so that whoever waits for this rank hears that it is gone.

        The caller holds none of the transfers any more.
        """
        assert self._disconnect is not None, "links that cannot be parted from"
        if self._group is not None:
            self._group.renew(None)
        self._disconnect()


class RenewableTensorParallel:
    """Collectives of a group that can be replaced; between two of them there are none."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: TensorParallel | None = None

    def renew(self, group: TensorParallel | None) -> None:
        assert group is None or (group.rank, group.size) == (self.rank, self.size), "another place"
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place or not."""
        return self._present().all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors, of one shape, along `dim`."""
        return self._present().all_gather(tensor, dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank."""
        return self._present().broadcast(tensor)

    def _present(self) -> TensorParallel:
        assert self._group is not None, "no step runs while the ranks are apart"
        return self._group


class _Nowhere:
    """The Transport of a worker that is apart."""

    def place(self, num_values: int, dtype: torch.dtype) -> Tensor:
        raise AssertionError("apart: nothing comes")

    def copies(self, num_values: int, dtype: torch.dtype) -> bool:
        raise AssertionError("apart: nothing goes")

    def send(self, tensor: Tensor, to_rank: int, tag: int) -> Handle:
        raise AssertionError(f"apart: no way to rank {to_rank}")

    def receive(self, into: Tensor, from_rank: int, tag: int) -> Handle:
        raise AssertionError(f"apart: no way from rank {from_rank}")
