"""Newest tokens in plain PyTorch: the specification.

Dimensions: T tokens, B segments, N rows of the sampling table.
"""

from torch import Tensor


def note_newest(newest_N: Tensor, sampling_rows_B: Tensor, token_ids_B: Tensor) -> None:
    """Keep what each segment has chosen, in place.

    Args:
        newest_N: int32.
        sampling_rows_B: int32, all different; -1: the segment has chosen nothing.
        token_ids_B: int32.
    """
    is_chosen_B = sampling_rows_B >= 0
    newest_N[sampling_rows_B[is_chosen_B].long()] = token_ids_B[is_chosen_B]


def fill_in_newest(
    token_ids_T: Tensor, segment_T: Tensor, sampling_rows_B: Tensor, newest_N: Tensor
) -> None:
    """Put the newest token of its row in the place of each id below 0, in place.

    Args:
        token_ids_T: int32.
        segment_T: int32, segment of each token; -1: it is nobody's and stays as it is.
        sampling_rows_B: int32, of each segment; at least 0 where an id is below 0.
        newest_N: int32.
    """
    is_chained_T = (token_ids_T < 0) & (segment_T >= 0)
    rows_C = sampling_rows_B[segment_T[is_chained_T].long()]
    token_ids_T[is_chained_T] = newest_N[rows_C.long()]
