"""Depthwise causal convolution in plain PyTorch: the specification and the CPU implementation.

Dimensions: T tokens, C channels, W taps, R = W − 1 history rows, S slots, N rows of a slot or
of history and segment together, B segments, L the longest segment.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.kernels.ragged import SegmentGroup


def short_convolution(
    x_TC: Tensor, weight_CW: Tensor, rows_SNC: Tensor, group: SegmentGroup
) -> Tensor:
    """y_t = silu(Σ_i weight[:, i] · x_{t − W + 1 + i}), and the history moved on.

    A slot holds pre-convolution rows: R before the certain end of what wrote it, then those of
    its drafts. A segment's history are the R rows from `replay_B` on at `read_slots_B`. To
    `write_slots_B` go the R rows before its own certain end, taken across its start where it is
    shorter, and its drafts' rows. Formula: Kimi Linear (arXiv 2510.26692), §4; fla
    `ShortConvolution`.

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
    rows_SNC.narrow(1, 0, kept_BNC.shape[1]).index_copy_(0, group.write_slots_B, kept_BNC)
    rows_BNC = rows_BNC.to(dtype)
    if length == 1:
        sums_TC = (rows_BNC * weight_WC).sum(1)
        return F.silu(sums_TC, inplace=True).to(x_TC.dtype)
    sums_BLC = rows_BNC[:, :length] * weight_WC[0]
    for tap in range(1, num_rows + 1):
        sums_BLC.addcmul_(rows_BNC[:, tap : tap + length], weight_WC[tap])
    return group.flat(F.silu(sums_BLC, inplace=True)).to(x_TC.dtype)
