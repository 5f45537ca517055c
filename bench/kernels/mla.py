"""Latent attention and the drafter's block attention on a GPU: `check` and `time`.

`check` compares with the references on the CPU; `time` prints both forms of decoding beside the
limit: cache rows read once, or the products of the matrix units. E4M3 rows: `mla_fp8.py`.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor

from bench.kernels.mla_cases import check_cases
from bench.kernels.timing import Report, graph_time_us, limit_us, relative_error, run_command
from stagecoach.kernels.mla import cuda
from stagecoach.kernels.mla.split_cuda import SplitTile, split_tile
from stagecoach.kernels.quantization import FP8_DTYPE
from stagecoach.kernels.ragged import PackedGroup

PAGE_SIZE = 64


def check_case(case: Callable[[Report], None]) -> int:
    """One case in a process of its own, so that several compile at a time."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    report = Report()
    case(report)
    return report.exit_status


def run_check(report: Report) -> None:
    check_together(report, check_cases())


def check_together(report: Report, cases: Sequence[Callable[[Report], None]]) -> None:
    """Cases side by side, each in a process of its own."""
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(check_case, case) for case in cases]
        for number, job in enumerate(jobs):
            error = job.exception(timeout=100)
            if error is not None:
                print(f"FAIL  case {number}: {type(error).__name__} {str(error)[:400]}", flush=True)
            report.num_failed += error is not None or job.result() != 0


class DecodeShape(NamedTuple):
    """Requests of one context length, one window each."""

    requests: int
    context: int
    heads: int
    window: int
    is_fp8: bool = False

    @property
    def limit(self) -> float:
        rows = self.requests * self.window * self.heads
        value_bytes = 1 if self.is_fp8 else 2
        num_bytes = self.requests * self.context * 576 * value_bytes + rows * (576 + 512) * 2
        return limit_us(num_bytes, 2.0 * rows * self.context * (576 + 512))


class DecodeInputs(NamedTuple):
    q_THC: Tensor
    q_THP: Tensor
    cache_RD: Tensor
    groups: list[PackedGroup]  # of one shape, over other pages


