"""Pairs of a token and an expert, sorted by expert and cut into tiles, in Triton.

Dimensions: P pairs, E experts.
"""

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(ids_ptr, counts_ptr, num_pairs, BLOCK_P: tl.constexpr):
    """How many pairs an expert has; an expert a program."""
    expert = tl.program_id(0)
    places_P = tl.arange(0, BLOCK_P)
    counts_P = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for start in tl.range(0, num_pairs, BLOCK_P, num_stages=3):
        ids_P = tl.load(ids_ptr + start + places_P, mask=start + places_P < num_pairs, other=-1)
        counts_P += (ids_P == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(counts_P, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
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
    HAS_COUNTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """An expert a program: its pairs in rising order, where they begin, and its tiles.

    Pairs with id -1 are left out. E < BLOCK_E: without counts the last bin takes those.
    """
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    expert = tl.program_id(0)
    places_P = tl.arange(0, BLOCK_P)
    bins_E = tl.arange(0, BLOCK_E)
    if HAS_COUNTS:
        counts_E = tl.load(counts_ptr + bins_E, mask=bins_E < num_experts, other=0)
    else:
        counts_E = tl.zeros((BLOCK_E,), dtype=tl.int32)
        for start in tl.range(0, num_pairs, BLOCK_P, num_stages=3):
            ids_P = tl.load(ids_ptr + start + places_P, mask=start + places_P < num_pairs, other=-1)
            counts_E += tl.histogram(tl.where(ids_P < 0, BLOCK_E - 1, ids_P), BLOCK_E)
        counts_E = tl.where(bins_E < num_experts, counts_E, 0)
    tiles_E = (counts_E + tile_size - 1) // tile_size
    first = tl.sum(tl.where(bins_E < expert, counts_E, 0), axis=0)
    first_tile = tl.sum(tl.where(bins_E < expert, tiles_E, 0), axis=0)
    end = first + tl.sum(tl.where(bins_E == expert, counts_E, 0), axis=0)
    end_tile = first_tile + tl.sum(tl.where(bins_E == expert, tiles_E, 0), axis=0)
    tl.store(offsets_ptr + expert, first)
    if expert == num_experts - 1:
        tl.store(offsets_ptr + num_experts, end)
        tl.store(num_tiles_ptr, end_tile)
    for tile in range(first_tile, end_tile):
        tl.store(tile_experts_ptr + tile, expert)
        tl.store(tile_rows_ptr + tile, first + (tile - first_tile) * tile_size)
    place = first
    for start in tl.range(0, num_pairs, BLOCK_P, num_stages=3):
        pairs_P = start + places_P
        ids_P = tl.load(ids_ptr + pairs_P, mask=pairs_P < num_pairs, other=-1)
        is_here_P = ids_P == expert
        ranks_P = tl.cumsum(is_here_P.to(tl.int32), axis=0)
        tl.store(pairs_ptr + place + ranks_P - 1, pairs_P, mask=is_here_P)
        place += tl.sum(is_here_P.to(tl.int32), axis=0)
