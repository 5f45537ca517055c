"""Products with E4M3 matrices on a GPU: `python -m bench.kernels.fp8 ACTION`.

`check` compares them with the reference, `time` gives their figures beside the limit and those of
bfloat16, in the sizes of Kimi-K3 over eight ranks, of Kimi-Linear, and whole.
"""

import math
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import TritonError

from bench.kernels.compiling import compile_together
from bench.kernels.timing import (
    BF16_FLOPS_PER_US,
    Report,
    graph_time_us,
    limit_us,
    num_rotations,
    relative_error,
    run_command,
)
from stagecoach.kernels.linear import fp8_cuda, grouped_linear, linear, reference
from stagecoach.kernels.linear.fp8_cuda import Fp8Tiles, Fp8VectorTiles
from stagecoach.kernels.quantization import FP8_DTYPE, Fp8Weight, quantize_fp8
from stagecoach.kernels.quantization.cuda import quantize_rows

# Outputs, inputs.
SIZES = [
    (7168, 1536),
    (1536, 7168),
    (2304, 1536),
    (2304, 4096),
    (12_576, 2304),
    (10_752, 7168),
]
ODD_SIZES = [(37, 72), (130, 200), (50, 1030)]
VECTOR_CUTS = [Fp8VectorTiles(*cut) for cut in ((8, 2), (4, 4), (2, 4), (4, 2), (8, 4))]
CUTS = [
    Fp8Tiles(16, 64, 128, 1, 4, 4),
    Fp8Tiles(16, 64, 128, 2, 4, 4),
    Fp8Tiles(16, 64, 128, 4, 4, 4),
    Fp8Tiles(16, 64, 256, 2, 4, 3),
    Fp8Tiles(16, 32, 256, 2, 4, 4),
    Fp8Tiles(16, 128, 128, 4, 8, 4),
]


def draw(num_outputs: int, num_inputs: int) -> Fp8Weight:
    return quantize_fp8(torch.randn(num_outputs, num_inputs, device="cuda"))


def check(report: Report) -> None:
    check_rows(report)
    for dtype, tolerance in ((torch.bfloat16, 4e-3), (torch.float32, 2e-6)):
        for num_outputs, num_inputs in (*ODD_SIZES, *SIZES[:5]):
            weight = draw(num_outputs, num_inputs)
            for num_rows in (1, 5, 16, 64, 100, 300):
                x_TI = torch.randn(num_rows, num_inputs + 8, device="cuda").to(dtype)
                x_TI = x_TI[:, :num_inputs]
                expected_TO = expected_product(x_TI, weight)
                torch.empty(2**24, device="cuda").fill_(math.nan)
                name = f"{num_rows} x {num_outputs} x {num_inputs}, {dtype}"
                report.check(name, relative_error(linear(x_TI, weight), expected_TO), tolerance)
    weight_GOI = quantize_fp8(torch.randn(2, 96, 128, device="cuda"))
    x_TGI = torch.randn(3, 2, 128, device="cuda").bfloat16()
    on_cpu = Fp8Weight(*(part.cpu() for part in weight_GOI))
    expected_GTO = reference.grouped_linear(x_TGI.float().cpu(), on_cpu)
    report.check("groups", relative_error(grouped_linear(x_TGI, weight_GOI), expected_GTO), 4e-3)
    check_cuts(report)


def expected_product(x_TI: Tensor, weight: Fp8Weight) -> Tensor:
    """In float64, from activations quantised as in the reference.

    On the CPU: on a GPU torch multiplies by a rounded 1 / 448.
    """
    quantized_TI, factors_T = (part.cuda() for part in quantize_fp8(x_TI.cpu()))
    product_TO = quantized_TI.double() @ weight.weight.double().t()
    return product_TO * factors_T.double()[:, None] * weight.scale.double()


