"""Launches what keeps and reads newest tokens on a GPU: checks and grid."""

import torch
from torch import Tensor

from stagecoach.kernels.newest.newest_kernel import fill_in_kernel, note_kernel

_BLOCK = 256


def note_newest(newest_N: Tensor, sampling_rows_B: Tensor, token_ids_B: Tensor) -> None:
    """`reference.note_newest`; all tensors in one piece."""
    _check(newest_N, sampling_rows_B, token_ids_B)
    num_segments = len(sampling_rows_B)
    assert len(token_ids_B) == num_segments, "one token a segment"
    if num_segments:
        note_kernel[(-(-num_segments // _BLOCK),)](
            newest_N, sampling_rows_B, token_ids_B, num_segments, BLOCK=_BLOCK, num_warps=4
        )


def fill_in_newest(
    token_ids_T: Tensor, segment_T: Tensor, sampling_rows_B: Tensor, newest_N: Tensor
) -> None:
    """`reference.fill_in_newest`; all tensors in one piece."""
    _check(token_ids_T, segment_T, sampling_rows_B, newest_N)
    num_tokens = len(token_ids_T)
    assert len(segment_T) == num_tokens, "one segment a token"
    if num_tokens:
        fill_in_kernel[(-(-num_tokens // _BLOCK),)](
            token_ids_T,
            segment_T,
            sampling_rows_B,
            newest_N,
            num_tokens,
            BLOCK=_BLOCK,
            num_warps=4,
        )


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), "int32 in one piece"
