"""Estimated times against engines and kernels that were measured on H200s, within 25 %."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.h200.shapes import kimi_k3_draft, kimi_k3_slice
from stagecoach.config.draft import load_draft_config
from stagecoach.config.engine import EngineConfig, ResolvedConfig, SpeculativeConfig
from stagecoach.config.model import parse_model_config
from stagecoach.costs.engine_costs import decode_time, prefill_rate, prefill_seconds, step_costs
from stagecoach.costs.machine import H200, MACHINES
from stagecoach.costs.operators import OperatorKind, layer_operators
from stagecoach.costs.step_time import StepCosts, StepShape, Storage
from stagecoach.model.tiny import write_json
from stagecoach.pipeline.stage import whole_model
from stagecoach.planning.planner import boundary_bytes, prompt_chunks
from stagecoach.published import published_config, published_folder
from stagecoach.resolve import resolve

pytestmark = pytest.mark.cpu

_RESULTS = Path(__file__).parents[3] / "bench/results/h200"
_TOLERANCE = 0.25
# Prompts of 1,024 tokens and 256 out: so much is cached on average.
_CONTEXT = 1152
_SLICES = ("graphs", "drafts", "eager")


def recorded(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((_RESULTS / f"{name}.json").read_text())["results"]
    return results


def kimi_linear(**options: Any) -> ResolvedConfig:
    engine = EngineConfig(
        model=str(published_folder("kimi-linear-48b")),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        **options,
    )
    return resolve(engine, "cuda")


def layout(results: dict[str, Any]) -> ResolvedConfig:
    return kimi_linear(pipeline_parallel_size=results["pp"], tensor_parallel_size=results["tp"])


def is_close(estimate: float, measured: float) -> bool:
    return abs(estimate / measured - 1) <= _TOLERANCE


@pytest.mark.parametrize(
    ("name", "num_points"),
    [("kimi-linear-pp1-tp1", 4), ("kimi-linear-pp2-tp1", 3), ("kimi-linear-pp1-tp2", 1)],
)
def test_decode_steps(name: str, num_points: int) -> None:
    results = recorded(name)
    assert len(results["decode"]) >= num_points
    config = layout(results)
    costs = step_costs(config, H200)
    crossing = boundary_bytes(config)
    for point in results["decode"]:
        time = decode_time(config, costs, point["concurrency"], _CONTEXT, crossing)
        assert is_close(1e3 * time.seconds, point["step_ms"]), (
            f"{point['concurrency']} requests: {1e3 * time.seconds:.2f}, not {point['step_ms']:.2f}"
        )


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("kimi-linear-pp1-tp1", None),
        # From a tree that shared layers out so.
        ("kimi-linear-pp2-tp1-uneven", (15, 12)),
        ("kimi-linear-pp1-tp2-earlier", None),
        ("kimi-linear-pp1-long", None),
    ],
)
def test_prompts(name: str, partition: tuple[int, ...] | None) -> None:
    results = recorded(name)
    config = layout(results)
    if partition is not None:
        config = replace(config, partition=partition)
    costs = step_costs(config, H200)
    assert results["prefill"]
    for point in results["prefill"]:
        seconds = prefill_seconds(config, costs, prompt_chunks(config, point["length"]))
        assert is_close(seconds, point["seconds"]), (
            f"{point['length']} tokens: {seconds:.3f}, not {point['seconds']:.3f}"
        )


def slice_of(results: dict[str, Any], folder: Path) -> ResolvedConfig:
    """The first layers of Kimi-K3, which were measured with a draft of 7 tokens or without."""
    write_json(folder / "config.json", kimi_k3_slice())
    speculative = None
    if results["accept"]:
        (folder / "draft").mkdir()
        write_json(folder / "draft" / "config.json", kimi_k3_draft())
        speculative = SpeculativeConfig(model=str(folder / "draft"))
    engine = EngineConfig(
        model=str(folder),
        load_format="dummy",
        max_num_seqs=32,
        max_num_batched_tokens=8192,
        mxfp4_experts="decoded",
        speculative_config=speculative,
        enforce_eager=not results["has_graphs"],
    )
    return resolve(engine, "cuda")


@pytest.mark.parametrize("name", [f"kimi-k3-slice-pp1-{kind}" for kind in _SLICES])
def test_layers_of_kimi_k3_in_an_engine(name: str, tmp_path: Path) -> None:
    results = recorded(name)
    config = slice_of(results, tmp_path)
    costs = step_costs(config, H200)
    # What was measured is a token; of a round of drafts so many stand.
    tokens_of_round = results["accept"] or 1
    for point in results["decode"]:
        time = decode_time(config, costs, point["concurrency"], _CONTEXT, ())
        measured = point["step_ms"] * tokens_of_round
        assert is_close(1e3 * time.seconds, measured), (
            f"{point['concurrency']} requests: {1e3 * time.seconds:.2f}, not {measured:.2f}"
        )
    (prompt,) = results["prefill"]
    assert is_close(prefill_seconds(config, costs, (prompt["length"],)), prompt["seconds"])


def test_layers_alone() -> None:
    models = {
        "kimi-linear": parse_model_config(published_config("kimi-linear-48b")),
        "kimi-k3": parse_model_config(kimi_k3_slice()),
    }
    places = {"KDA + dense": 0, "KDA + MoE": 1, "MLA + MoE": 3}
    rows = recorded("layers")["rows"]
    assert len(rows) == 30
    for row in rows:
        costs = StepCosts(machine=H200, model=models[row["model"]])
        step = StepShape(num_windows=row["requests"], width=row["tokens"], context=4096)
        microseconds = 1e6 * costs.layer_seconds(places[row["layer"]], step)
        assert is_close(microseconds, row["us"]), f"{microseconds:.0f} us: {row}"


def test_many_prompts_keep_two_stages_busy() -> None:
    results = recorded("kimi-linear-pp2-tp1")
    (point,) = [item for item in results["decode"] if item["concurrency"] == 64]
    config = layout(results)
    rate = prefill_rate(config, step_costs(config, H200), 8192)
    assert is_close(rate, point["prefill_tokens_per_second"])


@pytest.mark.parametrize(
    ("kind", "name", "tp_size", "step"),
    [
        ("experts", "experts, Kimi-Linear, 1024 tokens (tile 64)", 1, 1024),
        ("experts", "experts, Kimi-Linear, 4096 tokens (tile 128)", 1, 4096),
        ("experts", "experts, Kimi-Linear, 8192 tokens (tile 128)", 1, 8192),
        ("experts", "experts, Kimi-Linear tp2, 8192 tokens (tile 128)", 2, 8192),
    ],
)
def test_experts_of_chunks(kind: str, name: str, tp_size: int, step: int) -> None:
    (row,) = [row for row in recorded("kernels-moe")["rows"] if row["name"] == name]
    model = parse_model_config(published_config("kimi-linear-48b"))
    costs = StepCosts(machine=H200, model=model, tp_size=tp_size)
    (experts,) = [item for item in layer_operators(model, 1) if item.kind is OperatorKind.EXPERTS]
    seconds = costs.operator_seconds(experts, StepShape(num_chunk_tokens=step))
    # Beside the products there is the order of the pairs.
    assert is_close(1e6 * seconds, row["us"] + 12 + 0.024 * step), kind


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 256, 1024, 8192])
@pytest.mark.parametrize(("name", "tp_size"), [("Kimi-K3 tp8", 8), ("Kimi-K3", 1)])
def test_packed_experts(name: str, tp_size: int, num_tokens: int) -> None:
    full_name = f"experts, {name}, {num_tokens} tokens"
    (row,) = [row for row in recorded("kernels-mxfp4")["rows"] if row["name"] == full_name]
    model = parse_model_config(published_config("kimi-k3"))
    storage = Storage(expert=0.53125, are_experts_packed=True)
    costs = StepCosts(machine=H200, model=model, tp_size=tp_size, storage=storage)
    (experts,) = [item for item in layer_operators(model, 1) if item.kind is OperatorKind.EXPERTS]
    seconds = costs.operator_seconds(experts, StepShape(num_windows=num_tokens))
    # Beside the products there is the choice of experts.
    choice_us = 4 if num_tokens == 1 else 12 + 0.024 * num_tokens
    assert is_close(1e6 * seconds, row["us"] + choice_us)


@pytest.mark.parametrize(
    ("num_windows", "us_name"),
    [
        (1, "windows 1 x 32 heads, W=1, r=0"),
        (8, "windows 8 x 32 heads, W=1, r=0"),
        (64, "windows 64 x 32 heads, W=1, r=0"),
        (256, "windows 256 x 32 heads, W=1, r=0"),
    ],
)
def test_recurrence_of_windows(num_windows: int, us_name: str) -> None:
    (row,) = [row for row in recorded("kernels-kda_window")["rows"] if row["name"] == us_name]
    model = parse_model_config(published_config("kimi-linear-48b"))
    (recurrence,) = [
        item for item in layer_operators(model, 0) if item.kind is OperatorKind.RECURRENCE
    ]
    costs = StepCosts(machine=H200, model=model)
    seconds = costs.operator_seconds(recurrence, StepShape(num_windows=num_windows))
    assert is_close(1e6 * seconds, row["us"])


def test_more_of_anything_takes_longer() -> None:
    model = parse_model_config(published_config("kimi-k3"))
    costs = StepCosts(machine=H200, model=model, tp_size=8)

    def seconds(costs: StepCosts = costs, **shape: Any) -> float:
        return costs.stage_seconds(whole_model(93), StepShape(**shape))

    plain = seconds(num_windows=8, context=4096)
    assert plain < seconds(num_windows=16, context=4096)
    assert plain < seconds(num_windows=8, context=65536)
    assert plain < seconds(num_windows=8, width=8, context=4096)
    packed = replace(costs, storage=Storage(expert=0.53125))
    assert seconds(packed, num_windows=8, context=4096) < plain
    slower = replace(costs, machine=MACHINES["h100"])
    assert seconds(slower, num_windows=8, context=4096) > plain


def test_a_draft_costs_time_on_the_last_stage() -> None:
    engine = EngineConfig(model=str(published_folder("kimi-k3")), tensor_parallel_size=8)
    config = resolve(engine, "cuda")
    costs = step_costs(config, H200)
    draft = load_draft_config(published_folder("kimi-k3-dspark"))
    drafting = replace(costs, draft=draft, num_draft_tokens=7)
    step = StepShape(num_windows=8, width=8, context=4096)
    assert drafting.last_stage_seconds(step) > 2 * costs.last_stage_seconds(step)
    assert drafting.layer_seconds(3, step) == costs.layer_seconds(3, step)
