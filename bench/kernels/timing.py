"""How a kernel is timed on a GPU, and what it is held against.

A graph of many calls is replayed, so that launches from the host cost nothing; the calls rotate
over inputs that together are larger than the L2 cache.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.h200.parts import write_part

# Measured on an H200: device copy, bytes read + written; the product of two 8192 x 8192 bf16.
COPY_BYTES_PER_US = 4.25e6
BF16_FLOPS_PER_US = 790e6
L2_BYTES = 50 * 2**20


def graph_time_us(
    fn: Callable[[], object] | Sequence[Callable[[], object]],
    iterations: int = 20,
    repeats: int = 5,
) -> float:
    """Microseconds of one call, the median over replays of a graph of `iterations` calls.

    Args:
        fn: what is timed; of several, called in turn, each has inputs of its own. It must be
            capturable: no wait for the device, every shape the same in each call.
        iterations: calls in the graph.
        repeats: replays that are timed.
    """
    calls = [fn] if callable(fn) else list(fn)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and warms up
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(iterations):
            calls[index % len(calls)]()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / iterations)
    graph.reset()
    return sorted(times)[len(times) // 2]


def num_rotations(num_bytes: int, most: int = 8) -> int:
    """How many input sets of `num_bytes` each are needed so that no call finds its own in L2."""
    return max(1, min(most, -(-3 * L2_BYTES // max(1, num_bytes))))


def limit_us(num_bytes: float = 0.0, num_flops: float = 0.0) -> float:
    """The least time for moving `num_bytes` and doing `num_flops` bf16 operations."""
    return max(num_bytes / COPY_BYTES_PER_US, num_flops / BF16_FLOPS_PER_US)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference|| in float64; infinite where one has a NaN."""
    reference = reference.double()
    difference = value.to(reference.device).double() - reference
    error = float(difference.norm() / reference.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


class Report:
    """Lines of a check or a table, printed as they come: what failed, and what was timed."""

    def __init__(self) -> None:
        self.num_failed = 0
        self.rows: list[dict[str, Any]] = []
        self.figures: dict[str, float] = {}

    def check(self, name: str, error: float, tolerance: float) -> None:
        """One line a case: PASS where `error` is at most `tolerance`."""
        passed = error <= tolerance
        self.num_failed += not passed
        verdict = "PASS" if passed else "FAIL"
        print(f"{verdict}  {name:<56} error {error:.2e}  tolerance {tolerance:.0e}", flush=True)

    def time(self, name: str, microseconds: float, limit: float | None = None) -> None:
        """One line of a table; `limit` in microseconds."""
        against = (
            "" if limit is None else f"  limit {limit:9.2f}  fraction {limit / microseconds:.3f}"
        )
        print(f"{name:<60} us {microseconds:9.2f}{against}", flush=True)
        fraction = None if limit is None else limit / microseconds
        self.rows.append(
            {"name": name.strip(), "us": microseconds, "limit us": limit, "fraction": fraction}
        )

    def figure(self, name: str, value: float) -> None:
        """A headline figure beside the table."""
        print(f"{name} {value:.3f}", flush=True)
        self.figures[name] = value

    def write(self, folder: Path, name: str) -> None:
        """The table and the figures as the part `kernels-<name>`."""
        write_part(folder, f"kernels-{name}", {**self.figures, "rows": self.rows})

    @property
    def exit_status(self) -> int:
        return 1 if self.num_failed else 0


def run_command(
    name: str, description: str | None, actions: Mapping[str, Callable[[Report], object]]
) -> int:
    """The command line of `bench/kernels/<name>.py`; returns its exit status.

    What was timed before an interruption is kept.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.kernels.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=actions)
    parser.add_argument(
        "--out", type=Path, help=f"folder for what was timed, as kernels-{name}.json"
    )
    arguments = parser.parse_args()
    report = Report()
    try:
        actions[arguments.action](report)
    finally:
        if arguments.out is not None and report.rows:
            report.write(arguments.out, name)
    return report.exit_status
