"""Kimi delta attention in plain PyTorch: the specification and the CPU implementation.

Per head, with a state S [V, K], a log-decay g per key channel and a rate beta:

    S <- S · diag(exp(g_t));  u = beta_t · (v_t − S k_t);  S <- S + u k_tᵀ;  o_t = S q_t

Formula: Kimi Linear (arXiv 2510.26692), §3; fla `naive_recurrent_kda`, `naive_chunk_kda`.
Dimensions: T tokens, B segments, W the longest segment, H heads, K key and V value channels,
R = B * H rows, S state slots, N rows of a record or chunks of the longest segment, X = 2K + V
values of a recorded row, M chunks of all segments and heads, C tokens of a chunk, I saves inside
chunks.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.kernels.ragged import SegmentGroup
from stagecoach.kernels.saves import NO_SAVES, ChunkSaves, StateSaves


def kda_gate(
    raw_THK: Tensor, a_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float | None
) -> Tensor:
    """Log-decay of every key channel, ≤ 0.

    With a bound: lower_bound · sigmoid(exp(a_log) · (raw + dt_bias)) (Kimi-K3).
    Without: −exp(a_log) · softplus(raw + dt_bias) (Kimi-Linear).

    Args:
        raw_THK: [T, H, K] gate logits, any floating type.
        a_log_H: [H] or [H, 1].
        dt_bias_HK: [H, K].
        lower_bound: the bound, negative; None for the unbounded form.

    Returns:
        [T, H, K] in the accumulate type.
    """
    dtype = accumulate_dtype(raw_THK.dtype)
    rate_H1 = a_log_H.to(dtype).exp().view(-1, 1)
    g_THK = raw_THK.to(dtype) + dt_bias_HK.to(dtype)
    if lower_bound is None:
        return F.softplus(g_THK).mul_(rate_H1).neg_()
    return g_THK.mul_(rate_H1).sigmoid_().mul_(lower_bound)


def normalize_qk(q_THK: Tensor, k_THK: Tensor) -> tuple[Tensor, Tensor]:
    """q · rsqrt(Σq² + 1e-6) · K^−½ and k · rsqrt(Σk² + 1e-6), per head.

    Args:
        q_THK: [T, H, K], any floating type.
        k_THK: [T, H, K].

    Returns:
        Both in the accumulate type.
    """
    dtype = accumulate_dtype(q_THK.dtype)
    qk_2THK = torch.stack((q_THK, k_THK)).to(dtype)
    squares_2TH1 = qk_2THK.square().sum(-1, keepdim=True)
    qk_2THK *= squares_2TH1.add_(1e-6).rsqrt_()
    q_out_THK, k_out_THK = qk_2THK.unbind(0)
    return q_out_THK.mul_(q_THK.shape[-1] ** -0.5), k_out_THK


def kda_recurrent(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    state_SHVK: Tensor,
    record_SNHX: Tensor,
    group: SegmentGroup,
) -> Tensor:
    """Token after token: the form for decode windows.

    Each segment's state is read at `read_slots_B`, `replay_B` rows of the record there are
    folded in, and the state after the segment's certain tokens is left at `write_slots_B`. Of
    its uncertain tokens, the drafts, the record there keeps what folds them in later. A save
    takes the state after any replayed row or certain token; the record of its slot stays as it is.

    Args:
        q_THK: [T, H, K] normalised and scaled queries.
        k_THK: [T, H, K] normalised keys.
        v_THV: [T, H, V].
        g_THK: [T, H, K] log-decay, ≤ 0.
        beta_TH: [T, H] rates in (0, 1).
        state_SHVK: [S, H, V, K] pool in the accumulate type, updated in place.
        record_SNHX: [S, N, H, 2K + V] pool of the same type, updated in place: exp(g), k and u
            of each draft. N is at least the longest replay and the most drafts, and may be 0.
        group: the segments of the T tokens. Where one has drafts, all are windows: an anchor,
            then drafts.

    Returns:
        [T, H, V] in the accumulate type.
    """
    assert group.max_drafts in (0, group.max_length - 1), f"a chunk with drafts: {group}"
    q_THK, k_THK, v_THV, g_THK, beta_TH1 = (
        x.to(state_SHVK.dtype) for x in (q_THK, k_THK, v_THV, g_THK, beta_TH.unsqueeze(2))
    )
    saves = group.saves.states if group.saves else NO_SAVES
    state_BHVK = read_states(
        state_SHVK, record_SNHX, group.read_slots_B, group.replay_B, group.max_replay, saves
    )
    state_RVK = state_BHVK.flatten(0, 1)
    # What `_advance` takes, in its order.
    parts = (g_THK.exp(), k_THK, v_THV * beta_TH1, k_THK * beta_TH1, q_THK)
    if group.max_length == 1:
        o_R1V = _advance(state_RVK, *(x_THD.reshape(-1, 1, x_THD.shape[2]) for x_THD in parts))
        state_SHVK.index_copy_(0, group.write_slots_B, state_BHVK)
        saves.file(group.max_replay + 1, state_BHVK, state_SHVK)
        return o_R1V.view(v_THV.shape)
    # Padded tokens leave the state alone: decay 1, the rest 0.
    parts_WR1D = [
        group.pad(x_THD, fill).transpose(0, 1).reshape(group.max_length, -1, 1, x_THD.shape[2])
        for x_THD, fill in zip(parts, (1.0, 0.0, 0.0, 0.0, 0.0), strict=True)
    ]
    last_certain = group.max_length - 1 - group.max_drafts
    outputs = []
    for token, row in enumerate(zip(*(x.unbind(0) for x in parts_WR1D), strict=True)):
        outputs.append(_advance(state_RVK, *row))
        saves.file(group.max_replay + 1 + token, state_BHVK, state_SHVK)
        if token == last_certain:
            state_SHVK.index_copy_(0, group.write_slots_B, state_BHVK)
    if group.max_drafts:
        decay_WR1K, k_WR1K, u_WR1V, *_ = parts_WR1D  # `_advance` has turned beta · v into u
        record_LR1X = torch.cat((decay_WR1K[1:], k_WR1K[1:], u_WR1V[1:]), dim=3)
        record_LBHX = record_LR1X.view(-1, *state_BHVK.shape[:2], record_SNHX.shape[3])
        record_SNHX[:, : group.max_drafts].index_copy_(
            0, group.write_slots_B, record_LBHX.transpose(0, 1)
        )
    o_WBHV = torch.cat(outputs).view(-1, *state_BHVK.shape[:2], v_THV.shape[2])
    return group.flat(o_WBHV.transpose(0, 1))


def _advance(
    state_RVK: Tensor,
    decay_R1K: Tensor,
    k_R1K: Tensor,
    rated_v_R1V: Tensor,
    rated_k_R1K: Tensor,
    q_R1K: Tensor,
) -> Tensor:
    """One token: the state moves on in place, the output [R, 1, V] is read after it.

    Rated means times beta; u takes the place of `rated_v_R1V`.
    """
    state_RKV = state_RVK.mT
    state_RVK.mul_(decay_R1K)
    u_R1V = rated_v_R1V.baddbmm_(rated_k_R1K, state_RKV, alpha=-1)
    state_RVK.addcmul_(u_R1V.mT, k_R1K)
    return torch.bmm(q_R1K, state_RKV)


def read_states(
    state_SHVK: Tensor,
    record_SNHX: Tensor,
    slots_B: Tensor,
    replay_B: Tensor,
    max_replay: int,
    saves: StateSaves = NO_SAVES,
) -> Tensor:
    """The states of `slots_B` after `replay_B` rows of their records.

    A row does S <- S · diag(exp(g)); S <- S + u kᵀ with the very operations that did it for its
    token, so in the same type the result is that of stepping, bit for bit.

    Args:
        state_SHVK, record_SNHX: the pools, as in `kda_recurrent`.
        slots_B, replay_B: int64.
        max_replay: the largest of `replay_B`.
        saves: states between, filed in `state_SHVK` on the way; nothing else is written.

    Returns:
        [B, H, V, K], new, in the type of `state_SHVK`.
    """
    state_BHVK = state_SHVK.index_select(0, slots_B)
    if not max_replay:
        return state_BHVK
    num_values, num_keys = state_BHVK.shape[2:]
    record_NBHX = record_SNHX.index_select(0, slots_B).narrow(1, 0, max_replay).transpose(0, 1)
    if len(slots_B) > 1:  # a segment alone uses all rows
        # Decay 1, k and u 0 leave a state alone; what an unused row holds may be NaN.
        neutral_X = F.pad(record_NBHX.new_ones(num_keys), (0, num_keys + num_values))
        rows_N111 = torch.arange(max_replay, device=slots_B.device).view(-1, 1, 1, 1)
        record_NBHX = torch.where(rows_N111 < replay_B.view(-1, 1, 1), record_NBHX, neutral_X)
    record_NR1X = record_NBHX.reshape(max_replay, -1, 1, 2 * num_keys + num_values)
    parts = record_NR1X.split((num_keys, num_keys, num_values), dim=3)
    state_RVK = state_BHVK.flatten(0, 1)
    rows = zip(*(x.unbind(0) for x in parts), strict=True)
    for num_rows, (decay_R1K, k_R1K, u_R1V) in enumerate(rows, 1):
        state_RVK.mul_(decay_R1K).addcmul_(u_R1V.mT, k_R1K)
        saves.file(num_rows, state_BHVK, state_SHVK)
    return state_BHVK


def kda_chunked(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    state_SHVK: Tensor,
    record_SNHX: Tensor,
    group: SegmentGroup,
) -> Tensor:
    """Chunk after chunk: the form for prefill, equal to `kda_recurrent` up to rounding.

    With E[t, s] the decay from token s to token t of a chunk, D the decay from its start:

        (I + A) u = beta · (v − (D k) Sᵀ),  A[t, s] = beta_t Σ_d k_t k_s E[t, s], s < t
        o = (D q) Sᵀ + P u,                 P[t, s] = Σ_d q_t k_s E[t, s], s ≤ t

    Decays are only ever multiplied, never divided: no exponent is positive at any gate.

    A save takes the state after any token, and nothing else is computed otherwise for it. At a
    chunk's border and at the segment's end that is the running state; behind the first p tokens
    of a chunk that begins with S it is S · E[p − 1, start] + Σ_{t < p} u_t k_tᵀ E[p − 1, t].

    Args:
        q_THK, k_THK, v_THV, g_THK, beta_TH, state_SHVK: as in `kda_recurrent`.
        record_SNHX: as in `kda_recurrent`, only read: a chunk may follow a window.
        group: the segments of the T tokens, with their `chunk_layout`; none has drafts.

    Returns:
        [T, H, V] in the accumulate type.
    """
    assert not group.max_drafts, f"a chunk with drafts: {group}"
    layout = group.chunk_layout
    assert layout is not None, f"no chunk layout: {group}"
    saves = layout.saves.states if layout.saves else NO_SAVES
    dtype = state_SHVK.dtype
    num_heads, num_keys = q_THK.shape[1:]
    # Padded tokens have g, k and beta 0 and leave the state alone.
    q_MCK, k_MCK, v_MCV, g_MCK, beta_MC1 = (
        layout.chunks(x_THD.to(dtype))
        for x_THD in (q_THK, k_THK, v_THV, g_THK, beta_TH.unsqueeze(2))
    )
    inside = _decayed_products(q_MCK, k_MCK, g_MCK.exp())
    right_MCX = torch.cat((inside.k_from_start_MCK, v_MCV), dim=2).mul_(beta_MC1)
    solved_MCX = torch.linalg.solve_triangular(
        inside.kk_MCC * beta_MC1, right_MCX, upper=False, unitriangular=True
    )
    w_MCK, u_MCV = solved_MCX.split((num_keys, v_THV.shape[2]), dim=2)

    state_BHVK = read_states(
        state_SHVK,
        record_SNHX,
        group.read_slots_B[layout.order_B],
        group.replay_B[layout.order_B],
        group.max_replay,
    )
    state_RVK = state_BHVK.flatten(0, 1)
    o_MCV = torch.empty_like(v_MCV)
    start = 0
    for number, num_segments in enumerate(layout.num_segments_N):
        saves.file(number, state_BHVK, state_SHVK)
        now = slice(start, start + num_segments * num_heads)
        start = now.stop
        running_RVK = state_RVK[: num_segments * num_heads]
        torch.bmm(inside.q_from_start_MCK[now], running_RVK.mT, out=o_MCV[now])
        u_RCV = u_MCV[now].baddbmm_(w_MCK[now], running_RVK.mT, alpha=-1)
        running_RVK.mul_(inside.decay_M1K[now]).baddbmm_(u_RCV.mT, inside.k_to_end_MCK[now])
    o_MCV.baddbmm_(inside.qk_MCC, u_MCV)
    state_SHVK.index_copy_(0, group.write_slots_B[layout.order_B], state_BHVK)
    saves.file(len(layout.num_segments_N), state_BHVK, state_SHVK)
    if layout.saves is not None and len(layout.saves.slots_I):
        _lead_into_chunks(state_SHVK, layout.saves, g_MCK, k_MCK, u_MCV)
    return layout.tokens(o_MCV, num_heads)


def _lead_into_chunks(
    state_SHVK: Tensor, saves: ChunkSaves, g_MCK: Tensor, k_MCK: Tensor, u_MCV: Tensor
) -> None:
    """Saved states, from the start of their chunk to the place inside it that they are for."""
    num_heads = state_SHVK.shape[1]
    g_IHCK, k_IHCK, u_IHCV = (
        x_MCD.view(-1, num_heads, *x_MCD.shape[1:]).index_select(0, saves.chunk_I)
        for x_MCD in (g_MCK, k_MCK, u_MCV)
    )
    places_C1 = torch.arange(g_MCK.shape[1], device=g_MCK.device).unsqueeze(1)
    # What lies behind may be NaN, which no factor of 0 takes away.
    is_behind_I1C1 = places_C1 >= saves.num_tokens_I.view(-1, 1, 1, 1)
    for x_IHCD in (g_IHCK, k_IHCK, u_IHCV):
        x_IHCD.masked_fill_(is_behind_I1C1, 0)
    # Of each token and all after it, up to the place.
    decay_IHCK = _without_tiny(g_IHCK.exp_().flip(2).cumprod(2).flip(2))
    k_IHCK[:, :, :-1] *= decay_IHCK[:, :, 1:]
    state_IHVK = state_SHVK.index_select(0, saves.slots_I).mul_(decay_IHCK[:, :, :1])
    state_IHVK.flatten(0, 1).baddbmm_(u_IHCV.flatten(0, 1).mT, k_IHCK.flatten(0, 1))
    state_SHVK.index_copy_(0, saves.slots_I, state_IHVK)


def _without_tiny(x: Tensor) -> Tensor:
    """0 for what is far below the rounding of any sum it enters: subnormal numbers are slow."""
    return F.hardshrink(x, torch.finfo(x.dtype).tiny ** 0.75)


class _DecayedProducts(NamedTuple):
    """What a chunk's tokens are to each other, to its start and to its end."""

    kk_MCC: Tensor  # Σ_d k_t k_s E[t, s], strictly lower triangular
    qk_MCC: Tensor  # Σ_d q_t k_s E[t, s], lower triangular
    k_from_start_MCK: Tensor  # k_t · decay from the chunk's start to t
    q_from_start_MCK: Tensor
    k_to_end_MCK: Tensor  # k_s · decay from s to the chunk's end
    decay_M1K: Tensor  # of the whole chunk


