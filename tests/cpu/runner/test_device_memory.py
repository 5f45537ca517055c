"""Pages and slots as tensors: as many bytes as announced, and NaN exactly where asked."""

from collections.abc import Callable

import psutil
import pytest
import torch
from torch import Tensor

from stagecoach.cache.memory_moves import MemoryMoves, Transfer
from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config.engine import ResolvedConfig
from stagecoach.runner.device_memory import DeviceMemory, memory_needs
from stagecoach.schedule.step_plan import Comparison, StepPlan
from tests.cpu.engine.fakes import resolved
from tests.cpu.runner.memories import BLOCK_SIZE, pages_of, slots_of, speculating, stage_of

pytestmark = pytest.mark.cpu

PLAN = MemoryPlan(num_pages=6, num_slots=5)


def nan_indices(tensor: Tensor) -> list[int]:
    """Which entries of dimension 0 are NaN throughout; others must hold none at all."""
    if not tensor.numel():
        return []
    is_nan = tensor.isnan().flatten(1)
    assert torch.equal(is_nan.any(1), is_nan.all(1)), "half of an entry is poisoned"
    return is_nan.any(1).nonzero().flatten().tolist()


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
    slot_bytes = sum(tensor.nbytes for tensor in slots_of(memory.stage_memory))
    page_bytes = sum(tensor.nbytes for tensor in pages_of(memory.stage_memory))
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


def test_what_a_device_has_left_is_spent_unless_a_budget_is_given() -> None:
    config = resolved(kv_cache_memory_bytes=12345)
    assert memory_needs(config, stage_of(config, 0), torch.float32, 999).available_bytes == 12345
    config = resolved()
    assert memory_needs(config, stage_of(config, 0), torch.float32, 999).available_bytes == 999


@pytest.mark.parametrize("is_debugging", [False, True])
def test_memory_that_is_reset_is_as_new_at_the_same_addresses(is_debugging: bool) -> None:
    config = resolved(debug_poison=is_debugging)
    memory, new = (DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN) for _ in range(2))

    def tensors(of: DeviceMemory) -> list[Tensor]:
        return [*slots_of(of.stage_memory), *pages_of(of.stage_memory)]

    addresses = [tensor.data_ptr() for tensor in tensors(memory)]
    for tensor in tensors(memory):
        tensor.fill_(3.0)
    memory.reset()
    assert [tensor.data_ptr() for tensor in tensors(memory)] == addresses
    for ours, theirs in zip(tensors(memory), tensors(new), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


MAYBE_SPECULATING = pytest.mark.parametrize(
    "config_of", [resolved, lambda **options: speculating(resolved(**options))], ids=["", "drafts"]
)


@MAYBE_SPECULATING
def test_fresh_memory_is_zero(config_of: Callable[..., ResolvedConfig]) -> None:
    config = config_of()
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    for tensor in (*slots_of(memory.stage_memory), *pages_of(memory.stage_memory)):
        assert not tensor.any()


@MAYBE_SPECULATING
def test_in_debug_mode_all_but_page_0_and_slot_0_is_nan(
    config_of: Callable[..., ResolvedConfig],
) -> None:
    config = config_of(debug_poison=True)
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    for tensor in slots_of(memory.stage_memory):
        assert nan_indices(tensor) == ([1, 2, 3, 4] if tensor.numel() else [])
        assert not tensor[0].any()
    for tensor in pages_of(memory.stage_memory):
        assert nan_indices(tensor) == [1, 2, 3, 4, 5]
        assert not tensor[0].any()


@pytest.mark.parametrize("is_debugging", [False, True])
def test_host_memory_is_as_much_as_the_plan_says_and_poisoned_throughout(
    *, is_debugging: bool
) -> None:
    config = speculating(resolved(debug_poison=is_debugging))
    plan = MemoryPlan(num_pages=6, num_slots=5, num_host_pages=3, num_host_slots=2)
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, plan)
    needs = memory_needs(config, stage_of(config, 0), torch.float32)
    slots, pages = slots_of(memory.host_memory), pages_of(memory.host_memory)
    assert sum(tensor.nbytes for tensor in slots) == 2 * needs.bytes_per_slot
    assert sum(tensor.nbytes for tensor in pages) == 3 * needs.bytes_per_page
    for tensor in (*slots, *pages):
        assert not is_debugging or tensor.isnan().all()
        assert is_debugging or not tensor.any()


@MAYBE_SPECULATING
def test_without_a_host_tier_nothing_is_allocated_for_it(
    config_of: Callable[..., ResolvedConfig],
) -> None:
    config = config_of(debug_poison=True)
    host = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN).host_memory
    assert sum(tensor.nbytes for tensor in (*slots_of(host), *pages_of(host))) == 0


@pytest.mark.parametrize("is_debugging", [False, True])
def test_a_plan_scrubs_with_nan_in_debug_mode_and_else_with_zeros(*, is_debugging: bool) -> None:
    config = speculating(resolved(debug_poison=is_debugging))
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    tensors = (*slots_of(memory.stage_memory), *pages_of(memory.stage_memory))
    for tensor in tensors:
        tensor.fill_(1.0)
    memory.prepare(
        StepPlan(step=0, segments=(), moves=MemoryMoves(scrub_pages=(3,), scrub_slots=(3, 2)))
    )
    for tensor in slots_of(memory.stage_memory):
        assert not (tensor[[2, 3]] == 1.0).any() and (tensor[[0, 1, 4]] == 1.0).all()
        assert tensor[[2, 3]].isnan().all() == is_debugging
    for tensor in pages_of(memory.stage_memory):
        assert not (tensor[3] == 1.0).any() and (tensor[[0, 1, 2, 4, 5]] == 1.0).all()
        assert tensor[3].isnan().all() == is_debugging


def test_states_are_compared_after_the_moves() -> None:
    config = resolved()
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    for tensor in slots_of(memory.stage_memory):
        tensor[2] = 1.0
    compare = (Comparison(slot=2, replay=0, other_slot=3),)
    assert memory.prepare(StepPlan(step=0, segments=(), comparisons=compare)) == (1.0,)
    moves = MemoryMoves(scrub_slots=(2,))
    assert memory.prepare(StepPlan(step=1, segments=(), moves=moves, comparisons=compare)) == (0.0,)


def test_in_debug_mode_a_plan_is_checked_before_it_touches_anything() -> None:
    config = resolved(debug_poison=True)
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    moves = MemoryMoves(scrub_pages=(1,), load_slots=(Transfer(1, 0),))
    with pytest.raises(AssertionError, match="host slot 0 holds nothing"):
        memory.prepare(StepPlan(step=0, segments=(), moves=moves))
