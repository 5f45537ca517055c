"""Depthwise causal convolution in plain PyTorch: the specification and the CPU implementation.

Dimensions: T tokens, C channels, W taps, R = W − 1 history rows, S slots, N rows of a slot or
of history and segment together, B segments, L the longest segment, E saves.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.kernels.ragged import SegmentGroup
from stagecoach.kernels.saves import GroupSaves


def short_convolution(
    x_TC: Tensor, weight_CW: Tensor, rows_SNC: Tensor, group: SegmentGroup
) -> Tensor:
    """y_t = silu(Σ_i weight[:, i] · x_{t − W + 1 + i}), and the history moved on.

    A slot holds pre-convolution rows: R before the certain end of what wrote it, then those of
    its drafts. A segment's history are the R rows from `replay_B` on at `read_slots_B`. To
    `write_slots_B` go the R rows before its own certain end, taken across its start where it is
    shorter, and its drafts' rows; to the slot of a save, the R rows before its position.
    Formula: Kimi Linear (arXiv 2510.26692), §4; fla `ShortConvolution`.

    Args:
        x_TC: [T, C] projections, any floating type.
        weight_CW: [C, W], last tap on the current token.
        rows_SNC: [S, N, C] pool of rows, oldest first; updated in place. N is at least R plus
            the longest replay, and R plus the most drafts.
        group: the segments of the T tokens. Where one has drafts, all are windows: an anchor,
            then drafts.

    Returns:
        [T, C] in `x_TC.dtype`; sums are made in the accumulate type.
    """
    dtype = accumulate_dtype(x_TC.dtype)
    weight_WC = weight_CW.t().to(dtype).contiguous()
    num_rows = len(weight_WC) - 1
    length = group.max_length
    is_window = length == 1 + group.max_drafts
    assert is_window or not group.max_drafts, f"a chunk with drafts: {group}"
    if group.max_replay:
        places_BR = group.replay_B.unsqueeze(1) + torch.arange(num_rows, device=x_TC.device)
        history_BRC = rows_SNC[group.read_slots_B.unsqueeze(1), places_BR]
    else:
        history_BRC = rows_SNC.narrow(1, 0, num_rows).index_select(0, group.read_slots_B)
    rows_BNC = torch.cat((history_BRC, group.pad(x_TC).to(rows_SNC.dtype)), dim=1)
    if is_window:
        kept_BNC = rows_BNC.narrow(1, 1, num_rows + group.max_drafts)
    else:
        kept_BR = group.lengths_B.unsqueeze(1) + torch.arange(num_rows, device=x_TC.device)
        kept_BNC = rows_BNC.gather(1, kept_BR.unsqueeze(2).expand(-1, -1, rows_BNC.shape[2]))
    if group.saves is not None:  # first, for they may read what the segments overwrite
        _save_rows(rows_BNC, rows_SNC, num_rows, group, group.saves)
    rows_SNC.narrow(1, 0, kept_BNC.shape[1]).index_copy_(0, group.write_slots_B, kept_BNC)
    rows_BNC = rows_BNC.to(dtype)
    if length == 1:
        sums_TC = (rows_BNC * weight_WC).sum(1)
        return F.silu(sums_TC, inplace=True).to(x_TC.dtype)
    sums_BLC = rows_BNC[:, :length] * weight_WC[0]
    for tap in range(1, num_rows + 1):
        sums_BLC.addcmul_(rows_BNC[:, tap : tap + length], weight_WC[tap])
    return group.flat(F.silu(sums_BLC, inplace=True)).to(x_TC.dtype)


def _save_rows(
    rows_BNC: Tensor, rows_SNC: Tensor, num_rows: int, group: SegmentGroup, saves: GroupSaves
) -> None:
    """The `num_rows` rows before each save's position, into its slot.

    Args:
        rows_BNC: history and tokens of each segment.
        rows_SNC: as the step found it: rows before the history are still at `read_slots_B`.
    """
    segment_E1, num_tokens_E1 = saves.states.rows_E.unsqueeze(1), saves.num_tokens_E.unsqueeze(1)
    places_ER = num_tokens_E1 + torch.arange(num_rows, device=rows_BNC.device)
    saved_ERC = rows_BNC[segment_E1, places_ER.clamp(min=0)]
    if group.max_replay:
        # A save before the end of the replayed rows needs none behind it.
        recorded_ER = group.replay_B[segment_E1] + places_ER.clamp(max=num_rows - 1)
        recorded_ERC = rows_SNC[group.read_slots_B[segment_E1], recorded_ER.clamp_(min=0)]
        saved_ERC = torch.where(num_tokens_E1.unsqueeze(2) <= 0, recorded_ERC, saved_ERC)
    rows_SNC.narrow(1, 0, num_rows).index_copy_(0, saves.states.slots_E, saved_ERC)
