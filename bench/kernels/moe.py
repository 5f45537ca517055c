"""The choice of experts and their products on a GPU: `python -m bench.kernels.moe ACTION`.

`check` compares them with the reference, `time` gives the figures of decode first, `cuts` those of
candidates for many tokens.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from bench.kernels.compiling import compile_together
from bench.kernels.timing import (
    Report,
    graph_time_us,
    limit_us,
    relative_error,
    run_command,
)
from stagecoach.kernels.activation import Activation
from stagecoach.kernels.moe import (
    Router,
    Routing,
    SharedExpert,
    choose_experts,
    reference,
    routed_experts,
    split_in_bfloat16,
)
from stagecoach.kernels.moe import cuda as moe
from stagecoach.kernels.moe.tiles import (
    PairCut,
    PairTiles,
    ProductTiles,
    SortedTiles,
    WholeCut,
    pair_tiles,
    sorted_tiles,
)

SILU = Activation("silu")
SITU = Activation("situ", 4.0, 25.0)


class Shape(NamedTuple):
    """Sizes of the experts of one rank."""

    name: str
    num_experts: int
    num_chosen: int
    latent: int
    width: int
    activation: Activation


KIMI_LINEAR = Shape("Kimi-Linear", 256, 8, 2304, 1024, SILU)
KIMI_LINEAR_TP2 = Shape("Kimi-Linear tp2", 256, 8, 2304, 512, SILU)
KIMI_K3 = Shape("Kimi-K3, 64 experts", 64, 16, 3584, 3072, SITU)
KIMI_K3_TP8 = Shape("Kimi-K3 tp8, 64 experts", 64, 16, 3584, 384, SITU)
ODD = Shape("odd", 7, 3, 72, 40, SITU)


def make_experts(shape: Shape, dtype: torch.dtype) -> moe.Experts:
    def draw(*sizes: int) -> Tensor:
        weights = torch.empty(sizes, dtype=dtype, device="cuda")
        return weights.normal_(0.0, 1.0 / math.sqrt(sizes[-1]))

    gate_up = draw(shape.num_experts, 2 * shape.width, shape.latent)
    down = draw(shape.num_experts, shape.latent, shape.width)
    return moe.Experts(gate_up, down, shape.activation)


def make_shared(shape: Shape, dtype: torch.dtype) -> SharedExpert:
    one = make_experts(shape._replace(num_experts=1), dtype)
    return SharedExpert(one.gate_up_E2IL[0], one.down_ELI[0])


def make_choice(shape: Shape, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Even routing: float32 weights and int32 ids [T, K]."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(num_tokens, shape.num_experts, device="cuda", generator=generator)
    best = scores.topk(shape.num_chosen)
    return best.values, best.indices.int()


def poison() -> None:
    """What is allocated next holds NaN where nothing wrote."""
    torch.empty(2**28, dtype=torch.float32, device="cuda").fill_(math.nan)


def check(report: Report) -> None:
    check_choice(report)
    for shape, tokens in (
        (ODD, (1, 3, 40)),
        (KIMI_LINEAR._replace(num_experts=24), (1, 2, 7, 64, 300, 2100)),
        (KIMI_LINEAR_TP2._replace(num_experts=24), (1, 64)),
        (KIMI_K3._replace(num_experts=20), (1, 9, 200)),
        (KIMI_K3_TP8._replace(num_experts=20), (1, 9)),
    ):
        for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float32, 2e-5)):
            experts = make_experts(shape, dtype)
            for num_tokens in tokens if dtype == torch.bfloat16 else tokens[:3]:
                check_experts(report, shape, experts, num_tokens, tolerance)
    check_cuts(report)
    check_replay(report)


def check_choice(report: Report) -> None:
    for name, num_experts, hidden, routing in (
        ("256 experts, top 8", 256, 2304, Routing(8, "sigmoid", renormalize=True, scaling=2.446)),
        ("896 experts, top 16", 896, 7168, Routing(16, "sigmoid", renormalize=True, scaling=2.5)),
        (
            "64 in 8 groups, softmax",
            64,
            512,
            Routing(
                6, "softmax", renormalize=False, scaling=1.0, num_expert_groups=8, topk_group=3
            ),
        ),
        ("50 experts", 50, 200, Routing(5, "sigmoid", renormalize=True, scaling=1.0)),
    ):
        weight_EH = torch.empty(num_experts, hidden, device="cuda").normal_(0.0, 0.02)
        bias_E = torch.randn(num_experts, device="cuda") * 0.05
        for dtype in (torch.bfloat16, torch.float32):
            is_bfloat16 = dtype == torch.bfloat16
            parts = split_in_bfloat16(weight_EH) if is_bfloat16 else None
            router = Router(weight_EH, bias_E, parts)
            for num_tokens in (1, 13, 16, 300):
                x_TH = torch.randn(num_tokens + 2, hidden, device="cuda", dtype=dtype)
                x_TH[num_tokens:] = math.nan
                num_real_1 = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")
                poison()
                weights_TK, ids_TK = choose_experts(x_TH, router, routing, num_real_1)
                logits_TE = x_TH[:num_tokens].double() @ weight_EH.double().t()
                expected = reference.route(logits_TE, bias_E.double(), *routing)
                label = f"{name}, {num_tokens} tokens, {dtype}"
                is_other = ids_TK[:num_tokens] != expected[1]
                report.check(f"{label}: ids", is_other.float().mean().item(), 1e-3)
                same = ~is_other.any(1)
                error = relative_error(weights_TK[:num_tokens][same], expected[0][same])
                report.check(f"{label}: weights", error, 1e-5)
                is_nobody = (ids_TK[num_tokens:] == -1) & (weights_TK[num_tokens:] == 0)
                report.check(f"{label}: nobody's", 1.0 - is_nobody.float().mean().item(), 0.0)


def expected_output(
    x_TL: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: moe.Experts
) -> Tensor:
    """In float32, whatever the type of the operands."""
    gate_up, down, activation = experts
    gate_up = gate_up.float() if len(down) * gate_up[0].numel() < 2**31 else gate_up
    return reference.routed_experts(
        x_TL.float(),
        weights_TK,
        ids_TK.long(),
        gate_up,
        down.float(),
        lambda gate, up: activation(gate.contiguous(), up.contiguous()),
    )


def check_experts(
    report: Report, shape: Shape, experts: moe.Experts, num_tokens: int, tolerance: float
) -> None:
    dtype = experts.down_ELI.dtype
    weights_TK, ids_TK = make_choice(shape, num_tokens + 2, num_tokens)
    x_TL = torch.randn(num_tokens + 2, shape.latent, device="cuda").to(dtype)
    for tensor, value in ((ids_TK, -1), (weights_TK, 0), (x_TL, math.nan)):
        tensor[num_tokens:] = value
    shared = make_shared(shape, dtype)
    poison()
    out_TL = routed_experts(x_TL, weights_TK, ids_TK, *experts, shared)
    real = slice(num_tokens)
    expected_TL = expected_output(x_TL[real], weights_TK[real], ids_TK[real], experts)
    gate_TI, up_TI = (x_TL[real].float() @ shared.gate_up_2JL.float().t()).chunk(2, dim=1)
    product_TI = shape.activation(gate_TI.contiguous(), up_TI.contiguous())
    expected_TL += product_TI @ shared.down_LJ.float().t()
    error = relative_error(out_TL[real], expected_TL)
    report.check(f"{shape.name}, {num_tokens} tokens, {dtype}", error, tolerance)
    rest = (out_TL[num_tokens:] != 0).float().mean().item()
    report.check(f"{shape.name}, {num_tokens} tokens: nobody's", rest, 0.0)


def check_cuts(report: Report) -> None:
    """Every cut that is timed."""
    shape = KIMI_LINEAR._replace(num_experts=24)
    experts = make_experts(shape, torch.bfloat16)
    weights_TK, ids_TK = make_choice(shape, 150, 0)
    x_TL = torch.randn(150, shape.latent, device="cuda").bfloat16()
    expected_TL = expected_output(x_TL, weights_TK, ids_TK, experts)
    calls: list[Callable[[], Tensor]] = []
    names: list[str] = []
    for block_m, gates, downs in (*DECODE_CUTS, *PREFILL_CUTS):
        for index in range(max(len(gates), len(downs))):
            cut = SortedTiles(block_m, gates[index % len(gates)], downs[index % len(downs)])
            names.append(str(tuple(map(tuple_of, cut))))
            calls.append(lambda cut=cut: moe.by_tiles(x_TL, weights_TK, ids_TK, experts, None, cut))
    for index, down in enumerate(PAIR_DOWNS):
        pairs = PairTiles(PAIR_GATE_UPS[index % len(PAIR_GATE_UPS)], down)
        names.append(str(tuple(map(tuple_of, pairs))))
        calls.append(lambda cut=pairs: moe.by_pairs(x_TL, weights_TK, ids_TK, experts, None, cut))
    failures = compile_together(calls)
    for name, call, failure in zip(names, calls, failures, strict=True):
        if failure:
            print(f"{name}: {failure}", flush=True)
            report.check(name, math.inf, 1e-2)
        else:
            report.check(name, relative_error(call(), expected_TL), 1e-2)


def tuple_of(value: object) -> object:
    return tuple(value) if isinstance(value, tuple) else value


def check_replay(report: Report) -> None:
    """A captured choice and its products, replayed with other tokens and fewer of them."""
    shape = KIMI_LINEAR._replace(num_experts=64)
    experts = make_experts(shape, torch.bfloat16)
    shared = make_shared(shape, torch.bfloat16)
    routing = Routing(8, "sigmoid", renormalize=True, scaling=2.446)
    weight_EH = torch.empty(64, shape.latent, device="cuda").normal_(0.0, 0.02)
    router = Router(weight_EH, torch.zeros(64, device="cuda"), split_in_bfloat16(weight_EH))
    for num_tokens in (2, 16, 80):
        x_TL = torch.randn(num_tokens, shape.latent, device="cuda").bfloat16()
        num_real_1 = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")

        def run(x_TL: Tensor = x_TL, num_real_1: Tensor = num_real_1) -> Tensor:
            weights_TK, ids_TK = choose_experts(x_TL, router, routing, num_real_1)
            return routed_experts(x_TL, weights_TK, ids_TK, *experts, shared)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TL = run()
        for num_real in (num_tokens, num_tokens - 1, 1, 0):
            x_TL.normal_()
            num_real_1.fill_(num_real)
            graph.replay()
            captured_TL = out_TL.clone()
            error = (captured_TL - run()).abs().max().item()
            report.check(f"replay, {num_real} of {num_tokens} tokens", error, 0.0)
        graph.reset()


def by_descriptor(
    block_n: int, block_k: int, num_warps: int, num_stages: int, *, halves: bool = False
) -> ProductTiles:
    return ProductTiles(block_n, block_k, num_warps, num_stages, True, halves)  # noqa: FBT003


PAIR_GATE_UPS = [WholeCut(1, 4), WholeCut(1, 2), WholeCut(1, 8), WholeCut(2, 4)]
PAIR_DOWNS = [
    WholeCut(1, 4),
    PairCut(4, 1024, 4, 3),
    PairCut(2, 1024, 2, 3),
    PairCut(8, 1024, 8, 3),
    PairCut(4, 512, 4, 4),
]
# Pairs of a tile, and cuts of the two products that are timed with it.
DECODE_CUTS = [
    (16, [ProductTiles(32, 256, 4, 3)], [ProductTiles(64, 128, 4, 4)]),
    (
        32,
        [
            ProductTiles(64, 128, 4, 3),
            ProductTiles(64, 128, 4, 3, halves=True),
            ProductTiles(32, 256, 4, 3, halves=True),
        ],
        [
            ProductTiles(64, 128, 4, 4),
            ProductTiles(64, 128, 4, 4, halves=True),
            by_descriptor(128, 128, 4, 3, halves=True),
        ],
    ),
    (
        64,
        [
            ProductTiles(64, 64, 4, 4, halves=True),
            by_descriptor(64, 64, 4, 4, halves=True),
            by_descriptor(64, 128, 4, 3),
        ],
        [
            ProductTiles(128, 64, 4, 4, halves=True),
            by_descriptor(128, 64, 4, 4, halves=True),
            by_descriptor(128, 128, 4, 3),
        ],
    ),
]
PREFILL_CUTS = [
    (
        128,
        [
            by_descriptor(128, 64, 8, 4),
            by_descriptor(128, 64, 8, 4, halves=True),
            ProductTiles(128, 64, 8, 4, halves=True),
            by_descriptor(128, 128, 8, 2, halves=True),
            by_descriptor(64, 64, 4, 3, halves=True),
        ],
        [
            by_descriptor(256, 64, 8, 4, halves=True),
            ProductTiles(256, 64, 8, 4, halves=True),
            by_descriptor(256, 128, 8, 2, halves=True),
            by_descriptor(128, 64, 4, 3, halves=True),
        ],
    ),
]
_ROTATION = 4


def time(report: Report) -> None:
    shape = KIMI_LINEAR
    experts = make_experts(shape, torch.bfloat16)
    time_pairs(report, shape, experts)
    time_choice(report)
    for num_tokens in (1, 2, 4, 8, 16, 64, 256, 512, 1024, 2048, 4096, 8192):
        time_door(report, shape, experts, num_tokens)
    del experts
    for other in (KIMI_LINEAR_TP2, KIMI_K3, KIMI_K3_TP8):
        experts = make_experts(other, torch.bfloat16)
        for num_tokens in (1, 8, 64, 8192):
            time_door(report, other, experts, num_tokens)


def time_cuts(report: Report) -> None:
    """Candidates for the products over sorted pairs."""
    experts = make_experts(KIMI_LINEAR, torch.bfloat16)
    for num_tokens, cuts in (
        (256, DECODE_CUTS),
        (512, DECODE_CUTS),
        (1024, [*DECODE_CUTS[1:], *PREFILL_CUTS]),
        (2048, [*DECODE_CUTS[2:], *PREFILL_CUTS]),
        (8192, PREFILL_CUTS),
    ):
        time_products(report, KIMI_LINEAR, experts, num_tokens, cuts)
    experts = make_experts(KIMI_K3_TP8, torch.bfloat16)
    time_products(report, KIMI_K3_TP8, experts, 64, DECODE_CUTS)


def tokens_of(shape: Shape, num_tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, weights and ids, several times."""
    return [
        (
            torch.randn(num_tokens, shape.latent, device="cuda").bfloat16(),
            *make_choice(shape, num_tokens, seed),
        )
        for seed in range(_ROTATION)
    ]


