"""What the tokens of each chunk are to each other: all of KDA's chunked form but the state.

One program a chunk and head; it knows neither the state nor other chunks. The formulas are those
of `reference.kda_chunked`.

Dimensions: C tokens of a chunk, H heads, K key and V value channels, J chunk numbers,
B segments. A tile holds what one chunk of one head leaves for the scan, C rows of each:
w [C, K], keys to the end [C, K], queries from the start [C, K], u [C, V] and P [C, C].
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from stagecoach.kernels.kda.chunk_gate_kernel import (
    decays_over,
    find_segment,
    log2_decays,
)


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["beta_TH"])
def chunk_products_kernel(
    q_TK,
    k_TK,
    v_TV,
    decay_TK,
    beta_TH,
    a_log_H,
    dt_bias_HK,
    passed_LCC,
    tiles_JHX,
    decay_JHK,
    offsets_S,
    decay_stride,
    beta_stride,
    num_segments,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_LEVELS: tl.constexpr,
    BOUND: tl.constexpr,
    BLOCK_B: tl.constexpr,
    FINE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles, and decays over whole chunks.

    Pairs of tokens are taken by doubling blocks: at each level a block is a lower and an upper
    half, and the decay from s in the lower to t in the upper half is (s to the middle) · (middle
    to t), over the tokens for which `passed_LCC` has 1. Each token is in one half only, so that
    one factor a token and channel serves both sides of the product. No factor is above 1,
    whatever the gate.

    Queries, keys, P and the inverse of I + A are at most about 1, so that FINE is float16 where
    the activations are bfloat16: as fast, with three more bits.
    """
    number = tl.program_id(0)
    head = tl.program_id(1)
    segment, index = find_segment(offsets_S, number, num_segments, CHUNK, BLOCK_B)
    begin = tl.load(offsets_S + segment)
    length = tl.load(offsets_S + segment + 1) - begin
    if index * CHUNK >= length:
        return

    rows_C = tl.arange(0, CHUNK)
    keys_K = tl.arange(0, K)
    is_real_C = index * CHUNK + rows_C < length
    is_real_C1 = is_real_C[:, None]
    tokens_C = (begin + index * CHUNK + rows_C).to(tl.int64)
    key_places_CK = (tokens_C[:, None] * H + head) * K + keys_K[None, :]
    dtype: tl.constexpr = q_TK.dtype.element_ty
    g_CK = log2_decays(
        decay_TK + head * K,
        a_log_H + head,
        dt_bias_HK + head * K,
        tokens_C,
        is_real_C,
        decay_stride,
        keys_K,
        BOUND,
    )
    place = tl.cast(number, tl.int64) * H + head
    tl.store(decay_JHK + place * K + keys_K, tl.exp2(tl.sum(g_CK, 0)))
    fine_g_CK = g_CK.to(FINE)
    row_C1 = rows_C[:, None]
    column_1C = rows_C[None, :]
    places_CC = row_C1 * CHUNK + column_1C

    tile = tiles_JHX + place * (CHUNK * (3 * K + V + CHUNK))
    rows_CK = rows_C[:, None] * K + keys_K[None, :]
    # By way of float32, where two are converted at once. One tensor after another, since
    # registers are what there is least of.
    k_CK = tl.load(k_TK + key_places_CK, mask=is_real_C1, other=0).to(tl.float32).to(FINE)
    q_CK = tl.load(q_TK + key_places_CK, mask=is_real_C1, other=0).to(tl.float32).to(FINE)
    own_C = tl.sum(q_CK.to(tl.float32) * k_CK.to(tl.float32), 1)
    pairs_CC = tl.where(row_C1 == column_1C, own_C[:, None], 0.0)
    beta_C = tl.load(beta_TH + tokens_C * beta_stride + head, mask=is_real_C, other=0)
    beta_C = tl.where(is_real_C, tl.sigmoid(beta_C.to(tl.float32)), 0.0)
    # Of I + A restricted to blocks on the diagonal, which grow level by level.
    inverse_CC = tl.where(row_C1 == column_1C, 1.0, 0.0)
    for level in range(NUM_LEVELS):
        half = 1 << level
        middle_C1 = row_C1 // (2 * half) * (2 * half) + half
        is_upper_C1 = row_C1 >= middle_C1
        passed_CC = tl.load(passed_LCC + level * (CHUNK * CHUNK) + places_CC)
        factor_CK = decays_over(passed_CC, fine_g_CK, PRECISION).to(FINE)
        decayed_k_CK = k_CK * factor_CK
        decayed_q_CK = q_CK * factor_CK
        right_KC = tl.trans(decayed_k_CK)
        # Its highest bit that differs from the column's is this level's, and it has that bit.
        key_C1 = tl.where(is_upper_C1, row_C1, -1)
        is_pair_CC = ((key_C1 ^ column_1C) & -half) == half
        qk_CC = tl.dot(decayed_q_CK, right_KC, input_precision=PRECISION)
        pairs_CC = tl.where(is_pair_CC, qk_CC, pairs_CC)
        kk_CC = tl.dot(decayed_k_CK, right_KC, input_precision=PRECISION)
        # The inverse of [[L, 0], [A, U]] is [[L', 0], [-U' A L', U']].
        below_CC = tl.where(is_pair_CC, -beta_C[:, None] * kk_CC, 0.0).to(FINE)
        fine_inverse_CC = inverse_CC.to(FINE)
        below_CC = tl.dot(below_CC, fine_inverse_CC, input_precision=PRECISION).to(FINE)
        inverse_CC = tl.dot(fine_inverse_CC, below_CC, acc=inverse_CC, input_precision=PRECISION)
    tl.store(tile + CHUNK * (3 * K + V) + places_CC, pairs_CC.to(dtype))

    # Read again rather than kept over the loop: spilled registers cost more.
    k_CK = tl.load(k_TK + key_places_CK, mask=is_real_C1, other=0)
    to_end_CK = k_CK * decays_over((column_1C > row_C1).to(FINE), fine_g_CK, PRECISION)
    tl.store(tile + CHUNK * K + rows_CK, to_end_CK.to(dtype))
    from_start_CK = decays_over((column_1C <= row_C1).to(FINE), fine_g_CK, PRECISION)
    k_from_start_CK = (k_CK * from_start_CK).to(FINE)
    q_CK = tl.load(q_TK + key_places_CK, mask=is_real_C1, other=0)
    tl.store(tile + 2 * CHUNK * K + rows_CK, (q_CK * from_start_CK).to(dtype))
    rated_CC = inverse_CC * beta_C[None, :]
    w_CK = tl.dot(rated_CC.to(FINE), k_from_start_CK, input_precision=PRECISION)
    tl.store(tile + rows_CK, w_CK.to(dtype))
    values_V = tl.arange(0, V)
    value_places_CV = (tokens_C[:, None] * H + head) * V + values_V[None, :]
    v_CV = tl.load(v_TV + value_places_CV, mask=is_real_C1, other=0)
    high_CC = rated_CC.to(dtype)
    u_CV = tl.dot(high_CC, v_CV, input_precision=PRECISION)
    if dtype != tl.float32:
        low_CC = (rated_CC - high_CC.to(tl.float32)).to(dtype)
        u_CV = tl.dot(low_CC, v_CV, acc=u_CV, input_precision=PRECISION)
    rows_CV = rows_C[:, None] * V + values_V[None, :]
    tl.store(tile + 3 * CHUNK * K + rows_CV, u_CV.to(dtype))
