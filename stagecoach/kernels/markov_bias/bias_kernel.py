"""The Markov bias in Triton: W2 is read once for up to BLOCK_N blocks.

Dimensions: N blocks, V vocabulary, M Markov rank.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token_ids"])
def markov_bias_kernel(
    logits,
    token_ids,
    first,
    second,
    out,
    num_rows,
    num_columns,
    rank,
    logits_stride,
    token_ids_stride,
    first_stride,
    second_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_WIDE: tl.constexpr,  # weights are float32
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_column = rows < num_rows, columns < num_columns
    ids = tl.load(token_ids + rows * token_ids_stride, mask=is_row, other=0).to(tl.int64)
    columns_64 = columns.to(tl.int64)
    sums = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_M):
        ranks = start + tl.arange(0, BLOCK_M)
        is_rank = ranks < rank
        weights_VM = tl.load(
            second + columns_64[:, None] * second_stride + ranks[None, :],
            mask=is_column[:, None] & is_rank[None, :],
            other=0.0,
        )
        embedded_MN = tl.load(
            first + ids[None, :] * first_stride + ranks[:, None],
            mask=is_row[None, :] & is_rank[:, None],
            other=0.0,
        )
        if IS_WIDE:
            sums = tl.dot(weights_VM, embedded_MN, sums, input_precision="ieee")
        else:
            sums = tl.dot(weights_VM, embedded_MN, sums)
    mask = is_column[:, None] & is_row[None, :]
    rows_64 = rows.to(tl.int64)
    places = rows_64[None, :] * logits_stride + columns_64[:, None]
    sums += tl.load(logits + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows_64[None, :] * num_columns + columns_64[:, None], sums, mask=mask)
