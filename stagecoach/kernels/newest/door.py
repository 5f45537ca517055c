"""Newest tokens wherever the tensors lie: the reference on CPU, Triton on a GPU."""

from torch import Tensor

from stagecoach.kernels.newest import reference


def note_newest(newest_N: Tensor, sampling_rows_B: Tensor, token_ids_B: Tensor) -> None:
    """`reference.note_newest`: what each segment has chosen."""
    if newest_N.is_cuda:
        from stagecoach.kernels.newest import cuda

        cuda.note_newest(newest_N, sampling_rows_B, token_ids_B)
    else:
        reference.note_newest(newest_N, sampling_rows_B, token_ids_B)


def fill_in_newest(
    token_ids_T: Tensor, segment_T: Tensor, sampling_rows_B: Tensor, newest_N: Tensor
) -> None:
    """`reference.fill_in_newest`: the tokens of chained windows."""
    if token_ids_T.is_cuda:
        from stagecoach.kernels.newest import cuda

        cuda.fill_in_newest(token_ids_T, segment_T, sampling_rows_B, newest_N)
    else:
        reference.fill_in_newest(token_ids_T, segment_T, sampling_rows_B, newest_N)
