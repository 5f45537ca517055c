"""One place of a worker, and links of one generation after the other behind it."""

from functools import partial

import pytest
import torch

from stagecoach.errors import WorkerDiedError
from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.renewable_links import RenewableLinks
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from tests.cpu.engine.fakes import in_threads

pytestmark = pytest.mark.cpu


def collect(group: TensorParallel, value: float) -> tuple[list[float], ...]:
    """What each collective gives for two of this value on every rank."""
    tensor = torch.full((2,), value)
    gathered = group.all_gather(tensor, 0).tolist()
    return group.all_reduce(tensor.clone()).tolist(), gathered, group.broadcast(tensor).tolist()


def test_a_group_that_layers_hold_works_in_every_generation() -> None:
    topology = Topology(num_stages=1, tp_size=2)
    meshes = [ThreadMesh(topology) for _ in range(3)]
    renewable = [
        RenewableLinks(
            worker,
            topology,
            lambda generation, worker=worker: meshes[generation].links(worker),
            lambda: None,
        )
        for worker in topology.workers
    ]
    groups = [links.apart().tensor_parallel for links in renewable]
    for generation in range(3):
        met = [links.meet(generation) for links in renewable]
        assert [links.tensor_parallel for links in met] == groups
        assert in_threads([partial(collect, group, 1.0 + generation) for group in groups]) == [
            ([2.0 + 2 * generation] * 2, [1.0 + generation] * 4, [1.0 + generation] * 2)
        ] * len(groups)
        for links in renewable:
            links.part()
        with pytest.raises(AssertionError, match="apart"):
            groups[0].all_reduce(torch.ones(1))
    assert [(group.rank, group.size) for group in groups] == [(0, 2), (1, 2)]


def test_a_stage_of_one_rank_needs_nothing_in_between() -> None:
    topology = Topology(num_stages=1, tp_size=1)
    renewable = RenewableLinks(
        topology.worker(0), topology, lambda _: ThreadMesh(topology).links(topology.worker(0)), int
    )
    assert isinstance(renewable.apart().tensor_parallel, SingleRank)
    assert isinstance(renewable.meet(1).tensor_parallel, SingleRank)


def test_nothing_goes_or_comes_apart() -> None:
    topology = Topology(num_stages=2, tp_size=1)
    transport = RenewableLinks(topology.worker(0), topology, unreachable, int).apart().transport
    for call in (
        lambda: transport.send(torch.ones(1), 1, 0),
        lambda: transport.receive(torch.ones(1), 1, 0),
        lambda: transport.place(1, torch.float32),
        lambda: transport.copies(1, torch.float32),
    ):
        with pytest.raises(AssertionError, match="apart"):
            call()


def unreachable(generation: int) -> Links:
    raise RuntimeError(f"nobody came to meeting {generation}")


def test_a_meeting_that_fails_is_a_neighbours_end() -> None:
    topology = Topology(num_stages=2, tp_size=1)
    links = RenewableLinks(topology.worker(0), topology, unreachable, int)
    with pytest.raises(WorkerDiedError, match="nobody came to meeting 3"):
        links.meet(3)
