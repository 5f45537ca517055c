"""Attention of a drafter's blocks over cached context and their own rows."""

from stagecoach.kernels.block_attention.door import attend_blocks
from stagecoach.kernels.block_attention.reference import (
    BlockPlaces,
    block_attention,
    block_places,
    block_rows,
)

__all__ = ["BlockPlaces", "attend_blocks", "block_attention", "block_places", "block_rows"]
