"""Links between threads whose tensors are on one GPU, each thread with a stream of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stagecoach.pipeline.boundary import BoundaryField
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology, WorkerId
from tests.cpu.engine.fakes import in_threads

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
FIELDS = (
    BoundaryField(name="bank_TBH", row_shape=(2, 64), final_after=0),
    BoundaryField(name="hidden_TH", row_shape=(64,), final_after=1),
)
NUM_STEPS = 12


def on_a_stream_of_its_own(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        torch.cuda.set_device(DEVICE)
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            result = work()
            torch.cuda.current_stream().synchronize()
            return result

    return run


def tensors_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(step)
    return {
        field.name: torch.randn(
            1 + 300 * step, *field.row_shape, generator=generator, device=DEVICE
        )
        for field in FIELDS
    }


@pytest.mark.parametrize("tp_size", [1, 2])
def test_fields_arrive_though_they_are_made_late_and_rewritten_at_once(tp_size: int) -> None:
    topology = Topology(num_stages=2, tp_size=tp_size)
    mesh = ThreadMesh(topology)

    def stage(worker: WorkerId) -> Tensor:
        is_first = worker.stage == 0
        incoming, outgoing = ((), FIELDS) if is_first else (FIELDS, ())
        links = mesh.links(worker, DEVICE)
        handoff = Handoff(links, worker, topology, incoming, outgoing, torch.float32)
        handoff.agree()
        num_wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for step in range(NUM_STEPS):
            handoff.begin_step(step)
            if is_first:
                torch.cuda._sleep(3_000_000)
                tensors = tensors_of(step)
                handoff.send_all(tensors.__getitem__)
                for tensor in tensors.values():
                    tensor.fill_(float("nan"))
                continue
            received = handoff.receive(1 + 300 * step)
            for name, tensor in tensors_of(step).items():
                num_wrong += (received[name] != tensor).sum()
        handoff.finish()
        return num_wrong

    wrong = in_threads(
        [on_a_stream_of_its_own(lambda worker=worker: stage(worker)) for worker in topology.workers]
    )
    assert [int(number) for number in wrong] == [0] * topology.num_workers


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_of_ranks_that_come_at_different_times(size: int) -> None:
    topology = Topology(num_stages=1, tp_size=size)
    mesh = ThreadMesh(topology)
    parts = [torch.randn(1000, 7, device=DEVICE) * 10.0**rank for rank in range(size)]
    torch.cuda.synchronize()
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    torch.cuda.synchronize()

    def rank(worker: WorkerId) -> Tensor:
        tensor_parallel = mesh.links(worker, DEVICE).tensor_parallel
        num_wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for turn in range(20):
            if turn % size == worker.rank:
                torch.cuda._sleep(3_000_000)
            own = parts[worker.rank] * 1
            num_wrong += (tensor_parallel.all_reduce(own) != expected).sum()
            joined = tensor_parallel.all_gather(parts[worker.rank] * 1, 1)
            num_wrong += (joined != torch.cat(parts, 1)).sum()
            given = tensor_parallel.broadcast(parts[worker.rank] * 1)
            num_wrong += (given != parts[0]).sum()
            own.fill_(float("nan"))
        return num_wrong

    wrong = in_threads(
        [on_a_stream_of_its_own(lambda worker=worker: rank(worker)) for worker in topology.workers]
    )
    assert [int(number) for number in wrong] == [0] * size
