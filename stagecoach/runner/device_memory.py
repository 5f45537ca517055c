"""The tensors behind pages and state slots of one worker.

Owns their allocation and, in debug mode, the NaN in all that is free. Numbers come from the
plan; nothing here knows which request holds what.
"""

import psutil
import torch

from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan
from stagecoach.config import ResolvedConfig
from stagecoach.model.stage_memory import KdaMemory, MemoryShapes, StageMemory, memory_shapes
from stagecoach.pipeline.stage import Stage
from stagecoach.schedule.step_plan import NULL_PAGE, ZERO_SLOT

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
    """Pages and slots of one worker, allocated once."""

    def __init__(
        self, config: ResolvedConfig, stage: Stage, dtype: torch.dtype, plan: MemoryPlan
    ) -> None:
        self._block_size = config.engine.block_size
        shapes = _shapes(config, stage, dtype)
        self.stage_memory: StageMemory = shapes.allocate(
            plan.num_slots, plan.num_pages * self._block_size
        )
        if config.engine.debug_poison:
            self.poison(
                [page for page in range(plan.num_pages) if page != NULL_PAGE],
                [slot for slot in range(plan.num_slots) if slot != ZERO_SLOT],
            )

    def poison(self, page_ids: list[int], slots: list[int]) -> None:
        """Fill free memory with NaN, so that whoever reads it unwritten is found out."""
        if not page_ids and not slots:
            return
        slots_S = torch.tensor(slots, dtype=torch.int64)
        first_rows_P1 = torch.tensor(page_ids, dtype=torch.int64)[:, None] * self._block_size
        rows_N = (first_rows_P1 + torch.arange(self._block_size)).flatten()
        for memory in self.stage_memory.layers.values():
            if isinstance(memory, KdaMemory):
                for pool in memory:
                    pool[slots_S] = torch.nan
            else:
                memory.cache_RD[rows_N] = torch.nan
        if self.stage_memory.draft_rows_YRD is not None:
            self.stage_memory.draft_rows_YRD[:, rows_N] = torch.nan


def _shapes(config: ResolvedConfig, stage: Stage, dtype: torch.dtype) -> MemoryShapes:
    return memory_shapes(
        config.model,
        stage,
        config.engine.tensor_parallel_size,
        dtype,
        config.num_draft_tokens,
        config.speculation.draft if config.speculation else None,
    )
