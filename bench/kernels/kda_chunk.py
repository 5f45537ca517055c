"""The chunked form of KDA on a GPU: `check` against the reference, `time` against the limit.

`check` also compares errors with those of fla's `chunk_kda` on the same inputs, where fla can be
imported; `fla` takes its time.
"""

import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from bench.kernels.timing import Report, graph_time_us, limit_us, run_command
from stagecoach.kernels.kda.chunk_cuda import ChunkTiles
from tests.kda_chunk_cases import (
    CASES,
    ChunkCase,
    Drawn,
    compare,
    draw,
    relative_error,
    run_device,
    run_reference,
)
from tests.packed_group import GroupPair

_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
_REAL_DIM = 128
_FLA_SECONDS = 20

_TIMED = {
    "8192 tokens, 32 heads": ChunkCase(
        lengths=(8192,), num_heads=32, head_dim=_REAL_DIM, lower_bound=None
    ),
    "8192 tokens, 96 heads, bound": ChunkCase(lengths=(8192,), num_heads=96, head_dim=_REAL_DIM),
    "64 x 128 tokens, 32 heads": ChunkCase(
        lengths=(128,) * 64, num_heads=32, head_dim=_REAL_DIM, lower_bound=None
    ),
    "4 x 2048 tokens, 32 heads": ChunkCase(
        lengths=(2048,) * 4, num_heads=32, head_dim=_REAL_DIM, lower_bound=None
    ),
    "1024 tokens, 32 heads, saves": ChunkCase(
        lengths=(1024,),
        num_heads=32,
        head_dim=_REAL_DIM,
        lower_bound=None,
        saves=((0, 500, 5), (0, 512, 6), (0, 1024, 7)),
    ),
    "256 x 8 tokens, 32 heads": ChunkCase(
        lengths=(8,) * 256, num_heads=32, head_dim=_REAL_DIM, lower_bound=None
    ),
}

# Where candidates are compared, since each costs its compilation.
_SCANS = (
    ChunkTiles(products_warps=4, scan_block_v=32, scan_warps=4, scan_stages=3),
    ChunkTiles(products_warps=4, scan_block_v=64, scan_warps=4, scan_stages=3),
)
_COMPARED = {
    "8192 tokens, 32 heads": _SCANS,
    "4 x 2048 tokens, 32 heads": _SCANS,
    "64 x 128 tokens, 32 heads": _SCANS,
}


def _fla_chunk_kda() -> Callable[..., Any] | None:
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        print(f"without fla: {error}")
        return None
    return chunk_kda


class _TookLong(BaseException):
    """No `Exception`, which Triton would wrap in one of its own on the way."""


