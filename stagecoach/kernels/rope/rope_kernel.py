"""Rotary positions in Triton: one program a position, all of its heads."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def rotate_pairs_kernel(
    x,
    cos,
    sin,
    out,
    num_heads,
    num_pairs,
    position_stride,
    head_stride,
    HAS_NEIGHBOUR_PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    position = tl.cast(tl.program_id(0), tl.int64)
    heads, pairs = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_P)[None, :]
    mask = (heads < num_heads) & (pairs < num_pairs)
    place = x + position * position_stride + heads * head_stride
    if HAS_NEIGHBOUR_PAIRS:
        first = tl.load(place + 2 * pairs, mask=mask, other=0.0)
        second = tl.load(place + 2 * pairs + 1, mask=mask, other=0.0)
    else:
        first = tl.load(place + pairs, mask=mask, other=0.0)
        second = tl.load(place + num_pairs + pairs, mask=mask, other=0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    cosines = tl.load(cos + position * num_pairs + pairs, mask=pairs < num_pairs, other=0.0)
    sines = tl.load(sin + position * num_pairs + pairs, mask=pairs < num_pairs, other=0.0)
    target = out + (position * num_heads + heads) * 2 * num_pairs + pairs
    dtype = out.dtype.element_ty
    tl.store(target, (first * cosines - second * sines).to(dtype), mask=mask)
    tl.store(target + num_pairs, (second * cosines + first * sines).to(dtype), mask=mask)