def _decayed_products(q_MCK: Tensor, k_MCK: Tensor, decay_MCK: Tensor) -> _DecayedProducts:
    """All pairwise products of M chunks, by doubling blocks.

    At each level a block of 2b tokens is a lower and an upper half. The decay from s in the
    lower to t in the upper half is (s to the border) · (border to t), so one matrix product
    of decayed keys with decayed keys and queries fills that square. Then both factors are
    extended over the neighbouring half. Every factor lies in [0, 1] and is a product of at
    most log2(C) others: nothing overflows, cancels or needs a [C, C, K] tensor.
    """
    num_chunks, chunk_size, num_keys = k_MCK.shape
    kq_MC2K = torch.stack((k_MCK, q_MCK), dim=2).mul_(decay_MCK.unsqueeze(2))
    k_to_end_MCK = k_MCK.clone()
    products_MC2C = k_MCK.new_zeros(num_chunks, chunk_size, 2, chunk_size)
    products_MC2C[:, :, 1].diagonal(dim1=1, dim2=2).copy_((q_MCK * k_MCK).sum(-1))
    decay = decay_MCK
    half = 1
    while half < chunk_size:
        num_blocks = chunk_size // (2 * half)
        decay = decay.view(num_chunks * num_blocks, 2, 1, num_keys)
        upper = kq_MC2K.view(num_chunks * num_blocks, 2, half * 2, num_keys)[:, 1]
        lower = k_to_end_MCK.view(num_chunks * num_blocks, 2, half, num_keys)[:, 0]
        squares = torch.bmm(upper, lower.mT).view(num_chunks, num_blocks, half, 2, half)
        places = products_MC2C.view(num_chunks, num_blocks, 2, half, 2, num_blocks, 2, half)
        places = places[:, :, 1, :, :, :, 0].diagonal(dim1=1, dim2=4)
        places.copy_(squares.permute(0, 2, 3, 4, 1))
        upper *= decay[:, 0]
        lower *= decay[:, 1]
        decay = decay[:, 0] * decay[:, 1]
        half *= 2
    kq_MC2K, k_to_end_MCK, products_MC2C, decay = map(
        _without_tiny, (kq_MC2K, k_to_end_MCK, products_MC2C, decay)
    )
    return _DecayedProducts(
        kk_MCC=products_MC2C[:, :, 0],
        qk_MCC=products_MC2C[:, :, 1],
        k_from_start_MCK=kq_MC2K[:, :, 0],
        q_from_start_MCK=kq_MC2K[:, :, 1],
        k_to_end_MCK=k_to_end_MCK,
        decay_M1K=decay.view(num_chunks, 1, num_keys),
    )
