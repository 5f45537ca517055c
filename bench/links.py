"""Links between two GPUs: are they right, and what do they take?

    python -m bench.links            both
    python -m bench.links check      only the checks; exit status 1 where one fails

Starts two processes of its own for each layout, on the loopback interface, and ends them in any
case: after 40 seconds, and all within a minute. Times are medians; *us* is one call of both ranks
together.
"""

import argparse
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.kernels.timing import graph_time_us
from stagecoach.pipeline import peer_links, process_links
from stagecoach.pipeline.boundary import BoundaryField
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.peer_memory import PeerMemory, share_memory
from stagecoach.pipeline.rendezvous import Rendezvous
from stagecoach.pipeline.topology import Topology, WorkerId

_LAYOUT_SECONDS = 40
_ALL_SECONDS = 56
_HIDDEN = 7168
# Tokens x hidden size of a decode step.
_STEPS = ((1, 2304), (8, 2304), (64, 2304), (256, 2304), (64, _HIDDEN), (256, _HIDDEN))
_NVLINK_BYTES_PER_US = 400e3
_FIELDS = (
    BoundaryField(name="bank_TBH", row_shape=(2, _HIDDEN), final_after=0),
    BoundaryField(name="taps_TNH", row_shape=(3, _HIDDEN), final_after=1, columns=(0, 1, 2)),
    BoundaryField(name="hidden_TH", row_shape=(_HIDDEN,), final_after=2),
)
_TOKEN_COUNTS = (1, 64, 0, 3, 1000, 300, 8, 1, 8192, 64, 64, 5)


