"""Memories of one worker, by page and by slot, with all kinds of tensors in them."""

import dataclasses
from pathlib import Path

from torch import Tensor

from stagecoach.config.draft import DraftGqaConfig
from stagecoach.config.engine import ResolvedConfig, ResolvedSpeculation
from stagecoach.model.stage_memory import KdaMemory, StageMemory
from stagecoach.pipeline.stage import Stage, make_stages
from tests.cpu.model.small_draft import small_draft

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


def stage_of(config: ResolvedConfig, index: int) -> Stage:
    return make_stages(config.partition)[index]


def slots_of(memory: StageMemory) -> list[Tensor]:
    return [
        tensor
        for layer in memory.layers.values()
        if isinstance(layer, KdaMemory)
        for tensor in layer
    ]


def pages_of(memory: StageMemory) -> list[Tensor]:
    """Rows of each MLA layer and of each draft layer by page: [pages, rows of a page, width]."""
    pools = [layer.cache_RD for layer in memory.layers.values() if not isinstance(layer, KdaMemory)]
    if memory.draft_rows_YRD is not None:
        pools += memory.draft_rows_YRD.unbind(0)
    return [pool.unflatten(0, (-1, BLOCK_SIZE)) for pool in pools]
