"""Launches the storing of rows on a GPU."""

from torch import Tensor
from triton import next_power_of_2

from stagecoach.kernels.cache_rows.store_kernel import store_rows_kernel


def store_rows(rows_TYD: Tensor, cache_YRD: Tensor, cache_rows_T: Tensor) -> None:
    """`reference.store_rows`; rows lie in one piece."""
    num_tokens, num_layers, width = rows_TYD.shape
    assert cache_YRD.shape[0] == num_layers and cache_YRD.shape[2] == width
    assert len(cache_rows_T) == num_tokens and cache_rows_T.is_contiguous()
    assert rows_TYD.stride(2) == cache_YRD.stride(2) == 1, "rows in one piece"
    if not rows_TYD.numel():
        return
    block_size = next_power_of_2(width)
    store_rows_kernel[(num_tokens, num_layers)](
        rows_TYD,
        cache_YRD,
        cache_rows_T,
        width,
        rows_TYD.stride(0),
        rows_TYD.stride(1),
        cache_YRD.stride(0),
        cache_YRD.stride(1),
        BLOCK_D=block_size,
        num_warps=min(8, max(1, block_size // 256)),
    )
