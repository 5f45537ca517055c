"""Storing rows in Triton: one program a token and layer."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def store_rows_kernel(
    rows,
    cache,
    cache_rows,
    width,
    token_stride,
    layer_stride,
    cache_layer_stride,
    cache_row_stride,
    BLOCK_D: tl.constexpr,
):
    token, layer = tl.program_id(0), tl.program_id(1)
    # A cache may have more than 2^31 values.
    cache_row = tl.load(cache_rows + token).to(tl.int64)
    if cache_row < 0:
        return
    columns = tl.arange(0, BLOCK_D)
    mask = columns < width
    values = tl.load(rows + token * token_stride + layer * layer_stride + columns, mask=mask)
    place = tl.cast(layer, tl.int64) * cache_layer_stride + cache_row * cache_row_stride
    # A cache of E4M3 takes its values from float32.
    values = values.to(tl.float32).to(cache.dtype.element_ty)
    tl.store(cache + place + columns, values, mask=mask)
