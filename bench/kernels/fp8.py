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
from stagecoach.kernels.linear.fp8_product_cuda import (
    Fp8ProductTiles,
    multiply_fp8,
    multiply_one_row,
)
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
VECTOR_CUTS = [Fp8VectorTiles(*cut) for cut in ((8, 2), (4, 4), (2, 4), (8, 4), (8, 8))]
CUTS = [
    Fp8Tiles(16, 64, 128, 1, 4, 4),
    Fp8Tiles(16, 64, 128, 2, 4, 4),
    Fp8Tiles(16, 64, 128, 4, 4, 4),
    Fp8Tiles(16, 64, 256, 2, 4, 3),
    Fp8Tiles(16, 32, 256, 2, 4, 4),
    Fp8Tiles(16, 128, 128, 4, 8, 4),
]
CLUSTERS = (1, 2, 4, 8)


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
    check_products(report)
    check_cuts(report)


def check_products(report: Report) -> None:
    """Every cut of the products for Hopper: rows and outputs that fill no tile, few inputs."""
    for num_rows in (1, 8, 9, 30, 64, 100, 300):
        for num_outputs, num_inputs in ((136, 208), (1000, 2304), (2304, 4096)):
            weight = draw(num_outputs, num_inputs)
            x_TI = torch.randn(num_rows, num_inputs, device="cuda").bfloat16()
            expected_TO = expected_product(x_TI, weight)
            rows = quantize_rows(x_TI)
            for cut in product_cuts(num_rows):
                torch.empty(2**24, device="cuda").fill_(math.nan)
                name = f"{num_rows} x {num_outputs} x {num_inputs}, {tuple(cut)}"
                out_TO = multiply_fp8(*rows, weight, cut)
                report.check(name, relative_error(out_TO, expected_TO), 4e-3)
            for cluster in CLUSTERS:
                name = f"1 x {num_outputs} x {num_inputs}, quantised on the way, {cluster}"
                out_TO = multiply_one_row(x_TI[:1], weight, cluster)
                report.check(name, relative_error(out_TO, expected_TO[:1]), 4e-3)


def product_cuts(num_rows: int) -> list[Fp8ProductTiles]:
    rows = next((rows for rows in (8, 32) if num_rows <= rows), 64)
    return [Fp8ProductTiles(rows, cluster) for cluster in CLUSTERS]


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
        calls += [partial(linear, x_TI[:rows], weight) for rows in (1, 8, 64)]
        calls += [partial(linear, x_TI[:rows], weight.weight.bfloat16()) for rows in (1, 8)]
        calls += [partial(quantize_rows, x_TI)]
        calls += [partial(fp8_cuda.one_row, x_TI[:1], weight, cut) for cut in VECTOR_CUTS]
    compile_together(calls)
    time_square(report)
    for num_rows in (1, 8, 32, 64, 128, 256, 512, 2048, 8192):
        for sizes in SIZES:
            time_product(report, num_rows, *sizes)


def time_square(report: Report) -> None:
    """What the matrix units give a large product, without and with fast sums, beside bfloat16."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda") for _ in range(2))
    factors = torch.ones(size, device="cuda")
    for is_fast in (False, True):
        product = partial(
            torch._scaled_mm,
            left.to(FP8_DTYPE),
            right.to(FP8_DTYPE).t(),
            scale_a=factors[:, None],
            scale_b=factors[None, :],
            out_dtype=torch.bfloat16,
            use_fast_accum=is_fast,
        )
        name = f"square product of E4M3, {'fast' if is_fast else 'exact'} sums"
        report.figure(f"{name}, TFLOP/s", 2 * size**3 / graph_time_us(product, 5) / 1e6)
    plain = partial(functional.linear, left.bfloat16(), right.bfloat16())
    report.figure(
        "square product of bfloat16, TFLOP/s", 2 * size**3 / graph_time_us(plain, 5) / 1e6
    )


def time_product(report: Report, num_rows: int, num_outputs: int, num_inputs: int) -> None:
    weights = weights_of(num_outputs, num_inputs)
    x_TI = torch.randn(num_rows, num_inputs, device="cuda").bfloat16()
    limit = max(
        limit_us(num_outputs * num_inputs + 2 * num_rows * (num_inputs + num_outputs)),
        num_rows * num_outputs * num_inputs / BF16_FLOPS_PER_US,  # at twice bfloat16's rate
    )
    products: dict[str, Callable[[Fp8Weight], Tensor]] = {"linear": partial(linear, x_TI)}
    products["quantize"] = lambda _: quantize_rows(x_TI)[0]
    if num_rows == 1:
        for cut in VECTOR_CUTS:
            products[f"vector {tuple(cut)}"] = partial(_one_row, x_TI, cut)
        for cluster in CLUSTERS:
            products[f"one row, {cluster}"] = partial(_one_row_product, x_TI, cluster)
    elif num_rows <= 64:
        blocks = fp8_cuda.choose_fp8_tiles(num_rows, num_outputs, num_inputs, x_TI.dtype)
        products["blocks"] = partial(_by_blocks, x_TI, blocks)
    for cut in product_cuts(num_rows) if num_rows <= 512 else []:
        products[str(tuple(cut))] = partial(_by_product, x_TI, cut)
    if num_rows > 1:
        products["torch"] = partial(fp8_cuda.by_torch, x_TI)
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
    report.time(f"{name} bfloat16", times["bfloat16"])
    ranked = sorted(times, key=times.__getitem__)
    print("    " + "; ".join(f"{key} {times[key]:.2f}" for key in ranked), flush=True)


def _plain(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return linear(x_TI, weight_OI) if len(x_TI) <= 16 else functional.linear(x_TI, weight_OI)


def _one_row(x_1I: Tensor, tiles: Fp8VectorTiles, weight: Fp8Weight) -> Tensor:
    return fp8_cuda.one_row(x_1I, weight, tiles)


def _one_row_product(x_1I: Tensor, cluster: int, weight: Fp8Weight) -> Tensor:
    return multiply_one_row(x_1I, weight, cluster)


def _by_product(x_TI: Tensor, tiles: Fp8ProductTiles, weight: Fp8Weight) -> Tensor:
    return multiply_fp8(*quantize_rows(x_TI), weight, tiles)


def _by_blocks(x_TI: Tensor, tiles: Fp8Tiles, weight: Fp8Weight) -> Tensor:
    return fp8_cuda.by_blocks(x_TI, weight, tiles)


if __name__ == "__main__":
    sys.exit(run_command("fp8", __doc__, {"check": check, "time": time}))
