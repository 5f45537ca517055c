"""Launches the short convolution on a GPU: checks, and how much one program does."""

from typing import NamedTuple

from torch import Tensor
from triton import cdiv, next_power_of_2

from stagecoach.kernels.ragged import PackedGroup
from stagecoach.kernels.short_conv.conv_kernel import conv_kernel

# Tokens of a program behind the first ones of a segment.
_BLOCK = 32
_NUM_WARPS = 4


class ConvolvedHeads(NamedTuple):
    """What the recurrence takes, each [T, H, D] contiguous in the type of the activations."""

    q_THK: Tensor  # normalised and scaled
    k_THK: Tensor  # normalised
    v_THV: Tensor


def convolve_heads(
    x_TC: Tensor, weight_CW: Tensor, rows_SNC: Tensor, num_heads: int, group: PackedGroup
) -> ConvolvedHeads:
    """`short_conv.reference.short_convolution`, then `kda.reference.normalize_qk`.

    Sums and norms are float32; the results are rounded once.

    Args:
        x_TC: [T, 3 H D] projections; tokens may lie apart.
        weight_CW: [3 H D, W], contiguous; last tap on the current token.
        rows_SNC: [S, N, 3 H D] pool of rows in the type of `x_TC`, contiguous, updated in place.
        num_heads: H.
        group: windows or chunks.

    Returns:
        Rows of tokens that are nobody's are undefined.
    """
    num_tokens, num_channels = x_TC.shape
    num_taps = weight_CW.shape[1]
    head_dim = num_channels // (3 * num_heads)
    assert num_channels == 3 * num_heads * head_dim, f"{num_channels} channels, {num_heads} heads"
    assert x_TC.stride(1) == 1 and weight_CW.is_contiguous() and rows_SNC.is_contiguous()
    assert rows_SNC.dtype == x_TC.dtype, f"rows of {rows_SNC.dtype}, tokens of {x_TC.dtype}"
    assert num_tokens == group.num_tokens, f"{num_tokens} tokens: {group}"
    needed = num_taps - 1 + max(group.max_replay, group.max_drafts)
    assert needed <= rows_SNC.shape[1], f"{rows_SNC.shape[1]} rows of a slot, {needed} needed"
    qkv_3THD = x_TC.new_empty(3, num_tokens, num_heads, head_dim)
    q_THK, k_THK, v_THV = qkv_3THD.unbind()
    # A segment's first program does all of a window, and of a chunk what needs the history.
    num_first = next_power_of_2(max(2, min(group.max_length, _BLOCK), num_taps - 1))
    num_blocks = 0 if group.max_length <= num_first else cdiv(num_tokens, _BLOCK)
    block_dim = next_power_of_2(head_dim)
    saves = group.saves
    conv_kernel[(3 * num_heads, group.num_segments + num_blocks)](
        x_TC,
        weight_CW,
        rows_SNC,
        q_THK,
        k_THK,
        v_THV,
        group.offsets_S,
        group.segment_T,
        group.read_slots_B,
        group.write_slots_B,
        group.replay_B,
        group.num_drafts_B,
        # Any address where nothing is saved: it is not looked at.
        group.offsets_S if saves is None else saves.first_S,
        group.offsets_S if saves is None else saves.num_tokens_E,
        group.offsets_S if saves is None else saves.slots_E,
        x_TC.stride(0),
        rows_SNC.stride(0),
        rows_SNC.stride(1),
        num_tokens,
        group.num_segments,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_dim,
        TAPS=num_taps,
        BLOCK_TAPS=next_power_of_2(max(2, num_taps - 1)),
        FIRST=num_first,
        BLOCK=_BLOCK,
        KEPT=next_power_of_2(num_taps - 1 + max(1, group.max_drafts)),
        HAS_SAVES=saves is not None,
        num_warps=_NUM_WARPS,
    )
    return ConvolvedHeads(q_THK, k_THK, v_THV)
