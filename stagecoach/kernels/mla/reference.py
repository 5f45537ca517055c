"""Multi-head latent attention in plain PyTorch: the specification and the CPU implementation.

A cache row is [latent C | pe P] of one token and layer, shared by all heads. Which rows a
segment sees is the group's business; a row past a context's end is read (row 0, zeros) but
masked. Formula: DeepSeek-V2 (arXiv 2405.04434), §2.1, without any rotation.

Dimensions: T tokens, B segments, W the longest segment, L the longest context, H heads,
C latent, P pe, N nope, V value, R cache rows; D is C + P in a cache row, N + P in a query;
K inputs and O outputs of a head's matrix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stagecoach.kernels.norm.reference import rms_norm
from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.kernels.quantization import gathered, movable, narrowed
from stagecoach.kernels.ragged import SegmentGroup


def write_rows(
    cache_RD: Tensor,
    latent_TC: Tensor,
    k_pe_TP: Tensor,
    norm_weight_C: Tensor,
    eps: float,
    cache_rows_T: Tensor,
) -> None:
    """cache_RD[cache_rows_T[t]] = [RMS norm of latent_TC[t] | k_pe_TP[t]], in place.

    Args:
        cache_RD: [R, C + P] rows of one layer, of any floating type; E4M3 without a factor.
        latent_TC: any floating type.
        k_pe_TP: the same type.
        norm_weight_C: any floating type.
        eps: added to the mean square of a latent.
        cache_rows_T: int64 [T], all different.
    """
    rows_TD = torch.cat([rms_norm(latent_TC, norm_weight_C, eps), k_pe_TP], dim=-1)
    rows_TD = narrowed(rows_TD, cache_RD.dtype)
    movable(cache_RD).index_copy_(0, cache_rows_T, movable(rows_TD))


def head_product(x_THK: Tensor, weight_HKO: Tensor, gate_THO: Tensor | None = None) -> Tensor:
    """x_THK[:, h] @ weight_HKO[h] of each head, times sigmoid(gate_THO).

    Absorbs an up-projection of latents: of keys into queries (K = N, O = C), of values into
    outputs (K = C, O = V).

    Args:
        x_THK: any floating type.
        weight_HKO: the same type, any strides.
        gate_THO: the same type; None: no gate.

    Returns:
        [T, H, O] in `x_THK.dtype`.
    """
    y_THO = torch.bmm(x_THK.transpose(0, 1), weight_HKO).transpose(0, 1)
    return y_THO if gate_THO is None else y_THO * gate_THO.sigmoid()


def mla_decode(
    q_latent_THC: Tensor, q_pe_THP: Tensor, cache_RD: Tensor, group: SegmentGroup, scale: float
) -> Tensor:
    """Absorbed attention: queries and outputs live in the latent space.

    score(t, s) = (q_latent_t · latent_s + q_pe_t · pe_s) · scale; the output is the softmax
    mixture of latents. Token w of a segment sees positions < start + w + 1; the rows of the
    segment's own tokens must have been written before.

    Args:
        q_latent_THC: [T, H, C] queries times the key up-projection.
        q_pe_THP: [T, H, P], same type.
        cache_RD: [R, C + P].
        group: the segments of the T tokens with their contexts.
        scale: of the scores.

    Returns:
        [T, H, C] in `q_latent_THC.dtype`; scores, softmax and sums in the accumulate type.
    """
    dtype = accumulate_dtype(q_latent_THC.dtype)
    num_segments, num_positions = group.context_rows_BL.shape
    latent_width = q_latent_THC.shape[2]
    rows_BLD = gathered(cache_RD, group.context_rows_BL.flatten(), dtype)
    rows_BLD = rows_BLD.view(num_segments, num_positions, -1)
    q_THD = torch.cat((q_latent_THC, q_pe_THP), dim=2).to(dtype).mul_(scale)
    q_BGD = group.pad(q_THD).flatten(1, 2)  # G = W * H
    scores_BGL = torch.bmm(q_BGD, rows_BLD.mT)
    scores_BWHL = scores_BGL.view(num_segments, group.max_length, -1, num_positions)
    scores_BWHL.masked_fill_(_hidden_positions(group).unsqueeze(2), float("-inf"))
    if group.max_drafts:
        _clear_drafts(rows_BLD, group)
    o_BGC = torch.bmm(scores_BGL.softmax(-1), rows_BLD[:, :, :latent_width])
    o_BWHC = o_BGC.view(num_segments, group.max_length, -1, latent_width)
    return group.flat(o_BWHC).to(q_latent_THC.dtype)


def mla_prefill(
    q_THD: Tensor,
    cache_RD: Tensor,
    kv_up_OC: Tensor,
    group: SegmentGroup,
    scale: float,
    gate_THV: Tensor | None = None,
) -> Tensor:
    """Attention in head space over cached prefixes and the chunks' own rows.

    The latents of each segment's context, its own rows included (written before), are
    gathered and up-projected once. Token w sees positions < start + w + 1.

    Args:
        q_THD: [T, H, N + P] queries.
        cache_RD: [R, C + P].
        kv_up_OC: [H * (N + V), C], of each head first keys, then values.
        group: the segments of the T tokens with their contexts.
        scale: of the scores.
        gate_THV: outputs are multiplied by its sigmoid; None: no gate.

    Returns:
        [T, H, V] in `q_THD.dtype`; the softmax is in the accumulate type.
    """
    num_heads, latent_width = q_THD.shape[1], kv_up_OC.shape[1]
    nope_width = q_THD.shape[2] - (cache_RD.shape[1] - latent_width)
    num_segments, num_positions = group.context_rows_BL.shape
    rows_BLD = gathered(cache_RD, group.context_rows_BL.flatten(), q_THD.dtype)
    rows_BLD = rows_BLD.view(num_segments, num_positions, -1)
    kv_BLO = F.linear(rows_BLD[:, :, :latent_width], kv_up_OC)
    kv_BLHO = kv_BLO.unflatten(-1, (num_heads, -1))
    k_nope_BLHN, v_BLHV = kv_BLHO.tensor_split((nope_width,), dim=-1)
    value_width = v_BLHV.shape[3]
    pe_BLHP = rows_BLD[:, :, None, latent_width:].expand(-1, -1, num_heads, -1)
    k_BHLD = torch.cat((k_nope_BLHN, pe_BLHP), dim=3).transpose(1, 2)
    q_BHWD = group.pad(q_THD).transpose(1, 2)
    # The fused CPU kernel wants values as wide as keys; without it [W, L] scores fill memory.
    v_BHLD = F.pad(v_BLHV, (0, max(0, q_THD.shape[2] - value_width))).transpose(1, 2)
    if num_positions == group.max_length and not group.starts_B.any():
        o_BHWD = F.scaled_dot_product_attention(q_BHWD, k_BHLD, v_BHLD, is_causal=True, scale=scale)
    else:
        seen_B1WL = _hidden_positions(group).logical_not_().unsqueeze(1)
        o_BHWD = F.scaled_dot_product_attention(
            q_BHWD, k_BHLD, v_BHLD, attn_mask=seen_B1WL, scale=scale
        )
    o_THV = group.flat(o_BHWD[..., :value_width].transpose(1, 2))
    return o_THV if gate_THV is None else o_THV * gate_THV.sigmoid()


def _clear_drafts(rows_BLD: Tensor, group: SegmentGroup) -> None:
    """Zeros, in place, for what is not finite in the rows of a window's drafts.

    A share of 0 times NaN is NaN, and a draft that may be wrong must not reach the tokens before
    it. Those that see the row have NaN in their scores already.
    """
    num_segments, num_positions, width = rows_BLD.shape
    offsets_J = torch.arange(1, 1 + group.max_drafts, device=rows_BLD.device)
    places_BJ = (group.starts_B.unsqueeze(1) + offsets_J).clamp_(max=num_positions - 1)
    index_BJD = places_BJ.unsqueeze(2).expand(num_segments, group.max_drafts, width)
    drafts_BJD = rows_BLD.gather(1, index_BJD).nan_to_num_(0.0, 0.0, 0.0)
    rows_BLD.scatter_(1, index_BJD, drafts_BJD)


def _hidden_positions(group: SegmentGroup) -> Tensor:
    """bool [B, W, L]: True where a token must not look. No row is hidden throughout."""
    device = group.starts_B.device
    positions_L = torch.arange(group.context_rows_BL.shape[1], device=device)
    if group.max_length == 1:
        return positions_L >= group.context_lengths_B.view(-1, 1, 1)
    tokens_W = torch.arange(group.max_length, device=device)
    last_BW = group.starts_B.unsqueeze(1) + tokens_W
    # Padded tokens look no farther than their segment's last one.
    last_BW = torch.minimum(last_BW, group.context_lengths_B.unsqueeze(1) - 1)
    return positions_L > last_BW.unsqueeze(2)
