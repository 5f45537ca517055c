"""Links between threads: order, exact sums, and nobody waits for the dead."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stagecoach.errors import WorkerDiedError
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology, WorkerId
from tests.cpu.engine.fakes import in_threads

pytestmark = pytest.mark.cpu


def receive(mesh: ThreadMesh, worker: WorkerId, from_rank: int, tag: int, shape: int) -> Tensor:
    into = torch.empty(shape)
    mesh.links(worker).transport.receive(into, from_rank, tag).wait()
    return into


def test_tensors_of_one_sender_and_tag_keep_their_order() -> None:
    topology = Topology(num_stages=3, tp_size=1)
    mesh = ThreadMesh(topology)
    first, second, third = topology.workers
    for number in range(4):
        for tag in (0, 1):
            value = torch.tensor([10.0 * tag + number])
            mesh.links(first).transport.send(value, 2, tag).wait()
        mesh.links(second).transport.send(torch.tensor([100.0 + number]), 2, 0).wait()
    for from_rank, tag, base in ((1, 0, 100), (0, 1, 10), (0, 0, 0)):
        got = [float(receive(mesh, third, from_rank, tag, 1)) for _ in range(4)]
        assert got == [base + number for number in range(4)]


def test_a_tensor_of_another_shape_is_our_mistake() -> None:
    topology = Topology(num_stages=2, tp_size=1)
    mesh = ThreadMesh(topology)
    mesh.links(topology.worker(0)).transport.send(torch.zeros(3), 1, 0)
    with pytest.raises(AssertionError, match=r"received \(3,\), expected \(4,\)"):
        receive(mesh, topology.worker(1), 0, 0, 4)


def test_a_stage_of_one_rank_has_no_collectives() -> None:
    topology = Topology(num_stages=2, tp_size=1)
    links = ThreadMesh(topology).links(topology.worker(1))
    assert isinstance(links.tensor_parallel, SingleRank)


def collective(size: int, call: Callable[[int, ThreadMesh, WorkerId], Tensor]) -> list[Tensor]:
    """`call` on every rank of the second of two stages."""
    topology = Topology(num_stages=2, tp_size=size)
    mesh = ThreadMesh(topology)
    ranks = topology.stage_ranks(1)
    return in_threads(
        [
            lambda index=index, rank=rank: call(index, mesh, topology.worker(rank))
            for index, rank in enumerate(ranks)
        ]
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_adds_in_rank_order_on_every_rank(size: int) -> None:
    # In float32 the sum of these depends on the order.
    addends = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 1e8])]
    addends += [torch.tensor([-1e8, 1.0]), torch.tensor([1.0, -1e8])]
    addends = addends[:size]
    expected = addends[0].clone()
    for addend in addends[1:]:
        expected = expected + addend

    def call(index: int, mesh: ThreadMesh, worker: WorkerId) -> Tensor:
        return mesh.links(worker).tensor_parallel.all_reduce(addends[index].clone())

    for got in collective(size, call):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_hold_the_same_bits_and_rounds_do_not_mix(size: int) -> None:
    rounds = [[torch.randn(7, 3) * 10.0**rank for rank in range(size)] for _ in range(50)]

    def call(index: int, mesh: ThreadMesh, worker: WorkerId) -> Tensor:
        tensor_parallel = mesh.links(worker).tensor_parallel
        return torch.stack([tensor_parallel.all_reduce(of[index].clone()) for of in rounds])

    first, *others = collective(size, call)
    assert all(torch.equal(first, other) for other in others)
    for got, addends in zip(first, rounds, strict=True):
        assert torch.allclose(got, torch.stack(addends).sum(0))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_joins_in_rank_order(dim: int) -> None:
    parts = [torch.randn(2, 3, 4) for _ in range(3)]

    def call(index: int, mesh: ThreadMesh, worker: WorkerId) -> Tensor:
        return mesh.links(worker).tensor_parallel.all_gather(parts[index], dim)

    for got in collective(3, call):
        assert torch.equal(got, torch.cat(parts, dim))


@pytest.mark.parametrize("size", [2, 4])
def test_broadcast_gives_every_rank_the_first_ones_tensor(size: int) -> None:
    """Of its own: a rank that goes on to write in it changes no other's."""
    rounds = [[torch.randint(99, (3, 2)) for _ in range(size)] for _ in range(20)]

    def call(index: int, mesh: ThreadMesh, worker: WorkerId) -> Tensor:
        tensor_parallel = mesh.links(worker).tensor_parallel
        got = [tensor_parallel.broadcast(of[index].clone()) for of in rounds]
        copies = [tensor.clone() for tensor in got]
        for tensor in got:
            tensor.fill_(-1 - index)
        return torch.stack(copies)

    expected = torch.stack([of_first for of_first, *_ in rounds])
    assert all(torch.equal(got, expected) for got in collective(size, call))


def test_the_stages_meet_apart() -> None:
    topology = Topology(num_stages=2, tp_size=2)
    mesh = ThreadMesh(topology)

    def call(worker: WorkerId) -> float:
        tensor = torch.tensor([10.0**worker.rank])
        return float(mesh.links(worker).tensor_parallel.all_reduce(tensor))

    sums = in_threads([lambda worker=worker: call(worker) for worker in topology.workers])
    assert sums == [11.0, 11.0, 1100.0, 1100.0]


@pytest.mark.parametrize("is_waiting", [True, False], ids=["while they wait", "before they wait"])
def test_close_wakes_every_waiter(is_waiting: bool) -> None:
    """A receiver of each stage and a rank in a collective, each without its partner."""
    topology = Topology(num_stages=3, tp_size=2)
    mesh = ThreadMesh(topology)
    at_the_door = threading.Barrier(4)
    is_closed = threading.Event()

    def outcome(wait: Callable[[], object]) -> str:
        at_the_door.wait(30)
        if not is_waiting:
            assert is_closed.wait(30)
        try:
            wait()
        except WorkerDiedError as error:
            return str(error)
        return "it returned"

    def close() -> str:
        at_the_door.wait(30)
        mesh.close()
        is_closed.set()
        return ""

    reduce = mesh.links(topology.worker(0)).tensor_parallel.all_reduce
    outcomes = in_threads(
        [
            close,
            lambda: outcome(lambda: receive(mesh, topology.worker(2), 0, 0, 1)),
            lambda: outcome(lambda: receive(mesh, topology.worker(5), 3, 1, 1)),
            lambda: outcome(lambda: reduce(torch.ones(1))),
        ]
    )
    assert outcomes[1:3] == ["a neighbouring worker thread ended"] * 2
    assert outcomes[3] == "a worker thread of this stage ended"


def test_a_receive_that_was_posted_before_the_close_ends_too() -> None:
    topology = Topology(num_stages=2, tp_size=1)
    mesh = ThreadMesh(topology)
    handle = mesh.links(topology.worker(1)).transport.receive(torch.empty(1), 0, 0)
    mesh.close()
    with pytest.raises(WorkerDiedError):
        in_threads([handle.wait])
