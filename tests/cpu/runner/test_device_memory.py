"""Pages and slots as tensors: as many bytes as announced, and NaN exactly where asked."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config import ResolvedConfig, ResolvedSpeculation
from stagecoach.draft_config import DraftGqaConfig
from stagecoach.model.stage_memory import KdaMemory
from stagecoach.pipeline.stage import Stage, make_stages
from stagecoach.runner.device_memory import DeviceMemory, memory_needs
from tests.cpu.engine.fakes import resolved
from tests.cpu.model.small_draft import small_draft

pytestmark = pytest.mark.cpu

PLAN = MemoryPlan(num_pages=6, num_slots=5)
BLOCK_SIZE = 4


def speculating(config: ResolvedConfig, num_speculative_tokens: int = 3) -> ResolvedConfig:
    """The same engine with a draft of two layers, with 4 key-value heads of 8."""
    speculation = ResolvedSpeculation(
        draft=small_draft(DraftGqaConfig(num_heads=4, num_kv_heads=4, head_dim=8), num_layers=2),
        checkpoint=Path("nowhere"),
        num_speculative_tokens=num_speculative_tokens,
        acceptance="shared",
        has_confidence_schedule=True,
        has_watchdog=True,
        synthetic_acceptance_length=None,
    )
    return dataclasses.replace(config, speculation=speculation)


def slots_of(memory: DeviceMemory) -> list[Tensor]:
    return [
        tensor
        for layer in memory.stage_memory.layers.values()
        if isinstance(layer, KdaMemory)
        for tensor in layer
    ]


def pages_of(memory: DeviceMemory) -> list[Tensor]:
    """Rows of each MLA layer and of each draft layer by page: [pages, rows of a page, width]."""
    stage_memory = memory.stage_memory
    pools = [
        layer.cache_RD for layer in stage_memory.layers.values() if not isinstance(layer, KdaMemory)
    ]
    if stage_memory.draft_rows_YRD is not None:
        pools += stage_memory.draft_rows_YRD.unbind(0)
    return [pool.unflatten(0, (-1, BLOCK_SIZE)) for pool in pools]


def nan_indices(tensor: Tensor) -> list[int]:
    """Which entries of dimension 0 are NaN throughout; others must hold none at all."""
    if not tensor.numel():
        return []
    is_nan = tensor.isnan().flatten(1)
    assert torch.equal(is_nan.any(1), is_nan.all(1)), "half of an entry is poisoned"
    return is_nan.any(1).nonzero().flatten().tolist()


def stage_of(config: ResolvedConfig, index: int) -> Stage:
    return make_stages(config.partition)[index]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("is_speculating", [False, True])
def test_what_is_allocated_has_the_announced_size(
    is_speculating: bool, index: int, dtype: torch.dtype, tp_size: int
) -> None:
    # The last stage has no KDA layer, the first no MLA layer.
    config = resolved(
        pipeline_parallel_size=3, tensor_parallel_size=tp_size, pp_partition=(3, 4, 2)
    )
    plain_needs = memory_needs(config, stage_of(config, index), dtype)
    if is_speculating:
        config = speculating(config)
    stage = stage_of(config, index)
    needs = memory_needs(config, stage, dtype)
    memory = DeviceMemory(config, stage, dtype, PLAN)
    slot_bytes = sum(tensor.nbytes for tensor in slots_of(memory))
    page_bytes = sum(tensor.nbytes for tensor in pages_of(memory))
    assert slot_bytes == PLAN.num_slots * needs.bytes_per_slot
    assert page_bytes == PLAN.num_pages * needs.bytes_per_page
    assert set(memory.stage_memory.layers) == set(stage.layers)
    assert (needs.bytes_per_page == 0) == (index == 0)
    assert (needs.bytes_per_slot == 0) == (index == 2)
    draft_bytes = 2 * BLOCK_SIZE * 2 * 4 // tp_size * 8 * dtype.itemsize
    has_drafter = is_speculating and index == 2
    assert needs.bytes_per_page - plain_needs.bytes_per_page == has_drafter * draft_bytes
    has_record = is_speculating and index < 2
    assert (needs.bytes_per_slot > plain_needs.bytes_per_slot) == has_record


def test_an_explicit_budget_is_what_a_worker_may_spend() -> None:
    config = resolved(kv_cache_memory_bytes=12345, pipeline_parallel_size=2)
    assert memory_needs(config, stage_of(config, 0), torch.float32).available_bytes == 12345


def test_workers_share_a_quarter_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Free:
        available = 1 << 30

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Free)
    config = resolved(pipeline_parallel_size=2, tensor_parallel_size=2)
    assert memory_needs(config, stage_of(config, 0), torch.float32).available_bytes == 1 << 26


MAYBE_SPECULATING = pytest.mark.parametrize(
    "config_of", [resolved, lambda **options: speculating(resolved(**options))], ids=["", "drafts"]
)


@MAYBE_SPECULATING
def test_fresh_memory_is_zero(config_of: Callable[..., ResolvedConfig]) -> None:
    config = config_of()
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    for tensor in (*slots_of(memory), *pages_of(memory)):
        assert not tensor.any()


@MAYBE_SPECULATING
def test_in_debug_mode_all_but_page_0_and_slot_0_is_nan(
    config_of: Callable[..., ResolvedConfig],
) -> None:
    config = config_of(debug_poison=True)
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    for tensor in slots_of(memory):
        assert nan_indices(tensor) == ([1, 2, 3, 4] if tensor.numel() else [])
        assert not tensor[0].any()
    for tensor in pages_of(memory):
        assert nan_indices(tensor) == [1, 2, 3, 4, 5]
        assert not tensor[0].any()


@settings(deadline=None, max_examples=30)
@given(pages=st.sets(st.integers(1, 5)), slots=st.sets(st.integers(1, 4)))
def test_poison_fills_exactly_what_it_names(pages: set[int], slots: set[int]) -> None:
    config = speculating(resolved())
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    for tensor in (*slots_of(memory), *pages_of(memory)):
        tensor.fill_(1.0)
    memory.poison(list(pages), list(slots))
    assert slots_of(memory) and pages_of(memory)
    for tensor in slots_of(memory):
        assert nan_indices(tensor) == sorted(slots)
        assert (tensor[sorted(set(range(5)) - slots)] == 1.0).all()
    for tensor in pages_of(memory):
        assert nan_indices(tensor) == sorted(pages)
        assert (tensor[sorted(set(range(6)) - pages)] == 1.0).all()