def _decode_inputs(shape: DecodeShape) -> DecodeInputs:
    pages = shape.context // PAGE_SIZE
    num_bytes = shape.requests * shape.context * (576 if shape.is_fp8 else 1152)
    num_copies = max(1, min(8, -(-150_000_000 // num_bytes)))
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=generator, dtype=torch.bfloat16)

    num_tokens = shape.requests * shape.window
    groups = []
    for copy in range(num_copies):
        first = 1 + copy * shape.requests * pages
        table = first + torch.randperm(shape.requests * pages, device="cuda", generator=generator)
        arange_B = torch.arange(shape.requests + 1, dtype=torch.int32, device="cuda")
        full_B = torch.full_like(arange_B[1:], shape.context - shape.window)
        groups.append(
            PackedGroup(
                num_tokens=num_tokens,
                num_segments=shape.requests,
                max_length=shape.window,
                max_context=shape.context,
                max_replay=0,
                max_drafts=shape.window - 1,
                offsets_S=arange_B * shape.window,
                segment_T=arange_B[:-1].repeat_interleave(shape.window),
                starts_B=full_B,
                read_slots_B=arange_B[1:],
                write_slots_B=arange_B[1:],
                replay_B=arange_B[1:] * 0,
                num_drafts_B=full_B * 0 + shape.window - 1,
                first_pages_B=arange_B[:-1] * pages,
                pages_P=table.int(),
                block_size=PAGE_SIZE,
                num_context=shape.requests * shape.context,
            )
        )
    cache_RD = normal((1 + num_copies * shape.requests * pages) * PAGE_SIZE, 576)
    if shape.is_fp8:
        cache_RD = cache_RD.to(FP8_DTYPE)
    return DecodeInputs(
        normal(num_tokens, shape.heads, 512), normal(num_tokens, shape.heads, 64), cache_RD, groups
    )


def compile_decode(shape: DecodeShape) -> None:
    """In a process of its own, so that several compile at a time; the cache on disk keeps them."""
    inputs = _decode_inputs(shape._replace(context=PAGE_SIZE))
    group = inputs.groups[0]._replace(max_context=shape.context)
    cuda.mla_decode(inputs.q_THC, inputs.q_THP, inputs.cache_RD, group, 0.05, _triton_tile(shape))
    torch.cuda.synchronize()


def _triton_tile(shape: DecodeShape) -> SplitTile:
    return split_tile(shape.heads * shape.window, torch.bfloat16)


def _check_window(rows: int) -> float:
    """How far the CUDA form with `rows` query rows is from Triton's; in a process of its own."""
    inputs = _decode_inputs(DecodeShape(3, 1_024, rows, 1))
    call = (inputs.q_THC, inputs.q_THP, inputs.cache_RD, inputs.groups[0], 0.05)
    tile = split_tile(rows, torch.bfloat16)
    return relative_error(cuda.mla_decode(*call, None, rows), cuda.mla_decode(*call, tile))


# Where next to nothing but cached rows is read.
_LONG = DecodeShape(8, 131_072, 32, 1)
# Those of the first goals, then others. The CUDA form is timed with these query rows a block.
_HEADLINES = (
    (DecodeShape(8, 32_768, 32, 1), (32,)),
    (_LONG, (32,)),
    (DecodeShape(64, 1_024, 32, 1), (32,)),
    (DecodeShape(256, 1_024, 32, 1), (32,)),
    (DecodeShape(8, 32_768, 96, 1), (48, 32, 64)),
    (DecodeShape(8, 8_192, 32, 8), (64, 32)),
)
_TABLE = (
    (DecodeShape(1, 1_024, 32, 1), (32,)),
    (DecodeShape(8, 1_024, 32, 1), (32,)),
    (DecodeShape(1, 32_768, 32, 1), (32,)),
    (DecodeShape(1, 131_072, 32, 1), (32,)),
    (DecodeShape(64, 8_192, 32, 1), (32,)),
    (DecodeShape(8, 32_768, 12, 1), (32,)),
    (DecodeShape(8, 32_768, 24, 1), (32,)),
    (DecodeShape(1, 131_072, 96, 1), (48,)),
    (DecodeShape(64, 8_192, 96, 1), (48,)),
    (DecodeShape(8, 8_192, 12, 8), (48,)),
    (DecodeShape(8, 8_192, 96, 8), (64,)),
    (DecodeShape(1, 1_024, 32, 8), (64,)),
)


def time_decode(
    report: Report, shape: DecodeShape, window_rows: tuple[int, ...], *, has_triton: bool
) -> None:
    inputs = _decode_inputs(shape)
    forms: list[tuple[SplitTile | None, int | None]] = [(None, rows) for rows in window_rows]
    if has_triton:
        forms.append((_triton_tile(shape), None))
    for tile, rows in forms:
        calls = [
            lambda group=group, tile=tile, rows=rows: cuda.mla_decode(
                inputs.q_THC, inputs.q_THP, inputs.cache_RD, group, 0.05, tile, rows
            )
            for group in inputs.groups
        ]
        name = f"decode {shape.requests}x{shape.context} H{shape.heads} W{shape.window} "
        name += "E4M3 " if shape.is_fp8 else ""
        name += f"CUDA {rows}" if tile is None else f"Triton {tile.rows},{tile.positions}"
        microseconds = graph_time_us(calls, iterations=max(8, len(calls)), repeats=3)
        report.time(name, microseconds, shape.limit)
        if shape == _LONG and (tile, rows) == forms[0]:
            report.figure("decode_bandwidth_fraction", shape.limit / microseconds)


def time_rest(report: Report) -> None:
    weights_HNC = [
        torch.randn(32, 128, 512, device="cuda", dtype=torch.bfloat16) for _ in range(40)
    ]
    for num_tokens in (1, 8, 64, 256):
        limit = limit_us(32 * 128 * 512 * 2 + num_tokens * 32 * 640 * 2)
        x_THN = torch.randn(num_tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
        o_THC = torch.randn(num_tokens, 32, 512, device="cuda", dtype=torch.bfloat16)
        for name, x, weights in (
            ("keys", x_THN, weights_HNC),
            ("values", o_THC, [weight.mT for weight in weights_HNC]),
        ):
            for form, product in (
                ("own", cuda.head_product_few),
                ("library", lambda x, w, _: torch.bmm(x.transpose(0, 1), w)),
            ):
                if form == "library" or num_tokens <= 64:
                    calls = [lambda w=w, x=x, p=product: p(x, w, None) for w in weights]
                    report.time(
                        f"head product {name} T={num_tokens} {form}",
                        graph_time_us(calls, iterations=40, repeats=3),
                        limit,
                    )


class PrefillShape(NamedTuple):
    """Chunks of one length after prefixes of one length."""

    requests: int
    length: int
    start: int
    heads: int = 32

    @property
    def limit(self) -> float:
        seen = self.length * self.start + self.length * self.length / 2
        attention = 2.0 * self.requests * self.heads * seen * (192 + 128)
        context = self.requests * (self.start + self.length)
        return limit_us(0, attention + 2.0 * context * self.heads * 256 * 512)


_PREFILLS = (PrefillShape(1, 8_192, 0), PrefillShape(8, 1_024, 0))


def _prefill_call(shape: PrefillShape) -> Callable[[], Tensor]:
    decode = DecodeShape(shape.requests, shape.start + shape.length, 1, shape.length)
    inputs = _decode_inputs(decode)
    num_tokens = shape.requests * shape.length
    q_THD = torch.randn(num_tokens, shape.heads, 192, device="cuda", dtype=torch.bfloat16)
    kv_up_OC = torch.randn(shape.heads * 256, 512, device="cuda", dtype=torch.bfloat16) / 23
    group = inputs.groups[0]
    return lambda: cuda.mla_prefill(q_THD, inputs.cache_RD, kv_up_OC, group, 0.07, None)


def _compile_prefill(shape: PrefillShape) -> None:
    _prefill_call(shape)()
    torch.cuda.synchronize()


def time_prefill(report: Report) -> None:
    for shape in _PREFILLS:
        microseconds = graph_time_us(_prefill_call(shape), iterations=2, repeats=3)
        report.time(f"prefill {shape.requests}x{shape.length}", microseconds, shape.limit)


def run_time(report: Report) -> None:
    tiles = sorted({rows for _, window_rows in (*_HEADLINES, *_TABLE) for rows in window_rows})
    good = set()
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        checks = {rows: pool.submit(_check_window, rows) for rows in tiles}
        jobs = [pool.submit(compile_decode, shape) for shape, _ in _HEADLINES]
        jobs += [pool.submit(_compile_prefill, shape) for shape in _PREFILLS]
        for rows, check in checks.items():
            error = check.exception(timeout=60)
            if error is not None:
                print(f"CUDA {rows}: {type(error).__name__} {str(error)[:300]}", flush=True)
            elif check.result() < 1e-2:
                good.add(rows)
            else:
                print(f"CUDA {rows}: error {check.result():.2e} against Triton", flush=True)
        for job in jobs:
            error = job.exception(timeout=60)
            if error is not None:
                print(f"not compiled ahead: {str(error)[:90]}", flush=True)
    for cases, has_triton in ((_HEADLINES, True), (_TABLE, False)):
        for shape, window_rows in cases:
            right = tuple(rows for rows in window_rows if rows in good)
            time_decode(report, shape, right, has_triton=has_triton)
    time_prefill(report)
    time_rest(report)


if __name__ == "__main__":
    sys.exit(run_command("mla", __doc__, {"check": run_check, "time": run_time}))
