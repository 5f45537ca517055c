"""Newest tokens in Triton: a program a block of segments, or of tokens.

Dimensions: T tokens, B segments, N rows of the sampling table.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["token_ids"])
def note_kernel(newest, sampling_rows, token_ids, num_segments, BLOCK: tl.constexpr):
    """`reference.note_newest`."""
    segments = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_segment = segments < num_segments
    rows = tl.load(sampling_rows + segments, mask=is_segment, other=-1)
    chosen = tl.load(token_ids + segments, mask=is_segment, other=0)
    tl.store(newest + rows, chosen, mask=rows >= 0)


@triton.jit(do_not_specialize=["num_tokens"])
def fill_in_kernel(token_ids, segment_of, sampling_rows, newest, num_tokens, BLOCK: tl.constexpr):
    """`reference.fill_in_newest`."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    ids = tl.load(token_ids + tokens, mask=is_token, other=0)
    segments = tl.load(segment_of + tokens, mask=is_token, other=-1)
    is_chained = (ids < 0) & (segments >= 0)
    rows = tl.load(sampling_rows + segments, mask=is_chained, other=-1)
    is_chained = is_chained & (rows >= 0)
    filled = tl.load(newest + rows, mask=is_chained, other=0)
    tl.store(token_ids + tokens, filled, mask=is_chained)
