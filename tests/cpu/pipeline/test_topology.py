"""The grid of workers: one numbering, each rank in exactly one place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.pipeline.topology import Topology

pytestmark = pytest.mark.cpu

topologies = st.builds(Topology, num_stages=st.integers(1, 9), tp_size=st.integers(1, 9))


@given(topologies)
def test_every_place_of_the_grid_has_one_rank(topology: Topology) -> None:
    workers = topology.workers
    assert [worker.rank for worker in workers] == list(range(topology.num_workers))
    places = {(worker.stage, worker.tp_rank) for worker in workers}
    assert places == {
        (stage, tp_rank)
        for stage in range(topology.num_stages)
        for tp_rank in range(topology.tp_size)
    }
    assert len({worker.name for worker in workers}) == topology.num_workers


@given(topologies)
def test_the_ranks_of_a_stage_are_neighbours_in_order(topology: Topology) -> None:
    for stage in range(topology.num_stages):
        ranks = topology.stage_ranks(stage)
        assert [topology.worker(rank).stage for rank in ranks] == [stage] * topology.tp_size
        assert [topology.worker(rank).tp_rank for rank in ranks] == list(range(topology.tp_size))


@given(topologies, st.integers(1, 9))
def test_hosts_share_whole_stages_in_order(topology: Topology, num_hosts: int) -> None:
    shares = [topology.host_ranks(host, num_hosts) for host in range(num_hosts)]
    assert [rank for share in shares for rank in share] == list(range(topology.num_workers))
    sizes = [len(share) // topology.tp_size for share in shares]
    assert all(len(share) % topology.tp_size == 0 for share in shares)
    assert max(sizes) - min(sizes) <= 1
    # What is refused where hosts outnumber stages.
    assert (min(sizes) > 0) == (num_hosts <= topology.num_stages)


@given(topologies)
def test_tensor_rank_0_of_the_last_stage_samples(topology: Topology) -> None:
    sampler = topology.worker(topology.sampler_rank)
    assert (sampler.stage, sampler.tp_rank) == (topology.num_stages - 1, 0)


def test_a_worker_is_named_by_stage_and_tensor_rank() -> None:
    assert Topology(num_stages=3, tp_size=2).worker(5).name == "worker[2,1]"
