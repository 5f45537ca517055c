"""Planned bytes against what workers on a CPU allocate, exactly."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from stagecoach import LLM
from stagecoach.config.engine import EngineConfig, ResolvedConfig, SpeculativeConfig
from stagecoach.model.tiny import TinyShape, kimi_k3_config, kimi_linear_config, write_tiny_model
from stagecoach.pipeline.stage import make_stages
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from stagecoach.planning.footprint import Footprints
from stagecoach.planning.memory import (
    divide,
    engine_memory,
    most_requests,
    planned_requests,
    pool_bytes,
)
from stagecoach.planning.planner import make_plan
from stagecoach.resolve import resolve
from stagecoach.runner.stage_runner import StageRunner

pytestmark = pytest.mark.cpu

_POOLS = 1 << 20


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied") / "model"
    shape = TinyShape(num_layers=3, mla_layers=(2,), q_lora_rank=None, is_head_tied=True)
    write_tiny_model(folder, kimi_linear_config(shape), seed=0)
    return folder


def resolved(model: str | Path = "tiny", **options: Any) -> ResolvedConfig:
    options = {
        "dtype": "float32",
        "max_num_seqs": 3,
        "max_model_len": 64,
        "block_size": 8,
        "kv_cache_memory_bytes": _POOLS,
        **options,
    }
    return resolve(EngineConfig(model=str(model), **options), "cpu")


def tensors_of(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object holds, through its attributes and containers."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif type(thing).__module__.startswith("stagecoach"):
        slots = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
        parts = [*vars(thing).values(), *slots] if hasattr(thing, "__dict__") else slots
    else:
        return
    for part in parts:
        yield from tensors_of(part, seen)


def allocated(*things: Any) -> int:
    """Bytes behind all tensors of some objects, each storage once."""
    seen: set[int] = set()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for thing in things
        for tensor in tensors_of(thing, seen)
    }
    return sum(storages.values())


def loaded_workers(config: ResolvedConfig) -> list[StageRunner]:
    topology = Topology.of(config.engine)
    mesh = ThreadMesh(topology)
    runners = [StageRunner(config, worker, mesh.links(worker)) for worker in topology.workers]
    with ThreadPoolExecutor(len(runners)) as pool:
        list(pool.map(lambda runner: runner.load(lambda done, in_all: None), runners))
    return runners


DRAFT = SpeculativeConfig(model="tiny-draft", num_speculative_tokens=3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "pipeline_parallel_size": 3},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "speculative_config": DRAFT},
        {"dtype": "float64", "tensor_parallel_size": 2, "kv_offloading_size": 0.001},
        {"mxfp4_experts": "packed", "pipeline_parallel_size": 2},
        {"online_quantization": "ptpc_fp8", "speculative_config": DRAFT},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_workers_allocate_what_was_planned(options: dict[str, Any]) -> None:
    config = resolved(**options)
    planned = engine_memory(config, 0)
    runners = loaded_workers(config)
    plan = divide(config, [runner.memory_needs() for runner in runners])
    assert planned.plan == plan
    stages = make_stages(config.partition)
    for rank, runner in enumerate(runners):
        stage, tp_rank = divmod(rank, config.engine.tensor_parallel_size)
        footprints = Footprints(config, tp_rank)
        assert runner._pass is not None
        model = runner._pass._model
        drafter = runner._last_stage._drafter if runner._last_stage else None
        weights = footprints.stage_bytes(stages[stage])
        drafted = footprints.drafter_bytes() if stages[stage].is_last else 0
        own = planned.ranks[stage]
        if tp_rank == 0:
            assert (own.weights, own.drafter) == (weights, drafted)
        assert weights.parameters == model.num_parameter_bytes
        # A draft's angles are made of its config and stay beside its weights.
        angles = allocated(drafter._model._rope) if drafter else 0
        assert weights.total + drafted + angles == allocated(model, drafter)
        runner.allocate(plan)
        assert runner._memory is not None
        assert pool_bytes(own, plan) == allocated(runner._memory.stage_memory)


def test_an_engine_has_the_planned_pages_and_slots() -> None:
    options: dict[str, Any] = {
        "dtype": "float32",
        "pipeline_parallel_size": 2,
        "max_num_seqs": 3,
        "max_model_len": 64,
        "block_size": 8,
        "kv_cache_memory_bytes": _POOLS,
        "num_threads": 1,
        "log_level": "warning",
    }
    made = make_plan(EngineConfig(model="tiny", device="cpu", **options), None)
    with LLM("tiny", device="cpu", distributed_executor_backend="uni", **options) as llm:
        stats = llm.stats()
    # An engine tells what it hands out; of each there is one that it does not.
    assert (made.num_pages - 1, made.num_slots - 1) == (stats.num_pages, stats.num_slots)
    assert made.fits and made.gpu is None and not made.decode


def test_a_tied_head_is_counted_once_where_it_is_the_embedding(tied_model: Path) -> None:
    for num_stages in (1, 2):
        config = resolved(tied_model, pipeline_parallel_size=num_stages)
        (first, *_) = make_stages(config.partition)
        (runner, *_) = loaded_workers(config)
        assert runner._pass is not None
        weights = Footprints(config).stage_bytes(first)
        assert weights.total == allocated(runner._pass._model)


def test_stages_are_sums_of_layers() -> None:
    config = resolved()
    footprints = Footprints(config)
    whole = footprints.stage_bytes(make_stages([9])[0]).parameters
    for partition in ([4, 5], [1, 1, 7], [3, 3, 3]):
        parts = [footprints.stage_bytes(stage).parameters for stage in make_stages(partition)]
        assert sum(parts) == whole


def test_patterns_that_name_one_layer_count_for_that_layer() -> None:
    options: dict[str, Any] = {"online_quantization": "ptpc_fp8"}
    config = resolved(**options, online_quantization_include=("*.layers.3.self_attn.*",))
    (whole,) = make_stages([9])
    (runner,) = loaded_workers(config)
    assert runner._pass is not None
    counted = Footprints(config).stage_bytes(whole).parameters
    assert counted == runner._pass._model.num_parameter_bytes
    assert counted < Footprints(resolved()).stage_bytes(whole).parameters


def test_on_a_gpu_the_parts_of_routers_are_counted() -> None:
    root = kimi_k3_config(TinyShape())
    text = root["text_config"]
    on_gpu = resolve(EngineConfig(model="tiny", load_format="dummy"), "cuda")
    (stage,) = make_stages(on_gpu.partition)
    derived = Footprints(on_gpu).stage_bytes(stage).derived
    keys = (2 * text["num_hidden_layers"] + 1) * text["hidden_size"] * 4
    routers = 8 * 3 * text["num_experts"] * text["hidden_size"] * 2
    assert on_gpu.dtype == "bfloat16" and derived == keys + routers


def test_requests_by_length() -> None:
    config = resolved(max_num_seqs=4, max_model_len=1024)
    memory = engine_memory(config, 0)
    assert memory.plan is not None
    (rank,) = memory.ranks
    for length in (8, 64, 1024):
        most = most_requests(config, memory, length)
        pages = -(-length // 8)

        def needed(count: int, pages: int = pages) -> int:
            slots = (1 + count) * rank.needs.bytes_per_slot
            return slots + (1 + count * pages) * rank.needs.bytes_per_page

        assert needed(most) <= _POOLS < needed(most + 1)
        assert 1 <= planned_requests(config, memory.plan, length) <= min(4, max(1, most))
