"""KDA windows: the convolution and the recurrence with replay.

python -m bench.kernels.kda_window check
python -m bench.kernels.kda_window time
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from bench.h200.peer import KDA_VERIFY_SNAPSHOTS_US
from bench.kernels.timing import (
    Report,
    graph_time_us,
    limit_us,
    num_rotations,
    relative_error,
    run_command,
)
from stagecoach.kernels.kda import KdaMemory
from stagecoach.kernels.kda.window_cuda import kda_windows, kda_windows_triton
from stagecoach.kernels.ragged import PackedGroup
from tests.kda_cases import Layer, errors_of, make_layer, mixed_cases, window_cases
from tests.packed_group import make_packed_group

Calls = list[Callable[[], object]]


def check(report: Report, device: str = "cuda") -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for case in (*window_cases(device), *mixed_cases(device)):
            torch.manual_seed(0)
            tolerance = 1e-5 if dtype == torch.float32 else 1.5e-2
            for what, error in errors_of(case, dtype, device).items():
                report.check(f"{str(dtype)[6:]} {case.name} {what}", error, tolerance)
    check_triton(report)
    print(f"{report.num_failed} failed")


def check_triton(report: Report) -> None:
    """The two kernels against each other, from the same inputs."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for width, replay in ((9, 3), (8, 7), (1, 0)):
            layer, group = _timed_layer(24, 32, width, replay, dtype=dtype)
            results = []
            for run in (kda_windows, kda_windows_triton):
                memory = KdaMemory(*(pool.clone() for pool in layer.memory))
                out_THV = torch.full_like(layer.inputs.decay_THK, torch.nan)
                run(layer.inputs, layer.weights, memory, group, out_THV)
                results.append((out_THV, memory.recurrent_SHVK, memory.record_SNHX))
            for name, ours, other in zip(("output", "states", "records"), *results, strict=True):
                error = relative_error(ours, other)
                name = f"{str(dtype)[6:]} both kernels, W={width} {name}"
                report.check(name, error, tolerance)


def _timed_layer(
    num_segments: int,
    num_heads: int,
    width: int,
    replay: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Layer, PackedGroup]:
    num_drafts = max(0, width - 1)
    group = make_packed_group(
        [width] * num_segments,
        [100] * num_segments,
        [replay] * num_segments,
        [num_drafts] * num_segments,
        device="cuda",
    ).packed
    layer = make_layer(
        num_segments * width,
        num_heads,
        dtype,
        num_slots=num_segments + 1,
        num_drafts=max(num_drafts, replay, 1),
    )
    return layer, group


def bytes_of_windows(num_segments: int, num_heads: int, width: int, replay: int) -> int:
    """What must move: states both ways, recorded rows, two projections in and the output."""
    state = 2 * 4 * 128 * 128
    record = 4 * 3 * 128 * (replay + width - 1)
    return num_segments * num_heads * (state + record + width * (3 * 2 * 128 + 2))


def bytes_of_convolution(num_segments: int, num_heads: int, width: int) -> int:
    """Channels and three rows of history in; those rows and the drafts' out; bfloat16."""
    rows = width + 3 + (3 + width - 1)
    return num_segments * 3 * 128 * num_heads * 2 * rows


def time(report: Report) -> None:
    shapes = (
        (16, 96, 8, 3),
        (16, 96, 1, 0),
        (64, 32, 1, 0),
        (256, 32, 1, 0),
        (1, 32, 1, 0),
        (64, 32, 8, 3),
        (1, 96, 8, 3),
        (8, 32, 1, 0),
    )
    verify_us = 0.0
    for num_segments, num_heads, width, replay in shapes:
        num_bytes = bytes_of_windows(num_segments, num_heads, width, replay)
        num_bytes += bytes_of_convolution(num_segments, num_heads, width)
        sets = []
        for _ in range(num_rotations(num_bytes // 2)):
            layer, group = _timed_layer(num_segments, num_heads, width, replay)
            sets.append((layer, group, torch.empty_like(layer.inputs.decay_THK)))
        name = f"{num_segments} x {num_heads} heads, W={width}, r={replay}"
        calls: Calls = [
            lambda layer=layer, group=group, out=out: kda_windows(*layer, group, out)
            for layer, group, out in sets
        ]
        limit = limit_us(num_bytes)
        microseconds = graph_time_us(calls)
        report.time(f"windows {name}", microseconds, limit)
        if (num_segments, width) == (16, 8):
            verify_us = microseconds
            report.figure("verify_bandwidth_fraction", limit / microseconds)
        del sets, calls
        torch.cuda.empty_cache()
    report.figure("verify_speedup_vs_fla", _time_fla(report) / verify_us)


def _time_fla(report: Report) -> float:
    """The same windows by flash-linear-attention, which keeps a state a token.

    Returns microseconds of 8 tokens: where it is not installed, what was measured elsewhere.
    """
    try:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ImportError as error:
        print(f"fla: {error}")
        return KDA_VERIFY_SNAPSHOTS_US
    times = {}
    for num_segments, num_heads, width in ((16, 96, 8), (16, 96, 1)):
        num_tokens = num_segments * width
        states = torch.randn(num_tokens + 1, num_heads, 128, 128, device="cuda")
        slots = (torch.arange(num_tokens, device="cuda").view(num_segments, width) + 1).int()
        q, k, v, g = (
            torch.randn(1, num_tokens, num_heads, 128, device="cuda", dtype=torch.bfloat16)
            for _ in range(4)
        )
        beta = torch.randn(1, num_tokens, num_heads, device="cuda", dtype=torch.bfloat16)
        offsets = (torch.arange(num_segments + 1, device="cuda") * width).int()
        accepted = torch.full((num_segments,), min(4, width), device="cuda", dtype=torch.int32)
        a_log = torch.rand(num_heads, device="cuda")
        bias = torch.randn(num_heads * 128, device="cuda")
        out = torch.empty_like(v)

        def run(
            tensors: tuple[Tensor, ...] = (q, k, v, g, beta),
            others: dict[str, object] = {  # noqa: B006
                "A_log": a_log,
                "dt_bias": bias,
                "initial_state": states,
                "cu_seqlens": offsets,
                "ssm_state_indices": slots,
                "num_accepted_tokens": accepted,
                "out": out,
            },
        ) -> None:
            fused_recurrent_kda_fwd(
                *tensors,
                **others,
                inplace_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=-5.0,
                state_v_first=True,
            )

        name = f"fla, {num_segments} x {num_heads} heads, W={width}"
        times[width] = graph_time_us(run)
        report.time(name, times[width])
    return times[8]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    actions = {"check": check, "time": time}
    sys.exit(run_command("kda_window", __doc__, actions))
