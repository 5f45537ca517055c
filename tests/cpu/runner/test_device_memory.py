"""Pages and slots as tensors: as many bytes as announced, and NaN exactly where asked."""

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config import ResolvedConfig
from stagecoach.model.stage_memory import KdaMemory
from stagecoach.pipeline.stage import Stage, make_stages
from stagecoach.runner.device_memory import DeviceMemory, memory_needs
from tests.cpu.engine.fakes import resolved

pytestmark = pytest.mark.cpu

PLAN = MemoryPlan(num_pages=6, num_slots=5)
BLOCK_SIZE = 4


def slots_of(memory: DeviceMemory) -> list[Tensor]:
    return [
        tensor
        for layer in memory.stage_memory.layers.values()
        if isinstance(layer, KdaMemory)
        for tensor in layer
    ]


def pages_of(memory: DeviceMemory) -> list[Tensor]:
    """Each MLA layer's rows by page: [pages, rows of a page, width]."""
    return [
        layer.cache_RD.unflatten(0, (-1, BLOCK_SIZE))
        for layer in memory.stage_memory.layers.values()
        if not isinstance(layer, KdaMemory)
    ]


def nan_indices(tensor: Tensor) -> list[int]:
    """Which entries of dimension 0 are NaN throughout; others must hold none at all."""
    is_nan = tensor.isnan().flatten(1)
    assert torch.equal(is_nan.any(1), is_nan.all(1)), "half of an entry is poisoned"
    return is_nan.any(1).nonzero().flatten().tolist()


def stage_of(config: ResolvedConfig, index: int) -> Stage:
    return make_stages(config.partition)[index]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_what_is_allocated_has_the_announced_size(
    index: int, dtype: torch.dtype, tp_size: int
) -> None:
    # The last stage has no KDA layer, the first no MLA layer.
    config = resolved(
        pipeline_parallel_size=3, tensor_parallel_size=tp_size, pp_partition=(3, 4, 2)
    )
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


def test_an_explicit_budget_is_what_a_worker_may_spend() -> None:
    config = resolved(kv_cache_memory_bytes=12345, pipeline_parallel_size=2)
    assert memory_needs(config, stage_of(config, 0), torch.float32).available_bytes == 12345


def test_workers_share_a_quarter_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Free:
        available = 1 << 30

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Free)
    config = resolved(pipeline_parallel_size=2, tensor_parallel_size=2)
    assert memory_needs(config, stage_of(config, 0), torch.float32).available_bytes == 1 << 26


def test_fresh_memory_is_zero() -> None:
    config = resolved()
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    for tensor in (*slots_of(memory), *pages_of(memory)):
        assert not tensor.any()


def test_in_debug_mode_all_but_page_0_and_slot_0_is_nan() -> None:
    config = resolved(debug_poison=True)
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    for tensor in slots_of(memory):
        assert nan_indices(tensor) == [1, 2, 3, 4]
        assert not tensor[0].any()
    for tensor in pages_of(memory):
        assert nan_indices(tensor) == [1, 2, 3, 4, 5]
        assert not tensor[0].any()


@settings(deadline=None, max_examples=30)
@given(pages=st.sets(st.integers(1, 5)), slots=st.sets(st.integers(1, 4)))
def test_poison_fills_exactly_what_it_names(pages: set[int], slots: set[int]) -> None:
    config = resolved()
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
