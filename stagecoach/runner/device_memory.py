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
from stagecoach.config import ResolvedConfig
from stagecoach.model.stage_memory import MemoryShapes, StageMemory, memory_shapes
from stagecoach.pipeline.stage import Stage
from stagecoach.runner.memory_moves import MovablePools
from stagecoach.runner.slot_tags import SlotTags
from stagecoach.runner.state_differences import state_differences
from stagecoach.schedule.step_plan import StepPlan

# Share of the free memory that all workers of this host take for pages and slots, at most.
_FREE_MEMORY_SHARE = 0.25


def memory_needs(config: ResolvedConfig, stage: Stage, dtype: torch.dtype) -> MemoryNeeds:
    """What a page and a slot cost with this worker's layers, and what it may spend."""
    engine = config.engine
    shapes = _shapes(config, stage, dtype)
    available = engine.kv_cache_memory_bytes
    if available is None:
        free = psutil.virtual_memory().available
        available = int(free * _FREE_MEMORY_SHARE / engine.num_workers)
    return MemoryNeeds(
        bytes_per_page=shapes.bytes_per_page(engine.block_size),
        bytes_per_slot=shapes.bytes_per_slot,
        available_bytes=available,
    )


class DeviceMemory:
    """Pages and slots of one worker, on its device and in the host tier, allocated once."""

    def __init__(
        self, config: ResolvedConfig, stage: Stage, dtype: torch.dtype, plan: MemoryPlan
    ) -> None:
        is_debugging, block_size = config.engine.debug_poison, config.engine.block_size
        shapes = _shapes(config, stage, dtype)
        device = config.engine.device
        self.stage_memory: StageMemory = shapes.allocate(
            plan.num_slots, plan.num_pages * block_size, device
        )
        self.host_memory: StageMemory = shapes.allocate(
            plan.num_host_slots, plan.num_host_pages * block_size, is_pinned=device != "cpu"
        )
        fill = torch.nan if is_debugging else 0.0
        self._pools = MovablePools(self.stage_memory, block_size, fill)
        self._host_pools = MovablePools(self.host_memory, block_size, fill)
        self._tags = SlotTags() if is_debugging else None
        if is_debugging:
            self._pools.scrub(
                [page for page in range(plan.num_pages) if page != NULL_PAGE],
                [slot for slot in range(plan.num_slots) if slot != ZERO_SLOT],
            )
            self._host_pools.scrub(range(plan.num_host_pages), range(plan.num_host_slots))

    def prepare(self, plan: StepPlan) -> tuple[float, ...]:
        """Move what the plan moves, then compare what it compares.

        Returns:
            One a comparison, as `state_differences` measures it.

        Raises:
            AssertionError: in debug mode, a slot holds another state than the plan says.
        """
        if self._tags is not None:
            self._tags.follow(plan)
        if plan.moves != NO_MOVES:
            self._pools.apply(plan.moves, self._host_pools)
        return state_differences(self.stage_memory, plan.comparisons)


def _shapes(config: ResolvedConfig, stage: Stage, dtype: torch.dtype) -> MemoryShapes:
    return memory_shapes(
        config.model,
        stage,
        config.engine.tensor_parallel_size,
        dtype,
        config.num_draft_tokens,
        config.speculation.draft if config.speculation else None,
    )
