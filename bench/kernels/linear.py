"""Products of few rows on a GPU, cuBLAS beside them: `python -m bench.kernels.linear ACTION`.

`check` compares them with float64, `time` gives the figures of one row first, `chain` those of
whole layers of decode, with and without an early start of each kernel. Weights are drawn in place
of a layer's, in the sizes of Kimi-Linear and Kimi-K3.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import TritonError

from bench.kernels.compiling import compile_together
from bench.kernels.timing import (
    Report,
    graph_time_us,
    limit_us,
    num_rotations,
    relative_error,
    run_command,
)
from stagecoach.kernels import dependent_launch
from stagecoach.kernels.activation import Activation
from stagecoach.kernels.linear import cuda, float32_sums, grouped_linear, linear
from stagecoach.kernels.linear.cuda import LinearTiles, VectorTiles
from stagecoach.kernels.moe import (
    Router,
    Routing,
    SharedExpert,
    choose_experts,
    routed_experts,
    split_in_bfloat16,
)
from stagecoach.kernels.moe.cuda import Experts
from stagecoach.kernels.norm import add_rms_norm

# Outputs, inputs.
SIZES = [
    (2304, 4096),
    (576, 2304),
    (12_576, 2304),
    (4096, 128),
    (768, 2304),
    (2304, 1024),
    (163_840, 2304),
    (7168, 1536),
    (10_752, 7168),
]
ODD_SIZES = [(37, 72), (130, 200), (50, 1030)]
_NUM_EXPERTS = 64
_ROUTING = Routing(8, "sigmoid", renormalize=True, scaling=2.446)


VECTOR_CUTS = {
    128: [(8, 1), (4, 1), (16, 2)],
    1024: [(4, 2), (2, 2), (2, 1)],
    1536: [(4, 2), (2, 2), (4, 4), (2, 1)],
    2304: [(2, 4), (2, 2), (4, 4)],
    4096: [(2, 4), (1, 2), (2, 8), (4, 8)],
}
CUTS = [
    LinearTiles(32, 128, 1, 2, 5),
    LinearTiles(64, 128, 1, 4, 4),
    LinearTiles(16, 256, 4, 4, 3),
    LinearTiles(32, 128, 2, 4, 4),
    LinearTiles(32, 128, 4, 4, 4),
    LinearTiles(16, 256, 1, 4, 4),
]


def check(report: Report) -> None:
    for dtype, tolerance in ((torch.bfloat16, 5e-3), (torch.float32, 2e-6)):
        for num_outputs, num_inputs in (*ODD_SIZES, *SIZES[:6]):
            weight_OI = torch.empty(num_outputs, num_inputs, device="cuda").normal_().to(dtype)
            for num_rows in (1, 5, 16, 40):
                x_TI = torch.randn(num_rows, num_inputs + 8, device="cuda").to(dtype)
                x_TI = x_TI[:, :num_inputs]
                expected_TO = x_TI.double() @ weight_OI.double().t()
                torch.empty(2**24, device="cuda").fill_(math.nan)
                name = f"{num_rows} x {num_outputs} x {num_inputs}, {dtype}"
                error = relative_error(linear(x_TI, weight_OI), expected_TO)
                report.check(name, error, tolerance)
                error = relative_error(float32_sums(x_TI, weight_OI).sum(0), expected_TO)
                report.check(f"{name}, sums", error, 1e-5)
    names, calls, expected = [], [], []
    for num_inputs, cuts in VECTOR_CUTS.items():
        weight_OI = torch.randn(1001, num_inputs, device="cuda").bfloat16()
        x_1I = torch.randn(1, num_inputs, device="cuda").bfloat16()
        for cut in cuts:
            names.append(f"1 x 1001 x {num_inputs}, {cut}")
            calls.append(partial(cuda.one_row, x_1I, weight_OI, VectorTiles(*cut)))
            expected.append(x_1I.double() @ weight_OI.double().t())
    weight_OI = torch.randn(2304, 4096, device="cuda").bfloat16()
    x_TI = torch.randn(16, 4096, device="cuda").bfloat16()
    for tiles in CUTS:
        names.append(f"16 x 2304 x 4096, {tuple(tiles)}")
        calls.append(partial(cuda.few_rows, x_TI, weight_OI, tiles))
        expected.append(x_TI.double() @ weight_OI.double().t())
    torch.cuda.synchronize()
    failures = compile_together(calls)
    for name, call, expected_TO, failure in zip(names, calls, expected, failures, strict=True):
        error = math.inf if failure else relative_error(call(), expected_TO)
        report.check(f"{name} {failure}", error, 5e-3)


def weights_of(num_outputs: int, num_inputs: int) -> list[Tensor]:
    """Matrices of a product, together larger than the L2 cache."""
    return [
        torch.empty(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16).normal_()
        for _ in range(num_rotations(2 * num_outputs * num_inputs, most=32))
    ]


def time(report: Report) -> None:
    compile_together(
        [
            partial(
                cuda.one_row,
                torch.zeros(1, num_inputs, device="cuda").bfloat16(),
                torch.zeros(64, num_inputs, device="cuda").bfloat16(),
                VectorTiles(*cut),
            )
            for num_inputs, cuts in VECTOR_CUTS.items()
            for cut in cuts
        ]
    )
    for num_rows in (1, 8, 4, 16, 64):
        for sizes in SIZES:
            time_product(report, num_rows, *sizes)


def time_product(report: Report, num_rows: int, num_outputs: int, num_inputs: int) -> None:
    weights = weights_of(num_outputs, num_inputs)
    x_TI = torch.randn(num_rows, num_inputs, device="cuda").bfloat16()
    limit = limit_us(
        2 * (num_outputs * num_inputs + num_rows * (num_inputs + num_outputs)),
        2.0 * num_rows * num_outputs * num_inputs,
    )
    products: dict[str, Callable[[Tensor], Tensor]] = {
        "cuBLAS": lambda weight_OI: functional.linear(x_TI, weight_OI)
    }
    if num_rows <= cuda.MOST_ROWS:
        products["linear"] = lambda weight_OI: linear(x_TI, weight_OI)
        products["sums"] = lambda weight_OI: float32_sums(x_TI, weight_OI)
    if num_rows == 1:
        for cut in VECTOR_CUTS.get(num_inputs, []):
            products[str(cut)] = partial(_one_row, x_TI, VectorTiles(*cut))
    if num_rows == 8:
        for tiles in CUTS:
            products[str(tuple(tiles))] = partial(_few_rows, x_TI, tiles)
    name = f"{num_rows} x {num_outputs} x {num_inputs}"
    times: dict[str, float] = {}
    for key, product in products.items():
        try:
            times[key] = graph_time_us([partial(product, weight_OI) for weight_OI in weights])
        except (RuntimeError, TritonError) as error:
            print(f"{name} {key}: {str(error).splitlines()[0]}", flush=True)
    for key in ("cuBLAS", "linear", "sums"):
        if key in times:
            report.time(f"{name} {key}", times[key], limit)
    ranked = sorted(times, key=times.__getitem__)[:5]
    print("    best: " + "; ".join(f"{key} {times[key]:.2f}" for key in ranked), flush=True)


def _one_row(x_1I: Tensor, tiles: VectorTiles, weight_OI: Tensor) -> Tensor:
    return cuda.one_row(x_1I, weight_OI, tiles)


def _few_rows(x_TI: Tensor, tiles: LinearTiles, weight_OI: Tensor) -> Tensor:
    return cuda.few_rows(x_TI, weight_OI, tiles)


class Layer(NamedTuple):
    """Weights of a decode layer of Kimi-Linear."""

    norm_H: Tensor
    input_OI: Tensor
    low_GOI: Tensor
    output_OI: Tensor
    router: Router
    experts: Experts
    shared: SharedExpert


def make_layer() -> Layer:
    def draw(*sizes: int) -> Tensor:
        weight = torch.empty(sizes, dtype=torch.bfloat16, device="cuda")
        return weight.normal_(0.0, 1.0 / math.sqrt(sizes[-1]))

    router_EH = torch.empty(_NUM_EXPERTS, 2304, device="cuda").normal_(0.0, 0.02)
    bias_E = torch.zeros(_NUM_EXPERTS, device="cuda")
    return Layer(
        torch.ones(2304, device="cuda").bfloat16(),
        draw(12_576, 2304),
        draw(2, 4096, 128),
        draw(2304, 4096),
        Router(router_EH, bias_E, split_in_bfloat16(router_EH)),
        Experts(draw(_NUM_EXPERTS, 2048, 2304), draw(_NUM_EXPERTS, 2304, 1024), Activation("silu")),
        SharedExpert(draw(2048, 2304), draw(2304, 1024)),
    )


def run_layer(layer: Layer, x_TH: Tensor, addend_TH: Tensor) -> tuple[Tensor, Tensor]:
    """All kernels of a layer but the recurrence."""
    sum_TH, normed_TH = add_rms_norm(x_TH, addend_TH, layer.norm_H, 1e-5)
    mixed_TO = linear(normed_TH, layer.input_OI)
    low_GTO = grouped_linear(mixed_TO[:, :256].unflatten(1, (2, -1)), layer.low_GOI)
    out_TH = linear(low_GTO[0], layer.output_OI)
    sum_TH, normed_TH = add_rms_norm(sum_TH, out_TH, layer.norm_H, 1e-5)
    weights_TK, ids_TK = choose_experts(normed_TH, layer.router, _ROUTING, None)
    return sum_TH, routed_experts(normed_TH, weights_TK, ids_TK, *layer.experts, layer.shared)


def chain(report: Report) -> None:
    """Decode layers one behind the other, with and without an early start of each kernel."""
    layers = [make_layer() for _ in range(4)]
    for num_tokens in (1, 4, 8):
        x_TH = torch.randn(num_tokens, 2304, device="cuda").bfloat16()
        torch.cuda.synchronize()

        def run(x_TH: Tensor = x_TH) -> Tensor:
            sum_TH, addend_TH = x_TH, x_TH
            for layer in layers:
                sum_TH, addend_TH = run_layer(layer, sum_TH, addend_TH)
            return sum_TH + addend_TH

        outputs = []
        for is_enabled in (False, True):
            dependent_launch.is_enabled = is_enabled
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out_TH = run()
            for _ in range(50):
                graph.replay()
                outputs.append(out_TH.clone())
            torch.cuda.synchronize()
            graph.reset()
            microseconds = graph_time_us(run, 5) / len(layers)
            report.time(f"a layer, {num_tokens} tokens, {is_enabled=}", microseconds)
        num_other = sum(not torch.equal(output, outputs[0]) for output in outputs)
        report.check(f"{num_tokens} tokens: replays that differ", num_other, 0.0)


if __name__ == "__main__":
    sys.exit(run_command("linear", __doc__, {"check": check, "time": time, "chain": chain}))