def check_rows(report: Report) -> None:
    """Rounding to nearest, ties to even, at every size of a row."""
    for dtype in (torch.bfloat16, torch.float32):
        for num_columns in (1, 72, 1536, 7168, 20_000):
            sizes = torch.logspace(-9, 9, 33, device="cuda")[:, None]
            x_TI = (torch.randn(33, num_columns, device="cuda") * sizes).to(dtype)
            x_TI[-1] = 0
            expected = quantize_fp8(x_TI.cpu())
            values_TI, factors_T = (part.cpu() for part in quantize_rows(x_TI))
            is_other = values_TI.float() != expected.weight.float()
            num_other = is_other.sum().item() + (factors_T != expected.scale).sum().item()
            report.check(f"rows of {num_columns}, {dtype}", num_other, 0.0)
    x_TI = torch.randn(3, 100, device="cuda").bfloat16()
    x_TI[1, 7] = math.nan
    for num_rows in (3, 100):
        weight = draw(64, 100)
        out_TO = linear(x_TI.repeat(num_rows // 3, 1), weight)
        is_nan = out_TO.isnan().view(-1, 3, 64).float().mean((0, 2)).tolist()
        report.check("a row that is no number", float(is_nan != [0.0, 1.0, 0.0]), 0.0)
    is_nan = linear(x_TI[1:2], draw(64, 100)).isnan().float().mean().item()
    report.check("one row that is no number", 1.0 - is_nan, 0.0)


def check_cuts(report: Report) -> None:
    weight = draw(1000, 2304)
    x_TI = torch.randn(16, 2304, device="cuda").bfloat16()
    calls: list[Callable[[], Tensor]] = [
        partial(fp8_cuda.by_blocks, x_TI, weight, tiles) for tiles in CUTS
    ]
    calls += [partial(fp8_cuda.one_row, x_TI[:1], weight, tiles) for tiles in VECTOR_CUTS]
    names = [f"16 rows, {tuple(tiles)}" for tiles in CUTS]
    names += [f"1 row, {tuple(tiles)}" for tiles in VECTOR_CUTS]
    expected_TO = expected_product(x_TI, weight)
    failures = compile_together(calls)
    for name, call, failure in zip(names, calls, failures, strict=True):
        if failure:
            print(f"{name}: {failure}", flush=True)
            report.check(name, math.inf, 4e-3)
        else:
            out_TO = call()
            report.check(name, relative_error(out_TO, expected_TO[: len(out_TO)]), 4e-3)


def weights_of(num_outputs: int, num_inputs: int) -> list[Fp8Weight]:
    """Matrices of a product, together larger than the L2 cache."""
    return [
        Fp8Weight(
            torch.randn(num_outputs, num_inputs, device="cuda").to(FP8_DTYPE),
            torch.rand(num_outputs, device="cuda"),
        )
        for _ in range(num_rotations(num_outputs * num_inputs, most=32))
    ]


def time(report: Report) -> None:
    calls: list[Callable[[], Tensor]] = []
    for num_outputs, num_inputs in SIZES:
        weight = draw(num_outputs, num_inputs)
        x_TI = torch.randn(64, num_inputs, device="cuda").bfloat16()
        calls += [partial(fp8_cuda.one_row, x_TI[:1], weight, tiles) for tiles in VECTOR_CUTS]
        calls += [partial(linear, x_TI[:rows], weight) for rows in (1, 8, 32, 64)]
    compile_together(calls)
    for num_rows in (1, 8, 16, 64, 256, 8192):
        for sizes in SIZES:
            time_product(report, num_rows, *sizes)


def time_product(report: Report, num_rows: int, num_outputs: int, num_inputs: int) -> None:
    weights = weights_of(num_outputs, num_inputs)
    x_TI = torch.randn(num_rows, num_inputs, device="cuda").bfloat16()
    limit = max(
        limit_us(num_outputs * num_inputs + 2 * num_rows * (num_inputs + num_outputs)),
        num_rows * num_outputs * num_inputs / BF16_FLOPS_PER_US,  # at twice bfloat16's rate
    )
    products: dict[str, Callable[[Fp8Weight], Tensor]] = {"linear": partial(linear, x_TI)}
    if num_rows == 1:
        for cut in VECTOR_CUTS:
            products[str(tuple(cut))] = partial(_one_row, x_TI, cut)
    elif num_rows in (8, 16):
        for tiles in CUTS:
            products[str(tuple(tiles))] = partial(_by_blocks, x_TI, tiles)
    if num_rows > 1:
        products["torch"] = partial(fp8_cuda.by_torch, x_TI)
    if 16 < num_rows <= 256:
        tiles = fp8_cuda.choose_fp8_tiles(num_rows, num_outputs, num_inputs, x_TI.dtype)
        products["own"] = partial(_by_blocks, x_TI, tiles)
    times: dict[str, float] = {}
    name = f"{num_rows} x {num_outputs} x {num_inputs}"
    for key, product in products.items():
        try:
            times[key] = graph_time_us([partial(product, weight) for weight in weights])
        except (RuntimeError, TritonError) as error:
            print(f"{name} {key}: {str(error).splitlines()[0]}", flush=True)
    plain = [weight.weight.bfloat16() for weight in weights]
    times["bfloat16"] = graph_time_us([partial(_plain, x_TI, weight_OI) for weight_OI in plain])
    if "linear" in times:
        report.time(f"{name} linear", times["linear"], limit)
    ranked = sorted(times, key=times.__getitem__)[:5]
    ranked += [key for key in ("torch", "bfloat16") if key in times and key not in ranked]
    print("    " + "; ".join(f"{key} {times[key]:.2f}" for key in ranked), flush=True)


def _plain(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return linear(x_TI, weight_OI) if len(x_TI) <= 16 else functional.linear(x_TI, weight_OI)


def _one_row(x_1I: Tensor, tiles: Fp8VectorTiles, weight: Fp8Weight) -> Tensor:
    return fp8_cuda.one_row(x_1I, weight, tiles)


def _by_blocks(x_TI: Tensor, tiles: Fp8Tiles, weight: Fp8Weight) -> Tensor:
    return fp8_cuda.by_blocks(x_TI, weight, tiles)


if __name__ == "__main__":
    sys.exit(run_command("fp8", __doc__, {"check": check, "time": time}))
