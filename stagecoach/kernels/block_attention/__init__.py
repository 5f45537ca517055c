"""Attention of a drafter's blocks over cached context and their own rows."""

from stagecoach.kernels.block_attention.reference import (
    BlockPlaces,
    block_attention,
    block_places,
    block_rows,
)

__all__ = ["BlockPlaces", "block_attention", "block_places", "block_rows"]