class Rank:
    """One process: its links, and what it reports."""

    def __init__(self, worker: WorkerId, links: Links, device: torch.device) -> None:
        self.worker = worker
        self.links = links
        self.device = device
        self.num_failed = 0

    def check(self, name: str, *, passed: bool) -> None:
        self.num_failed += not passed
        print(f"{'PASS' if passed else 'FAIL'}  rank {self.worker.rank}  {name}", flush=True)

    def say(self, line: str) -> None:
        if self.worker.rank == 0:
            print(line, flush=True)

    def random(self, seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The same on both ranks; whole numbers, whose sums are exact in bfloat16."""
        generator = torch.Generator(self.device).manual_seed(seed)
        whole = torch.randint(-99, 100, tuple(shape), generator=generator, device=self.device)
        return whole.to(dtype)


def check_collectives(rank: Rank) -> None:
    tensor_parallel = rank.links.tensor_parallel
    own = rank.worker.tp_rank
    sizes = (1, 7, 2304, 33 * 64, 64 * 2304, 64 * 2304 + 3, 256 * _HIDDEN, 4_000_000)
    for dtype in (torch.bfloat16, torch.float32):
        num_wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
        for turn in range(80):
            size = sizes[turn % len(sizes)]
            parts = [rank.random(100 * turn + other, (size,), dtype) for other in (0, 1)]
            if turn % 3 == own:
                torch.cuda._sleep(200_000)
            total = tensor_parallel.all_reduce(parts[own].clone())
            num_wrong += (total != parts[0] + parts[1]).sum()
        rank.check(f"all-reduce, 80 messages of 1 to 4,000,000 {dtype}", passed=not int(num_wrong))
    for shape, dim, dtype in (
        ((8, 4096), -1, torch.bfloat16),
        ((3, 2, 5), 1, torch.float32),
        ((5,), 0, torch.int64),
        ((256, 81_920), -1, torch.bfloat16),
    ):
        parts = [rank.random(7 + other, shape, dtype) for other in (0, 1)]
        joined = tensor_parallel.all_gather(parts[own].clone(), dim)
        passed = torch.equal(joined, torch.cat(parts, dim))
        rank.check(f"all-gather of {shape} {dtype} along {dim}", passed=passed)
        given = tensor_parallel.broadcast(parts[own].clone())
        rank.check(f"broadcast of {shape} {dtype}", passed=torch.equal(given, parts[0]))


def check_captured_collectives(rank: Rank) -> None:
    """Small and large ones in one graph, an odd number, with eager ones between its replays."""
    tensor_parallel, own = rank.links.tensor_parallel, rank.worker.tp_rank
    sizes = (2304, 64 * 2304, 5, 4_000_000, 64 * 2304)
    inputs = [torch.zeros(size, device=rank.device) for size in sizes]

    def run() -> list[Tensor]:
        return [tensor_parallel.all_reduce(tensor * 1) for tensor in inputs]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = run()
    num_wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    for turn in range(20):
        parts = [
            [rank.random(9000 + 100 * turn + 10 * other + index, (size,), torch.float32)
             for index, size in enumerate(sizes)]
            for other in (0, 1)
        ]  # fmt: skip
        for tensor, part in zip(inputs, parts[own], strict=True):
            tensor.copy_(part)
        graph.replay()
        for index, output in enumerate(outputs):
            num_wrong += (output != parts[0][index] + parts[1][index]).sum()
        if turn % 2:
            num_wrong += (tensor_parallel.all_reduce(inputs[0] * 1) != outputs[0]).sum()
    rank.check("all-reduce captured, 20 replays", passed=not int(num_wrong))
    graph.reset()


def time_collectives(rank: Rank) -> None:
    exchange = peer_links_of(rank)
    group = dist.new_group([0, 1])
    rank.say("\nall-reduce, bfloat16                     peer us  NCCL us  bytes at 400 GB/s us")
    for tokens, hidden in _STEPS:
        tensors = [
            torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=rank.device) for _ in range(4)
        ]
        peer_us = None
        if exchange is not None and exchange.takes(tensors[0]):
            peer_us = together(lambda tensors=tensors: graph_time_us(
                [lambda x=x: exchange.all_reduce(x) for x in tensors]))  # fmt: skip
        nccl_us = together(lambda tensors=tensors: graph_time_us(
            [lambda x=x: dist.all_reduce(x, group=group) for x in tensors]))  # fmt: skip
        limit = tensors[0].nbytes / _NVLINK_BYTES_PER_US
        peer = "      -" if peer_us is None else f"{peer_us:7.2f}"
        rank.say(f"  in a graph, {tokens:4} x {hidden:5}  {tensors[0].nbytes:9} B"
                 f"  {peer}  {nccl_us:7.2f}  {limit:6.2f}")  # fmt: skip
    x = torch.zeros(1, 2304, dtype=torch.bfloat16, device=rank.device)
    if exchange is not None:
        rank.say(f"  eager, 1 x 2304: peer {eager_us(lambda: exchange.all_reduce(x)):.2f} us")
    eager = eager_us(lambda: dist.all_reduce(x, group=group))
    rank.say(f"  eager, 1 x 2304: NCCL {eager:.2f} us")
    if exchange is not None:
        time_cuts(rank, exchange)
    logits = torch.zeros(8, 81_920, dtype=torch.bfloat16, device=rank.device)
    gathered = graph_time_us(lambda: rank.links.tensor_parallel.all_gather(logits, -1))
    parts = torch.empty(2, 8, 81_920, dtype=torch.bfloat16, device=rank.device)
    nccl = graph_time_us(
        lambda: dist.all_gather_into_tensor(parts.view(-1), logits.view(-1), group=group)
    )
    rank.say(f"  all-gather of 8 x 81920 a rank, joined: {gathered:.2f} us; NCCL alone {nccl:.2f}")


def time_cuts(rank: Rank, exchange: peer_links.StageExchange) -> None:
    """Word by word and in parts, with other cuts than those in use."""
    chosen = peer_links._NUM_WARPS, peer_links._TILE_BYTES
    chosen_words = peer_links._WORD_WARPS, peer_links._WORD_TILE
    limit = exchange.word_limit
    names = "  ".join(f"{tokens:3}x{hidden:4}" for tokens, hidden in _STEPS)
    rank.say(f"  us of                        {names}")

    def line(name: str, max_bytes: int) -> None:
        times = []
        for tokens, hidden in _STEPS:
            tensors = [
                torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=rank.device)
                for _ in range(4)
            ]
            calls = [lambda x=x: exchange.all_reduce(x) for x in tensors]
            fits = tensors[0].nbytes <= max_bytes
            times.append(f"{graph_time_us(calls):8.2f}" if fits else " " * 8)
        rank.say(f"  {name:<28} {'  '.join(times)}")

    exchange.word_limit = 0
    for num_warps, tile_bytes in ((8, 4096), (16, 8192), (16, 16384)):
        peer_links._NUM_WARPS, peer_links._TILE_BYTES = num_warps, tile_bytes
        line(f"parts, {num_warps} warps, tiles {tile_bytes} B", exchange.max_bytes)
    peer_links._NUM_WARPS, peer_links._TILE_BYTES = chosen
    exchange.word_limit = peer_links.MAX_WORD_BYTES
    for num_warps, tile in ((2, 256), (4, 512), (8, 1024), (8, 2048)):
        peer_links._WORD_WARPS, peer_links._WORD_TILE = num_warps, tile
        line(f"words, {num_warps} warps, tiles {tile * 4} B", exchange.word_limit)
    peer_links._WORD_WARPS, peer_links._WORD_TILE = chosen_words
    exchange.word_limit = limit


def check_handoff(rank: Rank, topology: Topology) -> None:
    """Stage 0 runs ahead and rewrites what it sent; stage 1 is late."""
    dtype, is_first = torch.bfloat16, rank.worker.stage == 0
    incoming, outgoing = ((), _FIELDS) if is_first else (_FIELDS, ())
    handoff = Handoff(rank.links, rank.worker, topology, incoming, outgoing, dtype)
    handoff.agree()

    def tensors_of(step: int) -> dict[str, Tensor]:
        shape = (_TOKEN_COUNTS[step % len(_TOKEN_COUNTS)],)
        return {
            field.name: rank.random(10 * step + index, (*shape, *field.row_shape), dtype)
            for index, field in enumerate(_FIELDS)
        }

    num_wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    for step in range(2 * len(_TOKEN_COUNTS)):
        handoff.begin_step(step)
        tensors = tensors_of(step)
        if not is_first:
            if step % 3 == 0:
                torch.cuda._sleep(2_000_000)
            received = handoff.receive(len(tensors["hidden_TH"]))
            for name, tensor in tensors.items():
                num_wrong += (received[name] != tensor).sum()
        elif step % 2:
            for layer in range(3):
                handoff.send_final(layer, tensors.__getitem__)
        else:
            handoff.send_all(tensors.__getitem__)
            for tensor in tensors.values():
                tensor.fill_(float("nan"))
    handoff.finish()
    torch.cuda.synchronize()
    if not is_first:
        rank.check(f"hand-off, {2 * len(_TOKEN_COUNTS)} steps", passed=not int(num_wrong))


def time_hops(rank: Rank) -> None:
    """Half of a way there and back, so that both clocks are one."""
    world = dist.new_group([0, 1], backend="nccl")
    memory = share_memory(peer_links.RegionLayout(1).num_bytes, rank.device)
    rank.say("\none way, half of there and back             peer us  eager us  NCCL us")
    for num_bytes in (4096, 16384, 262_144, 1 << 20, 4 << 20, 16 << 20, 64 << 20):
        tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=rank.device)
        graph_us = peer_us = None
        if memory is not None and num_bytes <= peer_links.MAX_HOP_BYTES:
            bounce = peer_bounce(rank, memory, tensor)
            graph_us = together(lambda bounce=bounce: graph_time_us(bounce) / 2)
            peer_us = eager_us(bounce) / 2

        def nccl_bounce(tensor: Tensor = tensor) -> None:
            for sender in (0, 1):
                if rank.worker.rank == sender:
                    work = dist.isend(tensor, dst=1 - sender, group=world)
                else:
                    work = dist.irecv(tensor, src=sender, group=world)
                assert work is not None
                work.wait()

        nccl_us = eager_us(nccl_bounce) / 2
        figures = "".join(
            "        -" if us is None else f"{us:9.2f}" for us in (graph_us, peer_us, nccl_us)
        )
        rank.say(f"  {num_bytes:9} B                            {figures}")


def peer_bounce(rank: Rank, memory: PeerMemory, tensor: Tensor) -> Callable[[], None]:
    """A message to the other rank and one back, with ends of its own for each size."""
    layout = peer_links.RegionLayout(1)
    ends = BOUNCE_ENDS.get(memory)
    if ends is None:
        other = 1 - rank.worker.rank
        ends = BOUNCE_ENDS[memory] = (
            peer_links.HopSender(memory, other, layout),
            peer_links.HopReceiver(memory, other, layout),
        )
    sender, receiver = ends

    def bounce() -> None:
        if rank.worker.rank == 0:
            sender.send(tensor)
            receiver.receive(tensor)
        else:
            receiver.receive(tensor)
            sender.send(tensor)

    return bounce


BOUNCE_ENDS: dict[PeerMemory, tuple[peer_links.HopSender, peer_links.HopReceiver]] = {}


def peer_links_of(rank: Rank) -> peer_links.StageExchange | None:
    exchange = getattr(rank.links.tensor_parallel, "_exchange", None)
    assert exchange is None or isinstance(exchange, peer_links.StageExchange)
    return exchange


def together(measure: Callable[[], float]) -> float:
    """Start on both ranks at once."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    return measure()


def eager_us(call: Callable[[], object], calls: int = 50) -> float:
    """Microseconds a call, launched one by one from Python."""

    def measure() -> float:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e6 / calls)
        return sorted(times)[1]

    call()
    return together(measure)


