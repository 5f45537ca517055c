"""Attention of a drafter's blocks in plain PyTorch: the specification and the CPU implementation.

A block sees its request's context, rows of the cache, and its own tokens, whose rows are at
hand and never enter the cache. Keys are shared by groups of query heads; latent attention is
the case of one group whose values are the first columns of its keys.

    place   0 ............. start ...... L ......... L + K = S
            | context rows  | hidden     | the block's rows |

Blocks are taken in runs of alike contexts, since each is padded to the longest of its run.

Dimensions: N blocks of a run, K tokens of a block, L the longest context, S places, H query
heads, G key heads, D query and key width, V value width, R cache rows, X row width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.kernels.quantization import gathered
from stagecoach.kernels.ragged import BlockInputs, RowLayout


class BlockPlaces(NamedTuple):
    """What the blocks of one run see; every layer reads it."""

    blocks: slice  # which of the pass they are
    context_rows_M: Tensor  # int64, N * L cache rows; row 0, which holds zeros, past a context
    is_hidden_NKS: Tensor  # bool, True where a token must not look


def block_places(
    block: BlockInputs, num_tokens: int, *, is_causal: bool
) -> tuple[BlockPlaces, ...]:
    """Places of blocks of `num_tokens` tokens, for each run.

    A token sees positions [0, start) of the context and all of its block, or with `is_causal`
    its block's tokens up to itself.
    """
    device = block.starts_N.device
    is_later_KK = torch.zeros(num_tokens, num_tokens, dtype=torch.bool, device=device)
    if is_causal:
        is_later_KK = is_later_KK.logical_not_().triu_(1)
    places = []
    first = 0
    for num_blocks, longest in block.runs:
        blocks = slice(first, first + num_blocks)
        first = blocks.stop
        starts_N1 = block.starts_N[blocks].unsqueeze(1)
        is_past_NL = torch.arange(longest, device=device) >= starts_N1
        is_hidden_NKS = torch.cat(
            (
                is_past_NL.unsqueeze(1).expand(-1, num_tokens, -1),
                is_later_KK.expand(num_blocks, -1, -1),
            ),
            dim=2,
        )
        # A masked score still multiplies the value behind it, and what lies there may be NaN.
        rows_NL = block.context_rows_NL[blocks, :longest].masked_fill(is_past_NL, 0)
        places.append(BlockPlaces(blocks, rows_NL.flatten(), is_hidden_NKS))
    assert first == len(block.starts_N), f"runs {block.runs} of {len(block.starts_N)} blocks"
    return tuple(places)


def block_rows(cache_RX: Tensor, own_NKX: Tensor, places: BlockPlaces) -> Tensor:
    """Rows at every place of a run: [N, S, X] in the own rows' type.

    Args:
        own_NKX: of all blocks of the pass.
    """
    own_NKX = own_NKX[places.blocks]
    context_MX = gathered(cache_RX, places.context_rows_M, own_NKX.dtype)
    context_NLX = context_MX.view(len(own_NKX), -1, own_NKX.shape[2])
    return torch.cat((context_NLX, own_NKX), dim=1)


def attend_blocks(
    q_NKHD: Tensor,
    cache_RX: Tensor,
    own_NKX: Tensor,
    places: Sequence[BlockPlaces],
    layout: RowLayout,
    scale: float,
) -> Tensor:
    """`block_attention` of all blocks of a pass over the cache and their own rows.

    Args:
        q_NKHD: any floating type; D is a whole key, in latent attention both its parts.
        cache_RX: only rows that `places` names are read.
        own_NKX: in the queries' type.
        places: run by run, in order of the blocks.
        layout: how a row is read as keys and values.
        scale: of the scores.

    Returns:
        [N, K, H, V] in `q_NKHD.dtype`.
    """
    outputs = []
    for run in places:
        rows_NSX = block_rows(cache_RX, own_NKX, run)
        if layout.value_start is not None:
            keys, values = rows_NSX.tensor_split((layout.value_start,), dim=-1)
            k_NSGD = keys.unflatten(-1, (layout.num_groups, -1))
            v_NSGV = values.unflatten(-1, (layout.num_groups, -1))
        else:
            k_NSGD = rows_NSX.unsqueeze(2)
            v_NSGV = k_NSGD[..., : layout.value_width]
        outputs.append(
            block_attention(q_NKHD[run.blocks], k_NSGD, v_NSGV, run.is_hidden_NKS, scale)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def block_attention(
    q_NKHD: Tensor, k_NSGD: Tensor, v_NSGV: Tensor, is_hidden_NKS: Tensor, scale: float
) -> Tensor:
    """softmax(q · k * scale) v over the places that are not hidden.

    Args:
        q_NKHD: any floating type.
        k_NSGD: the same type; query head h reads key head h // (H / G).
        v_NSGV: the same type.
        is_hidden_NKS: bool; no token has all places hidden.
        scale: of the scores.

    Returns:
        [N, K, H, V] in `q_NKHD.dtype`; scores, softmax and sums in the accumulate type.
    """
    dtype = accumulate_dtype(q_NKHD.dtype)
    num_blocks, num_tokens, num_heads, _ = q_NKHD.shape
    num_groups = k_NSGD.shape[2]
    in_groups = (num_groups, num_heads // num_groups)
    # E = K * H / G: tokens and the query heads that share a key head, in one axis.
    q_NGED = q_NKHD.to(dtype).mul(scale).unflatten(2, in_groups).transpose(1, 2).flatten(2, 3)
    scores_NGES = q_NGED @ k_NSGD.to(dtype).permute(0, 2, 3, 1)
    scores_NGKMS = scores_NGES.unflatten(2, (num_tokens, -1))
    scores_NGKMS.masked_fill_(is_hidden_NKS[:, None, :, None], float("-inf"))
    o_NGEV = scores_NGES.softmax(-1) @ v_NSGV.to(dtype).transpose(1, 2)
    o_NKGMV = o_NGEV.unflatten(2, (num_tokens, -1)).transpose(1, 2)
    return o_NKGMV.reshape(num_blocks, num_tokens, num_heads, -1).to(q_NKHD.dtype)
