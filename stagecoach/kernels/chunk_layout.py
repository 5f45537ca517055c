"""How the segments of a group are cut into chunks of fixed length, and where states are filed.

Built once a step from plain numbers; every KDA layer's chunked form reads it. Knows lengths
and places, no values.

Dimensions: T tokens of the group, B segments, H heads, D values of one head, C places of a
chunk, J chunks of all segments, M = J * H, N chunks of the longest segment, E saves, I those of
them that lie inside a chunk.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stagecoach.kernels.saves import ChunkSaves, GroupSaves, StateSaves

CHUNK_SIZE = 64


class ChunkLayout(NamedTuple):
    """The chunks of all segments: first chunks first, longer segments first among them.

    So the n-th chunks lie together, and those of segments that still run come first.
    """

    order_B: Tensor  # int64, segments by falling number of chunks
    num_segments_N: tuple[int, ...]  # segments that have an n-th chunk
    token_JC: Tensor  # int64, flat token of each place; any token where nothing is
    is_real_JC: Tensor  # bool
    chunk_T: Tensor  # int64, which of the J chunks each flat token is in
    place_T: Tensor  # int64, and its place there
    saves: ChunkSaves | None  # None: no segment saves

    def chunks(self, x_THD: Tensor) -> Tensor:
        """[T, H, D] -> [J * H, C, D], zeros where no token is."""
        num_heads, width = x_THD.shape[1:]
        num_chunks, chunk_size = self.token_JC.shape
        heads_H1 = torch.arange(num_heads, device=x_THD.device).unsqueeze(1)
        rows_JHC = self.token_JC.unsqueeze(1) * num_heads + heads_H1
        x_RD = x_THD.reshape(-1, width).index_select(0, rows_JHC.flatten())
        x_JHCD = x_RD.view(num_chunks, num_heads, chunk_size, width)
        if len(x_THD) < self.token_JC.numel():
            x_JHCD.masked_fill_(~self.is_real_JC[:, None, :, None], 0)
        return x_JHCD.flatten(0, 1)

    def tokens(self, x_MCD: Tensor, num_heads: int) -> Tensor:
        """[J * H, C, D] -> [T, H, D]."""
        chunk_size, width = x_MCD.shape[1:]
        heads_H = torch.arange(num_heads, device=x_MCD.device)
        rows_TH = (self.chunk_T.unsqueeze(1) * num_heads + heads_H) * chunk_size
        rows_TH += self.place_T.unsqueeze(1)
        return x_MCD.view(-1, width).index_select(0, rows_TH.flatten()).view(-1, num_heads, width)


def lay_out_chunks(
    lengths_B: np.ndarray, saves: GroupSaves | None, chunk_size: int = CHUNK_SIZE
) -> ChunkLayout:
    """The layout of segments of these lengths.

    Args:
        lengths_B: int64, tokens of each segment.
        saves: those of the group, each behind one of its tokens.
        chunk_size: C, a power of two; shorter segments use a shorter chunk.
    """
    assert chunk_size & (chunk_size - 1) == 0, f"chunk_size={chunk_size}"
    chunk_size = min(chunk_size, 1 << (int(lengths_B.max()) - 1).bit_length())
    counts_B = -(-lengths_B // chunk_size)
    order_B = np.argsort(-counts_B, kind="stable")
    numbers_N1 = np.arange(counts_B.max())[:, None]
    is_chunk_NB = numbers_N1 < counts_B[order_B]
    first_B = (np.cumsum(lengths_B) - lengths_B)[order_B]
    begin_NB = numbers_N1 * chunk_size
    places_C = np.arange(chunk_size)
    is_real_JC = places_C < (lengths_B[order_B] - begin_NB)[is_chunk_NB][:, None]
    token_JC = (first_B + begin_NB)[is_chunk_NB][:, None] + places_C
    flat_places_T = np.flatnonzero(is_real_JC)[np.argsort(token_JC[is_real_JC])]
    return ChunkLayout(
        order_B=torch.from_numpy(order_B),
        num_segments_N=tuple(is_chunk_NB.sum(1).tolist()),
        token_JC=torch.from_numpy(np.minimum(token_JC, lengths_B.sum() - 1)),
        is_real_JC=torch.from_numpy(is_real_JC),
        chunk_T=torch.from_numpy(flat_places_T // chunk_size),
        place_T=torch.from_numpy(flat_places_T % chunk_size),
        saves=None
        if saves is None
        else _cut_saves(saves, lengths_B, order_B, is_chunk_NB, chunk_size),
    )


def _cut_saves(
    saves: GroupSaves,
    lengths_B: np.ndarray,
    order_B: np.ndarray,
    is_chunk_NB: np.ndarray,
    chunk_size: int,
) -> ChunkSaves:
    segment_E, slots_E = saves.states.rows_E.numpy(), saves.states.slots_E.numpy()
    num_tokens_E = saves.num_tokens_E.numpy()
    assert (num_tokens_E > 0).all(), f"a chunk files no replayed rows: {saves}"
    row_B = np.argsort(order_B)
    # At its end a segment stands at a border even where its last chunk is not full.
    is_end_E = num_tokens_E == lengths_B[segment_E]
    stop_E = np.where(is_end_E, len(is_chunk_NB), num_tokens_E // chunk_size)
    left_E = np.where(is_end_E, 0, num_tokens_E % chunk_size)
    order_E = np.argsort(stop_E, kind="stable")
    inside_I = np.flatnonzero(left_E)
    number_NB = np.cumsum(is_chunk_NB).reshape(is_chunk_NB.shape) - 1
    return ChunkSaves(
        states=StateSaves(
            rows_E=torch.from_numpy(row_B[segment_E[order_E]]),
            slots_E=torch.from_numpy(slots_E[order_E]),
            stops=tuple(stop_E[order_E].tolist()),
        ),
        slots_I=torch.from_numpy(slots_E[inside_I]),
        chunk_I=torch.from_numpy(number_NB[stop_E[inside_I], row_B[segment_E[inside_I]]]),
        num_tokens_I=torch.from_numpy(left_E[inside_I]),
    )
