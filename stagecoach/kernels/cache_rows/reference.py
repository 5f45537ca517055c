"""Storing rows in plain PyTorch: the specification and the CPU implementation.

Dimensions: T tokens, Y layers, R cache rows of a layer, D row width.
"""

from torch import Tensor

from stagecoach.kernels.quantization import movable, narrowed


def store_rows(rows_TYD: Tensor, cache_YRD: Tensor, cache_rows_T: Tensor) -> None:
    """Write the rows of each token to its cache row of every layer, in place.

    Args:
        rows_TYD: any floating type.
        cache_YRD: the same type or a narrower one.
        cache_rows_T: integers, all different but for -1: such a token's rows go nowhere.
    """
    is_real_T = cache_rows_T >= 0
    rows_YTD = narrowed(rows_TYD.transpose(0, 1), cache_YRD.dtype)
    rows_YTD = movable(rows_YTD)[:, is_real_T]
    movable(cache_YRD).index_copy_(1, cache_rows_T[is_real_T].long(), rows_YTD)
