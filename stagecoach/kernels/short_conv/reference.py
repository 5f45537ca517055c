"""Depthwise causal convolution in plain PyTorch: the specification and the CPU implementation.

Dimensions: T tokens, C channels, W taps, R = W − 1 history rows, S slots, B segments,
L the longest segment.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.kernels.ragged import SegmentGroup


def short_convolution(
    x_TC: Tensor, weight_CW: Tensor, rows_SRC: Tensor, group: SegmentGroup
) -> Tensor:
    """y_t = silu(Σ_i weight[:, i] · x_{t − W + 1 + i}), and the history moved on.

    The rows before a segment's first token come from `group.read_slots_B`; its last R
    pre-convolution rows, taken across that border when it is shorter than R, go to
    `group.write_slots_B`. Formula: Kimi Linear (arXiv 2510.26692), §4; fla `ShortConvolution`.

    Args:
        x_TC: [T, C] projections, any floating type.
        weight_CW: [C, W], last tap on the current token.
        rows_SRC: [S, R, C] pool of histories, oldest row first; updated in place.
        group: the segments of the T tokens.

    Returns:
        [T, C] in `x_TC.dtype`; sums are made in the accumulate type.
    """
    dtype = accumulate_dtype(x_TC.dtype)
    weight_WC = weight_CW.t().to(dtype).contiguous()
    num_rows = rows_SRC.shape[1]
    history_BRC = rows_SRC.index_select(0, group.read_slots_B)
    rows_BNC = torch.cat((history_BRC, group.pad(x_TC).to(rows_SRC.dtype)), dim=1)
    if group.max_length == 1:
        rows_SRC.index_copy_(0, group.write_slots_B, rows_BNC[:, 1:])
        sums_TC = (rows_BNC.to(dtype) * weight_WC).sum(1)
        return F.silu(sums_TC, inplace=True).to(x_TC.dtype)
    offsets_R = torch.arange(num_rows, device=x_TC.device)
    kept_BR = group.lengths_B.unsqueeze(1) + offsets_R
    kept_BRC = rows_BNC.gather(1, kept_BR.unsqueeze(2).expand(-1, -1, rows_BNC.shape[2]))
    rows_SRC.index_copy_(0, group.write_slots_B, kept_BRC)
    rows_BNC = rows_BNC.to(dtype)
    length = group.max_length
    sums_BLC = rows_BNC[:, :length] * weight_WC[0]
    for tap in range(1, num_rows + 1):
        sums_BLC.addcmul_(rows_BNC[:, tap : tap + length], weight_WC[tap])
    return group.flat(F.silu(sums_BLC, inplace=True)).to(x_TC.dtype)
