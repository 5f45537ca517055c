"""Pairs of a token and an expert, sorted by expert and cut into tiles, in Triton.

Blocks of pairs are counted, then experts get their places, then pairs do: up to one block in one
kernel, more in three. Pairs with id -1 are left out.

Dimensions: P pairs of a block, B blocks, E experts, Q pairs that others are compared with.
"""

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit
def count_block(
    ids_ptr,
    counts_ptr,
    block,
    num_pairs,
    num_experts,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """How many pairs of a block each expert has; E < BLOCK_E: the last bin takes what is none."""
    pairs_P = block * BLOCK_P + tl.arange(0, BLOCK_P)
    ids_P = tl.load(ids_ptr + pairs_P, mask=pairs_P < num_pairs, other=-1)
    counts_E = tl.histogram(tl.where(ids_P < 0, BLOCK_E - 1, ids_P), BLOCK_E)
    bins_E = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + block * num_experts + bins_E, counts_E, mask=bins_E < num_experts)


@triton.jit
def place_experts(
    counts_ptr,
    offsets_ptr,
    tile_experts_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    num_blocks,
    num_experts,
    tile_size,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Where experts and their tiles begin; counts [B, E] become where a block's pairs begin."""
    bins_E = tl.arange(0, BLOCK_E)
    rows_B1 = tl.arange(0, BLOCK_B)[:, None]
    totals_E = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        is_count_BE = (first + rows_B1 < num_blocks) & (bins_E < num_experts)[None, :]
        places_BE = (first + rows_B1) * num_experts + bins_E[None, :]
        counts_BE = tl.load(counts_ptr + places_BE, mask=is_count_BE, other=0)
        totals_E += tl.sum(counts_BE, axis=0)
    is_expert_E = bins_E < num_experts
    offsets_E = tl.cumsum(totals_E, axis=0) - totals_E
    tl.store(offsets_ptr + bins_E, offsets_E, mask=is_expert_E)
    tl.store(offsets_ptr + num_experts, tl.sum(totals_E, axis=0))
    tiles_E = (totals_E + tile_size - 1) // tile_size
    first_tiles_E = tl.cumsum(tiles_E, axis=0) - tiles_E
    tl.store(num_tiles_ptr, tl.sum(tiles_E, axis=0))
    for tile in range(0, tl.max(tiles_E, axis=0)):
        is_tile_E = tile < tiles_E
        tl.store(tile_experts_ptr + first_tiles_E + tile, bins_E, mask=is_tile_E)
        tl.store(tile_rows_ptr + first_tiles_E + tile, offsets_E + tile * tile_size, mask=is_tile_E)
    for first in range(0, num_blocks, BLOCK_B):
        is_count_BE = (first + rows_B1 < num_blocks) & is_expert_E[None, :]
        places_BE = (first + rows_B1) * num_experts + bins_E[None, :]
        counts_BE = tl.load(counts_ptr + places_BE, mask=is_count_BE, other=0)
        starts_BE = offsets_E[None, :] + tl.cumsum(counts_BE, axis=0) - counts_BE
        tl.store(counts_ptr + places_BE, starts_BE, mask=is_count_BE)
        offsets_E += tl.sum(counts_BE, axis=0)


@triton.jit
def place_block(
    ids_ptr,
    starts_ptr,
    pairs_ptr,
    block,
    num_pairs,
    num_experts,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """A block's pairs to their places: behind those before them with the same expert."""
    within_P = tl.arange(0, BLOCK_P)
    pairs_P = block * BLOCK_P + within_P
    ids_P = tl.load(ids_ptr + pairs_P, mask=pairs_P < num_pairs, other=-1)
    ranks_P = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for first in range(0, BLOCK_P, BLOCK_Q):
        others_Q = first + tl.arange(0, BLOCK_Q)
        pairs_Q = block * BLOCK_P + others_Q
        ids_Q = tl.load(ids_ptr + pairs_Q, mask=pairs_Q < num_pairs, other=-1)
        is_before_PQ = (ids_P[:, None] == ids_Q[None, :]) & (within_P[:, None] > others_Q[None, :])
        ranks_P += tl.sum(is_before_PQ.to(tl.int32), axis=1)
    is_pair_P = ids_P >= 0
    starts_P = tl.load(starts_ptr + block * num_experts + ids_P, mask=is_pair_P, other=0)
    tl.store(pairs_ptr + starts_P + ranks_P, pairs_P, mask=is_pair_P)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(
    ids_ptr,
    counts_ptr,
    num_pairs,
    num_experts,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Counts [B, E]; a block a program."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    count_block(ids_ptr, counts_ptr, tl.program_id(0), num_pairs, num_experts, BLOCK_P, BLOCK_E)


@triton.jit(do_not_specialize=["num_blocks", "tile_size"])
def place_experts_kernel(
    counts_ptr,
    offsets_ptr,
    tile_experts_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    num_blocks,
    num_experts,
    tile_size,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    place_experts(
        counts_ptr, offsets_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles_ptr, num_blocks,
        num_experts, tile_size, BLOCK_B, BLOCK_E,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def place_pairs_kernel(
    ids_ptr,
    starts_ptr,
    pairs_ptr,
    num_pairs,
    num_experts,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A block a program."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    place_block(
        ids_ptr, starts_ptr, pairs_ptr, tl.program_id(0), num_pairs, num_experts, BLOCK_P, BLOCK_Q
    )


@triton.jit(do_not_specialize=["num_pairs", "tile_size"])
def sort_pairs_kernel(
    ids_ptr,
    counts_ptr,
    pairs_ptr,
    offsets_ptr,
    tile_experts_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    num_pairs,
    num_experts,
    tile_size,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """All of it for one block, by one program."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    count_block(ids_ptr, counts_ptr, 0, num_pairs, num_experts, BLOCK_P, BLOCK_E)
    tl.debug_barrier()
    place_experts(
        counts_ptr, offsets_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles_ptr, 1, num_experts,
        tile_size, 1, BLOCK_E,
    )  # fmt: skip
    tl.debug_barrier()
    place_block(ids_ptr, counts_ptr, pairs_ptr, 0, num_pairs, num_experts, BLOCK_P, BLOCK_Q)