@contextmanager
def _no_longer_than(seconds: int) -> Iterator[None]:
    """Gives up, with a line, what takes longer: fla tries many tiles of each kernel."""

    def give_up(*_: object) -> None:
        raise _TookLong(f"fla took more than {seconds} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    except _TookLong as error:
        print(error)
    finally:
        signal.alarm(0)


def _fla_call(
    chunk_kda: Callable[..., Any], case: ChunkCase, drawn: Drawn
) -> Callable[[], tuple[Tensor, Tensor]]:
    """fla on the inputs of one segment: queries already scaled, keys normalised, raw gate.

    Rates are passed through a sigmoid first; it is not timed.
    """
    arguments = {
        "g": drawn.decay_THK[None],
        "beta": drawn.beta_TH.float().sigmoid()[None],
        "A_log": drawn.a_log_H,
        "dt_bias": drawn.dt_bias_HK.flatten(),
        "scale": 1.0,
        "initial_state": torch.zeros_like(drawn.state_SHVK[:1]),
        "output_final_state": True,
        "use_gate_in_kernel": True,
        "state_v_first": True,
    }
    if case.lower_bound is not None:
        arguments |= {"safe_gate": True, "lower_bound": case.lower_bound}
    q, k, v = (x[None] for x in (drawn.q_THK, drawn.k_THK, drawn.v_THV))

    def call() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return chunk_kda(q, k, v, **arguments)

    return call


def _check_against_fla(report: Report, chunk_kda: Callable[..., Any]) -> None:
    """Both in bfloat16 against the reference in float64; ours may not be the worse."""
    for lower_bound in (None, -5.0):
        case = ChunkCase(lengths=(448,), num_heads=2, head_dim=_REAL_DIM, lower_bound=lower_bound)
        pair = case.make_group("cuda")
        drawn = draw(case, pair, torch.bfloat16, "cuda", seed=7)
        wide = drawn._replace(
            state_SHVK=drawn.state_SHVK.double(), record_SNHX=drawn.record_SNHX.double()
        )
        wide = Drawn(*(x.cpu().clone() for x in wide))
        expected_THV = run_reference(case, wide, pair, torch.float64)
        fla_o, fla_state = _fla_call(chunk_kda, case, drawn)()
        o_THV = run_device(case, drawn, pair)
        name = f"bound {lower_bound}: {{}} against fla's error"
        fla_error = relative_error(fla_o[0].cpu(), expected_THV)
        report.check(
            name.format("output"), relative_error(o_THV.cpu(), expected_THV), 1.05 * fla_error
        )
        fla_error = relative_error(fla_state[0].cpu(), wide.state_SHVK[1])
        ours = relative_error(drawn.state_SHVK[1].cpu(), wide.state_SHVK[1])
        report.check(name.format("state"), ours, 1.05 * fla_error)
        print(f"      fla's errors: state {fla_error:.2e}")


def check(report: Report) -> None:
    """Every case at both types."""
    for dtype, tolerance in _TOLERANCES.items():
        for name, case in CASES.items():
            for head_dim in (64, _REAL_DIM):
                case = dataclasses.replace(case, head_dim=head_dim, num_heads=4)
                _check_case(report, f"{name}, {head_dim}", case, dtype, tolerance)
        long = ChunkCase(lengths=(1000, 3, 640), head_dim=_REAL_DIM, lower_bound=None)
        _check_case(report, "long", long, dtype, tolerance)
        _check_case(
            report, "head dim 16", ChunkCase(lengths=(70, 9), head_dim=16), dtype, tolerance
        )
    chunk_kda = _fla_chunk_kda()
    if chunk_kda is not None:

        def only_first(tuner: Autotuner, *_: object) -> list[Any]:
            return tuner.configs[:1]

        with _no_longer_than(_FLA_SECONDS), patch.object(Autotuner, "prune_configs", only_first):
            _check_against_fla(report, chunk_kda)


def _check_case(
    report: Report, name: str, case: ChunkCase, dtype: torch.dtype, tolerance: float
) -> None:
    errors = compare(case, dtype, "cuda")
    worst = max(errors.output, errors.state)
    error = float("inf") if errors.touched or worst != worst else worst
    report.check(f"{name}, {str(dtype)[6:]}", error, tolerance)


def _limit_us(case: ChunkCase, pair: GroupPair) -> float:
    """Each input read once, the output and the states moved once."""
    num_values = pair.num_real_tokens * case.num_heads * case.head_dim
    state_bytes = 2 * 4 * len(case.lengths) * case.num_heads * case.head_dim**2
    return limit_us(num_bytes=5 * 2 * num_values + state_bytes)


def time_all(report: Report) -> None:
    """The chosen tiles at every shape, others at some, and the kernels apart."""
    for name, case in _TIMED.items():
        _time_case(report, name, case)


def time_fla(report: Report) -> None:
    """fla tries many tiles of each kernel first, which takes about a minute."""
    chunk_kda = _fla_chunk_kda()
    if chunk_kda is not None:
        with _no_longer_than(3 * _FLA_SECONDS):
            _time_fla(report, chunk_kda)


def _time_case(report: Report, name: str, case: ChunkCase) -> None:
    pair = case.make_group("cuda")
    sets = [draw(case, pair, torch.bfloat16, "cuda", seed) for seed in range(2)]
    for tiles in (None, *_COMPARED.get(name, ())):
        calls = [
            lambda drawn=drawn, tiles=tiles: run_device(case, drawn, pair, tiles) for drawn in sets
        ]
        microseconds = graph_time_us(calls, iterations=4, repeats=5)
        label = "chosen" if tiles is None else "/".join(map(str, tiles))
        report.time(f"{name}, {label}", microseconds, _limit_us(case, pair))
    _profile(lambda: run_device(case, sets[0], pair))
    _time_launches(name, lambda: run_device(case, sets[0], pair))


def _profile(call: Callable[[], object]) -> None:
    """Microseconds of each kernel."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.device_time:
            print(f"    {event.key[:50]:<52} {event.device_time:9.1f} us, {event.count} calls")


def _time_launches(name: str, call: Callable[[], object]) -> None:
    """What a call costs the host, which matters where kernels are short."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        call()
    host_us = (time.perf_counter() - start) / 20 * 1e6
    torch.cuda.synchronize()
    print(f"    {name}: {host_us:.0f} us of the host a call")


def _time_fla(report: Report, chunk_kda: Callable[..., Any]) -> None:
    """Calls one after another, since fla's are not captured; no timing where it tunes long."""
    for name in ("8192 tokens, 32 heads", "8192 tokens, 96 heads, bound"):
        case = _TIMED[name]
        pair = case.make_group("cuda")
        call = _fla_call(chunk_kda, case, draw(case, pair, torch.bfloat16, "cuda", 0))
        call()
        _profile(call)
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(4):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / 4)
        report.time(f"fla chunk_kda: {name}", sorted(times)[2], _limit_us(case, pair))


if __name__ == "__main__":
    actions = {"check": check, "time": time_all, "fla": time_fla}
    sys.exit(run_command("kda_chunk", __doc__, actions))
