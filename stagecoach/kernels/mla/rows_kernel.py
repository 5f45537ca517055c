"""Cache rows on a device: written from raw projections, and gathered page by page.

Dimensions: C latent, P pe, D = C + P.
"""

import triton
import triton.language as tl

from stagecoach.kernels.mla.split_kernel import find_segment


@triton.jit
def write_rows_kernel(
    latent_ptr,
    pe_ptr,
    weight_ptr,
    rows_ptr,
    cache_ptr,
    eps,
    latent_stride,
    pe_stride,
    cache_stride,
    LATENT_WIDTH: tl.constexpr,
    PE_WIDTH: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_P: tl.constexpr,
):
    """A program a token: [RMS-normed latent | pe] to its row; nothing where that is -1."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    if row < 0:
        return
    columns_C = tl.arange(0, TILE_C)
    is_column_C = columns_C < LATENT_WIDTH
    latent_C = tl.load(latent_ptr + token * latent_stride + columns_C, mask=is_column_C, other=0.0)
    latent_C = latent_C.to(tl.float32)
    weight_C = tl.load(weight_ptr + columns_C, mask=is_column_C, other=0.0).to(tl.float32)
    columns_P = tl.arange(0, TILE_P)
    is_column_P = columns_P < PE_WIDTH
    pe_P = tl.load(pe_ptr + token * pe_stride + columns_P, mask=is_column_P, other=0.0)
    mean = tl.sum(latent_C * latent_C, 0) / LATENT_WIDTH
    normed_C = latent_C * tl.rsqrt(mean + eps) * weight_C
    # As the reference rounds it, whatever the cache is of.
    normed_C = normed_C.to(latent_ptr.dtype.element_ty).to(tl.float32)
    row_ptr = cache_ptr + row * cache_stride
    out_type = cache_ptr.dtype.element_ty
    tl.store(row_ptr + columns_C, normed_C.to(out_type), mask=is_column_C)
    # E4M3 is made of float32, and what is too large for it becomes its largest value.
    tl.store(row_ptr + LATENT_WIDTH + columns_P, pe_P.to(tl.float32).to(out_type), mask=is_column_P)


@triton.jit(do_not_specialize=["num_segments"])
def gather_rows_kernel(
    cache_ptr,
    rows_ptr,
    offsets_ptr,
    starts_ptr,
    first_pages_ptr,
    pages_ptr,
    num_segments,
    cache_stride,
    ROW_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Contexts of all segments, end to end: [sum of contexts, D] in the type of `rows_ptr`.

    A program copies TILE_N rows.
    """
    segments_S = tl.arange(0, SEGMENTS)
    is_segment_S = segments_S < num_segments
    offsets_S = tl.load(offsets_ptr + segments_S, mask=is_segment_S, other=0)
    lengths_S = tl.load(offsets_ptr + segments_S + 1, mask=is_segment_S, other=0) - offsets_S
    starts_S = tl.load(starts_ptr + segments_S, mask=is_segment_S, other=0)
    contexts_S = tl.where(lengths_S > 0, starts_S + lengths_S, 0)
    segment, tile = find_segment(tl.program_id(0), tl.cdiv(contexts_S, TILE_N))
    if segment >= num_segments:
        return
    context = tl.sum(tl.where(segments_S == segment, contexts_S, 0), 0)
    first_row = tl.sum(tl.where(segments_S < segment, contexts_S, 0), 0).to(tl.int64)
    positions_N = tile * TILE_N + tl.arange(0, TILE_N)
    is_there_N = positions_N < context
    page_ptr = pages_ptr + tl.load(first_pages_ptr + segment)
    pages_N = tl.load(page_ptr + positions_N // PAGE_SIZE, mask=is_there_N, other=0)
    at_N = (pages_N.to(tl.int64) * PAGE_SIZE + positions_N % PAGE_SIZE) * cache_stride
    columns_D = tl.arange(0, TILE_D)
    is_value_ND = is_there_N[:, None] & (columns_D < ROW_WIDTH)[None, :]
    values_ND = tl.load(cache_ptr + at_N[:, None] + columns_D[None, :], mask=is_value_ND)
    to_N = (first_row + positions_N) * ROW_WIDTH
    values_ND = values_ND.to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + to_N[:, None] + columns_D[None, :], values_ND, mask=is_value_ND)