def limits(shape: Shape, inputs: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
    """Least microseconds of gate and up, and of down: weights of distinct experts, or products."""
    num_tokens = len(inputs[0][0])
    distinct = sum(len(ids.unique()) for _, _, ids in inputs) / len(inputs)
    size = shape.latent * shape.width
    num_products = 2 * num_tokens * shape.num_chosen * size
    return (
        limit_us(2 * distinct * 2 * size, 2 * num_products),
        limit_us(2 * distinct * size, num_products),
    )


def time_calls(
    report: Report, name: str, calls: Sequence[Callable[[], object]], limit: float
) -> None:
    """A line of the table; where a cut does not fit the machine, why."""
    try:
        microseconds = graph_time_us(calls, *((20, 5) if limit < 800 else (4, 3)))
    except (RuntimeError, TritonError) as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    else:
        report.time(name, microseconds, limit)


def time_choice(report: Report) -> None:
    routing = Routing(8, "sigmoid", renormalize=True, scaling=2.446)
    weight_EH = torch.empty(256, 2304, device="cuda").normal_(0.0, 0.02)
    router = Router(weight_EH, torch.zeros(256, device="cuda"), split_in_bfloat16(weight_EH))
    for num_tokens in (1, 8, 64, 256, 8192):
        x_TH = torch.randn(num_tokens, 2304, device="cuda").bfloat16()
        num_real_1 = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")
        sums_STQ = moe.linear.float32_sums(x_TH, router.parts_QH)
        times = [
            graph_time_us(partial(moe.linear.float32_sums, x_TH, router.parts_QH)),
            graph_time_us(partial(moe.route, sums_STQ, 256, router.bias_E, routing, num_real_1)),
        ]
        print(f"choice, {num_tokens} tokens: product {times[0]:.2f} us, route {times[1]:.2f} us")


def time_pairs(report: Report, shape: Shape, experts: moe.Experts) -> None:
    """With the shared expert, as in a layer."""
    shared = make_shared(shape, torch.bfloat16)
    more = 2 * shape.latent * shape.width  # bytes of one of its matrices
    inputs = tokens_of(shape, 1)
    cuts = [
        PairTiles(PAIR_GATE_UPS[index % len(PAIR_GATE_UPS)], down)
        for index, down in enumerate(PAIR_DOWNS)
    ]
    compile_together(
        [lambda cut=cut: moe.by_pairs(*inputs[0], experts, shared, cut) for cut in cuts]
    )
    for num_tokens in (1, 4):
        inputs = tokens_of(shape, num_tokens)
        gate_limit, down_limit = limits(shape, inputs)
        gate_limit += limit_us(2 * more)
        down_limit += limit_us(more)
        products = [moe.pair_gate_up(i[0], i[2], experts, shared, PAIR_GATE_UPS[0]) for i in inputs]
        for cut in PAIR_GATE_UPS:
            calls = [
                lambda i=i, cut=cut: moe.pair_gate_up(i[0], i[2], experts, shared, cut)
                for i in inputs
            ]
            time_calls(report, f"pair gate_up, {num_tokens}, {tuple(cut)}", calls, gate_limit)
        for cut in PAIR_DOWNS:
            calls = [
                lambda i=i, p=p, cut=cut: moe.pair_down(p, i[1], i[2], experts, shared, cut)
                for i, p in zip(inputs, products, strict=True)
            ]
            time_calls(report, f"pair down, {num_tokens}, {tuple(cut)}", calls, down_limit)
    for num_tokens in (1, 2, 4, 6, 8):
        tiles = pair_tiles(num_tokens, shape.num_chosen, shape.latent, shape.width)
        inputs = tokens_of(shape, num_tokens)
        limit = sum(limits(shape, inputs)) + limit_us(3 * more)
        calls = [lambda i=i, t=tiles: moe.by_pairs(*i, experts, shared, t) for i in inputs]
        time_calls(report, f"by pairs with the shared expert, {num_tokens}", calls, limit)
        cut = sorted_tiles(num_tokens * shape.num_chosen, shape.num_experts, is_float32=False)

        def by_tiles(i: tuple[Tensor, Tensor, Tensor], cut: SortedTiles = cut) -> Tensor:
            return moe.by_tiles(*i, experts, shared(i[0], shape.activation), cut)

        calls = [partial(by_tiles, i) for i in inputs]
        time_calls(report, f"by tiles with the shared expert, {num_tokens}", calls, limit)


def time_products(
    report: Report,
    shape: Shape,
    experts: moe.Experts,
    num_tokens: int,
    cuts: list[tuple[int, list[ProductTiles], list[ProductTiles]]],
) -> None:
    inputs = tokens_of(shape, num_tokens)
    gate_limit, down_limit = limits(shape, inputs)
    for block_m, gates, downs in cuts:
        orders = [moe.sort_pairs(ids, shape.num_experts, block_m) for _, _, ids in inputs]
        products = [
            torch.randn(ids.numel(), shape.width, device="cuda").bfloat16() for _, _, ids in inputs
        ]
        for cut in gates:
            tiles = SortedTiles(block_m, cut, downs[0])
            calls = [
                lambda i=i, o=o, t=tiles: moe.gate_up(i[0], shape.num_chosen, o, experts, t)
                for i, o in zip(inputs, orders, strict=True)
            ]
            name = f"gate_up, {num_tokens} tokens, tile {block_m} {tuple(cut)}"
            time_calls(report, name, calls, gate_limit)
        for cut in downs:
            tiles = SortedTiles(block_m, gates[0], cut)
            calls = [
                lambda p=p, o=o, t=tiles: moe.down(p, o, experts, t)
                for p, o in zip(products, orders, strict=True)
            ]
            name = f"down, {num_tokens} tokens, tile {block_m} {tuple(cut)}"
            time_calls(report, name, calls, down_limit)
    weights_TK, ids_TK = inputs[0][1:]
    out_PL = torch.randn(ids_TK.numel(), shape.latent, device="cuda").bfloat16()
    sort_us = graph_time_us(partial(moe.sort_pairs, ids_TK, shape.num_experts, cuts[0][0]))
    combine_us = graph_time_us(partial(moe.combine, out_PL, weights_TK, ids_TK, None))
    print(f"{num_tokens} tokens: sort {sort_us:.2f} us, combine {combine_us:.2f} us", flush=True)


def time_door(report: Report, shape: Shape, experts: moe.Experts, num_tokens: int) -> None:
    inputs = tokens_of(shape, num_tokens)
    calls = [lambda i=i: routed_experts(i[0], i[1], i[2], *experts) for i in inputs]
    tiles = sorted_tiles(num_tokens * shape.num_chosen, shape.num_experts, is_float32=False)
    name = f"experts, {shape.name}, {num_tokens} tokens (tile {tiles.block_m})"
    time_calls(report, name, calls, sum(limits(shape, inputs)))


if __name__ == "__main__":
    sys.exit(run_command("moe", __doc__, {"check": check, "time": time, "cuts": time_cuts}))
