"""Products of packed MXFP4 experts on a GPU: `python -m bench.kernels.mxfp4 ACTION`.

`check` compares both forms with the reference, `time` gives their figures beside the limit and
those of the same experts in bfloat16, `cuts` those of candidates.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from bench.kernels.compiling import compile_together
from bench.kernels.moe import (
    KIMI_K3,
    KIMI_K3_TP8,
    SITU,
    Shape,
    make_choice,
    make_experts,
    poison,
    time_calls,
    tokens_of,
)
from bench.kernels.timing import Report, graph_time_us, limit_us, relative_error, run_command
from stagecoach.kernels.moe import mxfp4_cuda as packed
from stagecoach.kernels.moe import mxfp4_many_cuda as many
from stagecoach.kernels.moe import reference, routed_experts, sorted_pairs
from stagecoach.kernels.moe.mxfp4_tiles import (
    FEW_PAIRS,
    FewTiles,
    ManyTiles,
    all_many_tiles,
    all_mxfp4_sorted_tiles,
    few_tiles,
    many_tiles,
)
from stagecoach.kernels.moe.packed_experts import PackedExperts
from stagecoach.kernels.quantization import Mxfp4Weight, unpack_mxfp4

ODD = Shape("odd", 7, 3, 96, 160, SITU)
# A weight and its share of a scale.
_BYTES_PER_WEIGHT = 0.5 + 1 / 32

# Candidates, and the tokens that they are timed with.
CUTS = [
    ((8192, 4096), ManyTiles(256, 96, 160, 2)),
    ((8192, 4096, 2048), ManyTiles(128, 48, 96, 2)),
    ((2048, 1024), ManyTiles(64, 16, 32, 2)),
    ((1024, 256), ManyTiles(32, 16, 16, 4)),
    ((256, 64, 8), ManyTiles(16, 8, 16, 4)),
]
# Whether pairs are sorted, warps of a block, chunks on their way, and blocks of a processor.
_FEW_FORMS = ((False, 4, 4, 4), (True, 4, 4, 4), (True, 8, 2, 3), (True, 8, 3, 2))
_FEW = [FewTiles(is_sorted, 64, *form) for is_sorted, *form in _FEW_FORMS]


def draw(*sizes: int) -> Mxfp4Weight:
    """Any codes, with scales that make rows of about unit length."""
    *rows, num_inputs = sizes
    exponent = 126 - round(math.log2(math.sqrt(num_inputs)))
    options = {"dtype": torch.uint8, "device": "cuda"}
    return Mxfp4Weight(
        torch.randint(256, (*rows, num_inputs // 2), **options),
        torch.randint(exponent - 3, exponent + 1, (*rows, num_inputs // 32), **options),
    )


def make_packed(shape: Shape) -> PackedExperts:
    gate_up = draw(shape.num_experts, 2 * shape.width, shape.latent)
    down = draw(shape.num_experts, shape.latent, shape.width)
    return PackedExperts(gate_up, down, shape.activation)


def expected_output(x: Tensor, weights: Tensor, ids: Tensor, experts: PackedExperts) -> Tensor:
    """In float32, whatever the type of the activations."""
    return reference.routed_experts(
        x.float(),
        weights,
        ids.long(),
        unpack_mxfp4(experts.gate_up_E2IL, torch.float32),
        unpack_mxfp4(experts.down_ELI, torch.float32),
        lambda gate, up: experts.activation(gate.contiguous(), up.contiguous()),
    )


def check(report: Report) -> None:
    for shape, tokens in (
        (ODD, (1, 3, 8, 40, 150)),
        (KIMI_K3._replace(num_experts=18), (1, 2, 8, 60)),
        (KIMI_K3_TP8._replace(num_experts=40), (1, 2, 9, 25, 40, 90, 200, 700)),
    ):
        experts = make_packed(shape)
        for num_tokens in tokens:
            check_experts(report, shape, experts, num_tokens, torch.bfloat16, 1e-2)
        for num_tokens in tokens[:2]:
            check_experts(report, shape, experts, num_tokens, torch.float32, 2e-5)
    check_order(report)
    check_scales(report)
    check_cuts(report)
    check_replay(report)


def check_experts(
    report: Report,
    shape: Shape,
    experts: PackedExperts,
    num_tokens: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    weights_TK, ids_TK = make_choice(shape, num_tokens + 2, num_tokens)
    x_TL = torch.randn(num_tokens + 2, shape.latent, device="cuda").to(dtype)
    for tensor, value in ((ids_TK, -1), (weights_TK, 0), (x_TL, math.nan)):
        tensor[num_tokens:] = value
    poison()
    out_TL = routed_experts(x_TL, weights_TK, ids_TK, *experts)
    real = slice(num_tokens)
    expected_TL = expected_output(x_TL[real], weights_TK[real], ids_TK[real], experts)
    error = relative_error(out_TL[real], expected_TL)
    report.check(f"{shape.name}, {num_tokens} tokens, {dtype}", error, tolerance)
    rest = (out_TL[num_tokens:] != 0).float().mean().item()
    report.check(f"{shape.name}, {num_tokens} tokens: nobody's", rest, 0.0)


def check_order(report: Report) -> None:
    """Pairs of a block, of several and of very many, some of them nobody's."""
    shape = KIMI_K3._replace(num_experts=896)
    for num_tokens in (1, 8, 30, 33, 1024, 8192):
        ids_TK = make_choice(shape, num_tokens, num_tokens)[1]
        ids_TK[num_tokens - num_tokens // 4 :] = -1
        poison()
        order = sorted_pairs.sort_pairs(ids_TK, shape.num_experts, 64)
        keys_P = torch.where(ids_TK < 0, shape.num_experts, ids_TK).flatten()
        expected_P = keys_P.sort(stable=True).indices[: int((ids_TK >= 0).sum())]
        counts_E = keys_P.bincount(minlength=shape.num_experts + 1)[:-1]
        num_tiles = (counts_E + 63) // 64
        num_other = (order.pairs_P[: len(expected_P)] != expected_P).sum()
        num_other += (order.offsets_E1.diff() != counts_E).sum()
        num_other += order.num_tiles_1[0] != num_tiles.sum()
        experts_M = torch.arange(len(num_tiles), device="cuda").repeat_interleave(num_tiles)
        num_other += (order.tile_experts_M[: len(experts_M)] != experts_M).sum()
        report.check(f"order, {num_tokens} tokens", float(num_other), 0.0)


def check_scales(report: Report) -> None:
    """Every code at scales from 2^-93 to 2^32: the inputs' identity gives the weights back."""
    scales = torch.tensor([34, 60, 126, 127, 128, 159], dtype=torch.uint8, device="cuda")
    codes = torch.randint(256, (1, 6, 16), dtype=torch.uint8, device="cuda")
    experts = PackedExperts(draw(1, 64, 32), Mxfp4Weight(codes, scales.view(1, 6, 1)), SITU)
    expected_PL = unpack_mxfp4(experts.down_ELI, torch.bfloat16)[0].T
    product_PI = torch.eye(32, device="cuda").bfloat16()
    ids_TK = torch.zeros(32, 1, dtype=torch.int32, device="cuda")
    for tiles in _FEW:
        order = sorted_pairs.sort_pairs(ids_TK, 1, FEW_PAIRS) if tiles.is_sorted else None
        out_PL = packed.few_down(product_PI, ids_TK, order, experts, tiles)
        num_other = (out_PL != expected_PL).float().sum().item()
        report.check(f"decoded, {tuple(tiles)}", num_other, 0.0)
    order = sorted_pairs.sort_pairs(ids_TK, 1, 16)
    ordered_PI = packed.in_operand_order(product_PI)
    out_PL = packed.down(ordered_PI, order, experts, all_mxfp4_sorted_tiles()[0])
    report.check("decoded, Triton", (out_PL != expected_PL).float().sum().item(), 0.0)
    scale = scales.repeat(171)[: 256 * 4].view(1, 256, 4)
    down = Mxfp4Weight(torch.randint(256, (1, 256, 64), dtype=torch.uint8, device="cuda"), scale)
    experts = PackedExperts(draw(1, 256, 256), down, SITU)
    expected_PL = unpack_mxfp4(down, torch.bfloat16)[0].T
    ordered_PI = many.in_chunk_order(torch.eye(128, device="cuda").bfloat16())
    ids_TK = torch.zeros(128, 1, dtype=torch.int32, device="cuda")
    for tiles in all_many_tiles():
        order = sorted_pairs.sort_pairs(ids_TK, 1, tiles.pairs)
        out_PL = many.many_down(ordered_PI, order, experts, tiles)
        report.check(f"decoded, {tuple(tiles)}", (out_PL != expected_PL).float().sum().item(), 0.0)


def check_cuts(report: Report) -> None:
    """Every cut that is timed or chosen, with tiles that are full and others of all sizes."""
    shape = KIMI_K3_TP8._replace(num_experts=24)
    experts = make_packed(shape)
    for num_tokens in (20, 150, 400):
        weights_TK, ids_TK = make_choice(shape, num_tokens, 0)
        x_TL = torch.randn(num_tokens, shape.latent, device="cuda").bfloat16()
        expected_TL = expected_output(x_TL, weights_TK, ids_TK, experts)
        inputs = (x_TL, weights_TK, ids_TK, experts)
        sorted_cuts = all_mxfp4_sorted_tiles()
        many_cuts = list(dict.fromkeys([*all_many_tiles(), *(cut for _, cut in CUTS)]))
        calls: list[Callable[[], Tensor]] = [
            *(partial(packed.by_tiles, *inputs, cut) for cut in sorted_cuts),
            *(partial(many.by_many, *inputs, cut) for cut in many_cuts),
        ]
        failures = compile_together(calls)
        # These share what the first one of them compiles.
        calls += [partial(packed.by_few, *inputs, few) for few in _FEW]
        names = [str(tuple(cut)) for cut in (*sorted_cuts, *many_cuts, *_FEW)]
        for name, call, failure in zip_longest(names, calls, failures, fillvalue=""):
            if failure:
                print(f"{name}: {failure}", flush=True)
            error = math.inf if failure else relative_error(call(), expected_TL)
            report.check(f"{name}, {num_tokens} tokens", error, 1e-2)


def check_replay(report: Report) -> None:
    """Captured products, replayed with other tokens and other experts."""
    shape = KIMI_K3_TP8._replace(num_experts=64)
    experts = make_packed(shape)
    for num_tokens in (1, 8, 80):
        x_TL = torch.randn(num_tokens, shape.latent, device="cuda").bfloat16()
        weights_TK, ids_TK = make_choice(shape, num_tokens, 0)
        run = partial(routed_experts, x_TL, weights_TK, ids_TK, *experts)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TL = run()
        for seed in (1, 2):
            x_TL.normal_()
            for tensor, drawn in zip(
                (weights_TK, ids_TK), make_choice(shape, num_tokens, seed), strict=True
            ):
                tensor.copy_(drawn)
            if seed == 2:
                ids_TK[num_tokens // 2 :] = -1
            graph.replay()
            captured_TL = out_TL.clone()
            error = (captured_TL - run()).abs().max().item()
            report.check(f"replay {seed}, {num_tokens} tokens", error, 0.0)
        graph.reset()


def limits(shape: Shape, inputs: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
    """Least microseconds of gate and up, and of down: packed weights in use, or products."""
    num_tokens = len(inputs[0][0])
    distinct = sum(len(ids.unique()) for _, _, ids in inputs) / len(inputs)
    size = shape.latent * shape.width
    num_products = 2 * num_tokens * shape.num_chosen * size
    num_bytes = _BYTES_PER_WEIGHT * distinct * size
    return limit_us(2 * num_bytes, 2 * num_products), limit_us(num_bytes, num_products)


def time(report: Report) -> None:
    for shape in (KIMI_K3_TP8, KIMI_K3):
        shape = shape._replace(name=shape.name.split(",")[0], num_experts=896)
        experts = make_packed(shape)
        plain = make_experts(shape, torch.bfloat16)
        for num_tokens in (1, 8, 64, 256, 1024, 8192):
            inputs = tokens_of(shape, num_tokens)
            counts = (20, 5) if num_tokens <= 256 else (4, 3)
            times = [
                graph_time_us([partial(routed_experts, *i, *given) for i in inputs], *counts)
                for given in (experts, plain)
            ]
            name = f"experts, {shape.name}, {num_tokens} tokens"
            report.time(name, times[0], sum(limits(shape, inputs)))
            report.time(f"  {name}, bfloat16", times[1])
            print(f"    {times[1] / times[0]:.2f} times", flush=True)
            time_parts(report, shape, experts, inputs)
        del experts, plain


def time_parts(
    report: Report,
    shape: Shape,
    experts: PackedExperts,
    inputs: list[tuple[Tensor, Tensor, Tensor]],
) -> None:
    """Both products, in the form that the door takes."""
    num_pairs = inputs[0][2].numel()
    few = few_tiles(num_pairs, shape.num_experts, has_many=True)
    if few is None:
        time_many(report, shape, experts, inputs, many_tiles(num_pairs, shape.num_experts))
    else:
        time_few(report, shape, experts, inputs, few)


def time_few(
    report: Report,
    shape: Shape,
    experts: PackedExperts,
    inputs: list[tuple[Tensor, Tensor, Tensor]],
    few: FewTiles,
) -> None:
    """Both products by `mxfp4.cu`."""
    num_tokens = len(inputs[0][0])
    gate_limit, down_limit = limits(shape, inputs)
    gates, downs = [], []
    for x, _, ids in inputs:
        order = None
        if few.is_sorted:
            order = sorted_pairs.sort_pairs(ids, shape.num_experts, FEW_PAIRS)
        product = torch.randn(ids.numel(), shape.width, device="cuda").bfloat16()
        gates.append(partial(packed.few_gate_up, x, ids, order, experts, few))
        downs.append(partial(packed.few_down, product, ids, order, experts, few))
    name = f"{num_tokens} tokens, {tuple(few)}"
    time_calls(report, f"  gate_up {name}", gates, gate_limit)
    time_calls(report, f"  down {name}", downs, down_limit)


def time_many(
    report: Report,
    shape: Shape,
    experts: PackedExperts,
    inputs: list[tuple[Tensor, Tensor, Tensor]],
    tiles: ManyTiles,
) -> None:
    """Both products by `mxfp4_many.cu`."""
    num_tokens = len(inputs[0][0])
    gate_limit, down_limit = limits(shape, inputs)
    gates, downs = [], []
    for x, _, ids in inputs:
        order = sorted_pairs.sort_pairs(ids, shape.num_experts, tiles.pairs)
        product = torch.randn(ids.numel(), shape.width, device="cuda").bfloat16()
        gates.append(partial(many.many_gate_up, x, shape.num_chosen, order, experts, tiles))
        downs.append(partial(many.many_down, product, order, experts, tiles))
    name = f"{num_tokens} tokens, {tuple(tiles)}"
    time_calls(report, f"  gate_up {name}", gates, gate_limit)
    time_calls(report, f"  down {name}", downs, down_limit)


def time_cuts(report: Report) -> None:
    """Candidates of `mxfp4_many.cu`, and forms of `mxfp4.cu`."""
    shape = KIMI_K3_TP8._replace(num_experts=896)
    experts = make_packed(shape)
    for num_tokens in sorted({number for numbers, _ in CUTS for number in numbers}, reverse=True):
        inputs = tokens_of(shape, num_tokens)
        for numbers, cut in CUTS:
            if num_tokens in numbers:
                time_many(report, shape, experts, inputs, cut)
        few = few_tiles(inputs[0][2].numel(), shape.num_experts, has_many=False)
        if few is not None:
            for is_sorted, *form in _FEW_FORMS:
                if is_sorted == few.is_sorted:
                    tiles = FewTiles(is_sorted, few.most_distinct, *form)
                    time_few(report, shape, experts, inputs, tiles)


if __name__ == "__main__":
    sys.exit(run_command("mxfp4", __doc__, {"check": check, "time": time, "cuts": time_cuts}))
