"""The tensors behind pages and state slots of one worker.

Owns their allocation, on the device and in the host tier, and the order of what a plan does to
them before its segments run; in debug mode also the NaN in all that is free. Numbers come from
the plan; nothing here knows which request holds what.
"""

import psutil
import torch

from stagecoach.cache.memory_moves import NO_MOVES
from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan
from stagecoach.cache.page_pool import NULL_PAGE
from stagecoach.cache.state_slots import ZERO_SLOT
from stagecoach.config.engine import ResolvedConfig
from stagecoach.model.stage_memory import MemoryShapes, StageMemory, memory_shapes
from stagecoach.pipeline.stage import Stage
from stagecoach.runner.memory_moves import MovablePools
from stagecoach.runner.newest_tokens import NewestTokens
from stagecoach.runner.slot_tags import SlotTags
from stagecoach.runner.state_differences import state_differences
from stagecoach.schedule.step_plan import StepPlan

# Share of the free memory that all workers of this host take for pages and slots, at most.
_FREE_MEMORY_SHARE = 0.25
_ROW_DTYPES = {None: None, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def memory_needs(
    config: ResolvedConfig,
    stage: Stage,
    dtype: torch.dtype,
    measured_bytes: int | None = None,
    gpu_bytes: int = 0,
) -> MemoryNeeds:
    """What a page and a slot cost with this worker's layers, and what it may spend.

    Args:
        measured_bytes: what an accelerator has left for pages and slots; None on CPU.
        gpu_bytes: the worker's part of all bytes of that accelerator.
    """
    engine = config.engine
    shapes = shapes_of(config, stage, dtype)
    is_measured = engine.kv_cache_memory_bytes is None and measured_bytes is not None
    available = measured_bytes if is_measured else engine.kv_cache_memory_bytes
    if available is None:
        free = psutil.virtual_memory().available
        available = int(free * _FREE_MEMORY_SHARE / engine.num_workers)
    return MemoryNeeds(
        bytes_per_page=shapes.bytes_per_page(engine.block_size),
        bytes_per_slot=shapes.bytes_per_slot,
        available_bytes=available,
        gpu_bytes=gpu_bytes if is_measured else 0,
        gpu_share=engine.gpu_memory_utilization if is_measured else 0.0,
    )


class DeviceMemory:
    """Pages and slots of one worker, on its device and in the host tier, allocated once."""

    def __init__(
        self, config: ResolvedConfig, stage: Stage, dtype: torch.dtype, plan: MemoryPlan
    ) -> None:
        is_debugging, block_size = config.engine.debug_poison, config.engine.block_size
        shapes = shapes_of(config, stage, dtype)
        device = config.device
        self.plan = plan
        self.stage_memory: StageMemory = shapes.allocate(
            plan.num_slots, plan.num_pages * block_size, device
        )
        self.host_memory: StageMemory = shapes.allocate(
            plan.num_host_slots, plan.num_host_pages * block_size, is_pinned=device != "cpu"
        )
        fill = torch.nan if is_debugging else 0.0
        self._pools = MovablePools(self.stage_memory, block_size, fill)
        self._host_pools = MovablePools(self.host_memory, block_size, fill)
        self._tags: SlotTags | None = None
        self._is_debugging = is_debugging
        if is_debugging:
            self._poison()
            self._host_pools.scrub(range(plan.num_host_pages), range(plan.num_host_slots))

    def reset(self) -> None:
        """As it was when allocated, at the same addresses; nothing was stored on the host yet."""
        self._pools.clear()
        if self._is_debugging:
            self._poison()

    def prepare(self, plan: StepPlan, newest: NewestTokens | None = None) -> tuple[float, ...]:
        """Move what the plan moves, then compare what it compares.

        Args:
            newest: what chained windows compute, which debug mode must know.

        Returns:
            One a comparison, as `state_differences` measures it.

        Raises:
            AssertionError: in debug mode, a slot holds another state than the plan says.
        """
        if self._tags is not None:
            self._tags.follow(plan if newest is None else newest.told(plan))
        if plan.moves != NO_MOVES:
            self._pools.apply(plan.moves, self._host_pools)
        return state_differences(self.stage_memory, plan.comparisons)

    def _poison(self) -> None:
        self._tags = SlotTags()
        self._pools.scrub(
            [page for page in range(self.plan.num_pages) if page != NULL_PAGE],
            [slot for slot in range(self.plan.num_slots) if slot != ZERO_SLOT],
        )


def shapes_of(config: ResolvedConfig, stage: Stage, dtype: torch.dtype) -> MemoryShapes:
    """What one slot and one cache row of this worker take."""
    return memory_shapes(
        config.model,
        stage,
        config.engine.tensor_parallel_size,
        dtype,
        config.num_draft_tokens,
        config.speculation.draft if config.speculation else None,
        _ROW_DTYPES[config.cache_dtype],
        _ROW_DTYPES[config.draft_cache_dtype],
    )
