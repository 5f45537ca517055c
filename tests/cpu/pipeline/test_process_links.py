"""Links between processes: one grid of real gloo workers on the loopback interface."""

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stagecoach.errors import ConfigError, WorkerDiedError
from stagecoach.pipeline import process_links
from stagecoach.pipeline.boundary import BoundaryField
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.rendezvous import Rendezvous
from stagecoach.pipeline.topology import Topology, WorkerId

pytestmark = pytest.mark.cpu

TOPOLOGY = Topology(num_stages=2, tp_size=2)
DTYPE = torch.float64
# Sizes that two ranks share, cannot share, and need not send.
FIELDS = (
    BoundaryField(name="bank_TBH", row_shape=(2, 6), final_after=0),
    BoundaryField(name="empty_TBH", row_shape=(0, 6), final_after=0),
    BoundaryField(name="odd_TH", row_shape=(3,), final_after=1),
    BoundaryField(name="taps_TNH", row_shape=(3, 8), final_after=1, columns=(-1, 0, 1)),
    BoundaryField(name="hidden_TH", row_shape=(8,), final_after=1),
)
TOKEN_COUNTS = (1, 5, 0, 2, 40_000, 3)
_JOIN_SECONDS = 60


def tensors_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        field.name: torch.randn(
            TOKEN_COUNTS[step], *field.row_shape, generator=generator, dtype=DTYPE
        )
        for field in FIELDS
    }


def first_stage(handoff: Handoff) -> None:
    for step in range(len(TOKEN_COUNTS)):
        handoff.begin_step(step)
        tensors = tensors_of(step)
        for layer in (0, 1):
            handoff.send_final(layer, tensors.__getitem__)
    handoff.finish()


def second_stage(handoff: Handoff) -> None:
    for step, num_tokens in enumerate(TOKEN_COUNTS):
        handoff.begin_step(step)
        received = handoff.receive(num_tokens)
        expected = tensors_of(step)
        assert list(received) == list(expected)
        for name, tensor in received.items():
            assert tensor.shape == expected[name].shape, f"step {step}: {name}"
            assert torch.equal(tensor, expected[name]), f"step {step}: {name}"


def check_collectives(links: Links, worker: WorkerId) -> None:
    """Sums and joins of the stage's own ranks, in rank order."""
    parts = [torch.full((2, 3), 10.0**rank, dtype=DTYPE) for rank in (0, 1, 2, 3)]
    of_stage = [parts[rank] for rank in TOPOLOGY.stage_ranks(worker.stage)]
    tensor_parallel = links.tensor_parallel
    assert (tensor_parallel.rank, tensor_parallel.size) == (worker.tp_rank, 2)
    summed = tensor_parallel.all_reduce(parts[worker.rank].clone())
    assert torch.equal(summed, of_stage[0] + of_stage[1])
    for dim in (0, 1):
        joined = tensor_parallel.all_gather(parts[worker.rank], dim)
        assert torch.equal(joined, torch.cat(of_stage, dim))
    # Rank 0 of the stage, which on the second stage is not rank 0 of the grid.
    drafts = torch.arange(6).view(2, 3) + 10 * worker.rank
    for tensor in (drafts.clone(), drafts.T.contiguous().T):
        given = tensor_parallel.broadcast(tensor)
        assert torch.equal(given, drafts - 10 * worker.tp_rank)


def check_disagreement(links: Links, worker: WorkerId) -> None:
    """A message that is shorter than its receive would pass unnoticed: the ends compare first."""
    is_first = worker.stage == 0
    incoming, outgoing = ((), FIELDS[:-1]) if is_first else (FIELDS, ())
    handoff = Handoff(links, worker, TOPOLOGY, incoming, outgoing, DTYPE)
    try:
        handoff.agree()
    except ConfigError as error:
        assert not is_first and str(error).startswith(f"rank {worker.tp_rank} sends bank_TBH")
    else:
        assert is_first, "other fields than were sent are taken"
        handoff.finish()


def work(worker: WorkerId, rendezvous: Path, report: Connection) -> None:
    """A worker process: all checks, then the first stage dies and the second notices."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        with torch.inference_mode():
            links = process_links.connect(
                worker, TOPOLOGY, Rendezvous(file=rendezvous, timeout_seconds=_JOIN_SECONDS)
            )
            check_collectives(links, worker)
            is_first = worker.stage == 0
            incoming, outgoing = ((), FIELDS) if is_first else (FIELDS, ())
            check_disagreement(links, worker)
            handoff = Handoff(links, worker, TOPOLOGY, incoming, outgoing, DTYPE)
            handoff.agree()
            if is_first:
                first_stage(handoff)
                report.send("done")
                os._exit(0)
            second_stage(handoff)
            try:
                handoff.receive(1)
            except WorkerDiedError:
                report.send("done")
            else:
                report.send("received from the dead")
            process_links.disconnect()
    except Exception as error:
        report.send(repr(error))
        raise


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stagecoach.pipeline.process_links"])
    started = []
    for worker in TOPOLOGY.workers:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(worker, tmp_path / "rendezvous", theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    yield started
    for process, ours in started:
        process.kill()
        process.join()
        ours.close()


def test_two_stages_of_two_ranks_over_gloo(
    processes: list[tuple[BaseProcess, Connection]],
) -> None:
    """Every field bit for bit, the stages' own collectives, and a dead neighbour is noticed."""
    for process, report in processes:
        assert wait([report, process.sentinel], timeout=_JOIN_SECONDS), "a worker hangs"
        assert report.poll(), f"a worker ended with status {process.exitcode}"
        assert report.recv() == "done"
    for process, _ in processes:
        process.join(_JOIN_SECONDS)
        assert process.exitcode == 0