def run_rank(
    rank_id: int, topology: Topology, rendezvous: Path, *, measures: bool, seconds: float
) -> None:
    """A process of its own; one that hangs says where."""
    faulthandler.dump_traceback_later(max(1.0, seconds - 2))
    began = time.perf_counter()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = topology.worker(rank_id)
    device = torch.device("cuda", rank_id)
    torch.cuda.set_device(device)
    torch.set_num_threads(1)
    links = process_links.connect(
        worker, topology, Rendezvous(file=rendezvous, timeout_seconds=seconds), device
    )
    rank = Rank(worker, links, device)
    rank.say(f"\n{topology}: connected after {time.perf_counter() - began:.1f} s")
    with torch.inference_mode():
        if topology.tp_size > 1:
            check_collectives(rank)
            check_captured_collectives(rank)
            if measures:
                time_collectives(rank)
        else:
            check_handoff(rank, topology)
            if measures:
                time_hops(rank)
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    process_links.disconnect()
    rank.say(f"disconnected in {time.perf_counter() - began:.1f} s")
    sys.stdout.flush()
    os._exit(1 if rank.num_failed else 0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "run by main"
    parent.join()
    os._exit(1)


def run_layout(topology: Topology, *, measures: bool, seconds: float = _LAYOUT_SECONDS) -> bool:
    """Whether both processes ended well in time."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=run_rank,
                args=(rank, topology, Path(folder) / "rendezvous"),
                kwargs={"measures": measures, "seconds": seconds},
            )
            for rank in range(topology.num_workers)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes):
                time.sleep(5)  # the other ends too, or hangs without it
                break
            time.sleep(0.05)
        for process in processes:
            if process.is_alive():
                print(f"FAIL  {topology}: a rank hangs or lost its neighbour", flush=True)
                process.kill()
            process.join()
        return all(process.exitcode == 0 for process in processes)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=("check", "time", "all"), default="all")
    what = parser.parse_args().what
    if torch.cuda.device_count() < 2:
        print("needs two GPUs")
        return 1
    # Read by the libraries of the processes that are started below.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    layouts = (Topology(num_stages=1, tp_size=2), Topology(num_stages=2, tp_size=1))
    end = time.monotonic() + _ALL_SECONDS
    passed = []
    for topology in layouts:
        seconds = min(_LAYOUT_SECONDS, end - time.monotonic())
        passed.append(run_layout(topology, measures=what != "check", seconds=seconds))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
