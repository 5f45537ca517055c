"""Block attention wherever the tensors lie: the reference on CPU, Triton on a GPU.

Dimensions: as in `reference.py`; D is the width of a key.
"""

from collections.abc import Sequence

from torch import Tensor

from stagecoach.kernels.block_attention import reference
from stagecoach.kernels.ragged import PackedBlocks, RowLayout


def attend_blocks(
    q_NKHD: Tensor,
    cache_RX: Tensor,
    own_NKX: Tensor,
    places: Sequence[reference.BlockPlaces] | PackedBlocks,
    layout: RowLayout,
    scale: float,
) -> Tensor:
    """`reference.attend_blocks`: [N, K, H, V] in `q_NKHD.dtype`."""
    if isinstance(places, PackedBlocks):
        from stagecoach.kernels.block_attention import cuda

        return cuda.attend_blocks(q_NKHD, cache_RX, own_NKX, places, layout, scale)
    return reference.attend_blocks(q_NKHD, cache_RX, own_NKX, places, layout, scale)
