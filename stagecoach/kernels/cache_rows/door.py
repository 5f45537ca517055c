"""Storing rows wherever the tensors lie: the reference on CPU, Triton on a GPU."""

from torch import Tensor

from stagecoach.kernels.cache_rows import reference


def store_rows(rows_TYD: Tensor, cache_YRD: Tensor, cache_rows_T: Tensor) -> None:
    """`reference.store_rows`: the rows of each token to its cache row of every layer."""
    if cache_YRD.is_cuda:
        from stagecoach.kernels.cache_rows import cuda

        cuda.store_rows(rows_TYD, cache_YRD, cache_rows_T)
    else:
        reference.store_rows(rows_TYD, cache_YRD, cache_rows_T)
