"""What a plan estimates of a GPU's memory against what engines told of it when they started."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.h200.shapes import kimi_k3_draft, kimi_k3_slice, kimi_linear_48b
from stagecoach.config.engine import EngineConfig, ResolvedConfig, SpeculativeConfig
from stagecoach.costs.machine import H200
from stagecoach.model.tiny import write_json
from stagecoach.planning.memory import engine_memory
from stagecoach.resolve import resolve

pytestmark = pytest.mark.cpu

_RESULTS = Path(__file__).parents[3] / "bench/results/h200/memory.json"
_ROWS: list[dict[str, Any]] = json.loads(_RESULTS.read_text())["results"]["rows"]
_GIB = 2**30


def config_of(row: dict[str, Any], folder: Path, **options: Any) -> ResolvedConfig:
    shape = {"kimi-k3-slice": kimi_k3_slice, "kimi-linear": kimi_linear_48b}[row["shape"]]
    write_json(folder / "config.json", shape())
    speculative = None
    if row["draft"]:
        (folder / "draft").mkdir()
        write_json(folder / "draft" / "config.json", kimi_k3_draft())
        speculative = SpeculativeConfig(model=str(folder / "draft"))
    most = row["max_num_seqs"]
    sizes = {8: (1,), 32: (1, 8, 32), 256: (8, 64, 256)}[most]
    engine = EngineConfig(
        model=str(folder),
        load_format="dummy",
        tensor_parallel_size=row["tp"],
        max_num_seqs=most,
        max_num_batched_tokens=row["max_num_batched_tokens"],
        max_model_len=row["max_model_len"],
        gpu_memory_utilization=row["gpu_memory_utilization"],
        cudagraph_capture_sizes=sizes,
        enable_prefix_caching=False,
        mxfp4_experts="decoded",
        speculative_config=speculative,
        **options,
    )
    return resolve(engine, "cuda")


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: f"{row['shape']},{row['max_num_seqs']}")
def test_what_is_left_for_pages_and_slots(row: dict[str, Any], tmp_path: Path) -> None:
    memory = engine_memory(config_of(row, tmp_path), H200.memory_bytes)
    (rank,) = memory.ranks
    assert memory.fits
    # Of the whole GPU, and so of what is allocated, within 2 %.
    measured = row["available"] * _GIB
    assert abs(rank.needs.available_bytes - measured) < 0.02 * H200.memory_bytes
    in_use = H200.memory_bytes - row["free"] * _GIB
    held = rank.weights.total + rank.drafter + rank.reserve.context
    assert held == pytest.approx(in_use, rel=0.02)
    assert rank.reserve.activations == pytest.approx(row["activations"] * _GIB, rel=0.25)
    assert rank.reserve.graphs == pytest.approx(row["captured"] * _GIB, abs=0.2 * _GIB)


def test_more_tokens_and_requests_take_more(tmp_path: Path) -> None:
    row = _ROWS[-1]

    def reserve(folder: str, **changed: Any) -> Any:
        (tmp_path / folder).mkdir()
        config = config_of({**row, **changed}, tmp_path / folder)
        return engine_memory(config, H200.memory_bytes).ranks[0].reserve

    plain = reserve("plain")
    fewer = reserve("fewer", max_num_seqs=8)
    assert fewer.activations < plain.activations and fewer.graphs < plain.graphs
    alone = reserve("alone", tp=1)
    assert alone.context < plain.context


def test_a_cpu_sets_nothing_aside(tmp_path: Path) -> None:
    config = config_of(_ROWS[0], tmp_path)
    on_cpu = resolve(config.engine, "cpu")
    assert engine_memory(on_cpu, 0).ranks[0].reserve.total == 0


def test_eager_engines_have_no_graphs(tmp_path: Path) -> None:
    config = config_of(_ROWS[0], tmp_path, enforce_eager=True)
    assert engine_memory(config, H200.memory_bytes).ranks[0].reserve.graphs == 0
