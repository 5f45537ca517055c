"""Each kind of split layer: the ranks together compute the whole product."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor

from stagecoach.config.quantization import NamePatterns
from stagecoach.kernels.linear import linear
from stagecoach.kernels.quantization import Fp8Weight, quantize_fp8
from stagecoach.model.parallel_linear import (
    ColumnLinear,
    FusedLinear,
    LinearPart,
    RowLinear,
    TensorParallel,
    VocabEmbedding,
    VocabHead,
    VocabShard,
)
from stagecoach.model.quantization import store_fp8
from stagecoach.model.weight_formats import WeightFormats
from stagecoach.model.weight_slots import WeightScope
from tests.cpu.model.model_runs import thread_ranks

pytestmark = [pytest.mark.cpu, pytest.mark.parametrize("tp_size", [1, 2, 4])]

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def on_each_rank(
    tp_size: int,
    whole: dict[str, Tensor],
    run: Callable[[WeightScope, TensorParallel], Any],
    fp8_names: tuple[str, ...] = (),
) -> list[Any]:
    """Build a module on every rank, fill its slots from whole tensors, run it."""

    def call(tp: TensorParallel) -> Any:
        formats = WeightFormats(fp8=NamePatterns(fp8_names, ("none",)))
        scope = WeightScope(torch.float64, tp_rank=tp.rank, tp_size=tp.size, formats=formats)
        module = run(scope, tp)
        scope.check_covered()
        for slot in scope.slots:
            assert tuple(whole[slot.name].shape) == slot.shape
            part = whole[slot.name][slot.region]
            if isinstance(slot.target, Fp8Weight):
                store_fp8(slot.target, part)
            else:
                slot.target.copy_(part)
        return module(tp)

    with ThreadPoolExecutor(tp_size) as pool:
        return list(pool.map(call, thread_ranks(tp_size)))


def test_fused_columns(tp_size: int) -> None:
    whole = {"q.weight": random(8, 6), "k.weight": random(8, 6), "low.weight": random(3, 6)}
    x = random(5, 6)

    def build(scope: WeightScope, tp: TensorParallel) -> Callable[[TensorParallel], Any]:
        parts = (
            LinearPart(("q", "k"), 8 // tp.size, is_split=True),
            LinearPart(("low",), 3, is_split=False),
        )
        module = FusedLinear(scope, 6, parts)
        return lambda _: module(x)

    results = on_each_rank(tp_size, whole, build)
    share = 8 // tp_size
    for name, offset in (("q.weight", 0), ("k.weight", share)):
        joined = torch.cat([qk[:, offset : offset + share] for qk, _ in results], dim=1)
        torch.testing.assert_close(joined, x @ whole[name].T, rtol=0, atol=1e-12)
    for _, low in results:
        torch.testing.assert_close(low, x @ whole["low.weight"].T, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "fp8_names",
    [("k.*",), ("q.*", "low.*"), ("q.*", "k.*"), ("*",)],
    ids=lambda names: ",".join(names).replace(".*", ""),
)
def test_fused_columns_of_two_formats(tp_size: int, fp8_names: tuple[str, ...]) -> None:
    """Each projection is what it is alone, and its outputs are where they were."""
    whole = {"q.weight": random(8, 6), "k.weight": random(8, 6), "low.weight": random(3, 6)}
    x = random(5, 6)

    def build(scope: WeightScope, tp: TensorParallel) -> Callable[[TensorParallel], Any]:
        parts = (
            LinearPart(("q", "k"), 8 // tp.size, is_split=True),
            LinearPart(("low",), 3, is_split=False),
        )
        module = FusedLinear(scope, 6, parts)
        assert module.is_one_product == (fp8_names == ("*",))
        return lambda _: module(x)

    def alone(name: str) -> Tensor:
        is_fp8 = any(fnmatchcase(name, pattern) for pattern in fp8_names)
        return linear(x, quantize_fp8(whole[name]) if is_fp8 else whole[name])

    results = on_each_rank(tp_size, whole, build, fp8_names)
    share = 8 // tp_size
    for name, offset in (("q.weight", 0), ("k.weight", share)):
        joined = torch.cat([qk[:, offset : offset + share] for qk, _ in results], dim=1)
        torch.testing.assert_close(joined, alone(name), rtol=0, atol=1e-12)
    for _, low in results:
        torch.testing.assert_close(low, alone("low.weight"), rtol=0, atol=1e-12)


def test_a_row_split_quantises_the_columns_of_each_rank(tp_size: int) -> None:
    whole = {"down.weight": random(7, 8) * torch.logspace(-3, 3, 8, dtype=torch.float64)}
    x = random(5, 8)

    def build(scope: WeightScope, tp: TensorParallel) -> Callable[[TensorParallel], Any]:
        down = RowLinear(scope, "down", (7, 8 // tp.size))
        return lambda tp: tp.all_reduce(down(x.chunk(tp.size, dim=1)[tp.rank]))

    parts = zip(x.chunk(tp_size, 1), whole["down.weight"].chunk(tp_size, 1), strict=True)
    expected = sum(linear(x_part, quantize_fp8(part)) for x_part, part in parts)
    for result in on_each_rank(tp_size, whole, build, ("*",)):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_a_column_then_a_row_split(tp_size: int) -> None:
    whole = {"up.weight": random(8, 6), "down.weight": random(7, 8)}
    x = random(5, 6)

    def build(scope: WeightScope, tp: TensorParallel) -> Callable[[TensorParallel], Any]:
        up = ColumnLinear(scope, "up", (8 // tp.size, 6), is_split=True)
        down = RowLinear(scope, "down", (7, 8 // tp.size))
        return lambda tp: tp.all_reduce(down(up(x).tanh()))

    expected = (x @ whole["up.weight"].T).tanh() @ whole["down.weight"].T
    for result in on_each_rank(tp_size, whole, build):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_embedding", [True, False], ids=["embedding", "head"])
@pytest.mark.parametrize("vocab_size", [8, 9, 11, 5])
def test_embedding_and_head(tp_size: int, vocab_size: int, *, is_embedding: bool) -> None:
    whole = {"e.weight": random(vocab_size, 6)}
    token_ids = torch.arange(vocab_size).flip(0)

    def build(scope: WeightScope, tp: TensorParallel) -> Callable[[TensorParallel], Any]:
        shard = VocabShard(scope, "e", (vocab_size, 6), is_embedding=is_embedding)
        embedding, head = VocabEmbedding(shard, tp), VocabHead(shard, tp)

        def run(_: TensorParallel) -> tuple[Tensor, Tensor]:
            rows = embedding(token_ids)
            return rows, head(rows)

        return run

    for rows, logits in on_each_rank(tp_size, whole, build):
        assert torch.equal(rows, whole["e.weight"].flip(0))
        expected = whole["e.weight"].flip(0) @ whole["e.weight"].T
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
