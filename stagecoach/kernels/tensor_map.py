"""What the copy engine of a Hopper GPU needs to know of a matrix; made by the driver.

Owns the call and the description's alignment. Knows nothing of what is copied.
"""

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from stagecoach.kernels.quantization import FP8_DTYPE

_NUM_WORDS = 16
_ALIGNMENT = 64
# CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion of the driver's cuda.h.
_BYTE, _BFLOAT16, _SWIZZLE_128B, _PROMOTE_256B = 0, 9, 3, 3
_BOX_BYTES = 128  # of a row, as far as pieces change places

TensorMap = ctypes.c_uint64 * _NUM_WORDS


def swizzled_boxes(x_RX: Tensor, num_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """A matrix in boxes of `num_rows` rows and 128 bytes of each, swizzled; zeros beyond its ends.

    Args:
        x_RX: bfloat16 or E4M3 on a GPU, rows in one piece, each at a multiple of 16 bytes.
        num_rows: up to 256.
    """
    assert x_RX.dtype in (torch.bfloat16, FP8_DTYPE), f"{x_RX.dtype}"
    assert x_RX.stride(1) == 1, f"strides {x_RX.stride()}"
    value_bytes = x_RX.element_size()
    return _encode(
        x_RX.data_ptr(), *x_RX.shape, x_RX.stride(0) * value_bytes, value_bytes, num_rows
    )


@lru_cache(maxsize=4096)
def _encode(
    address: int,
    num_rows: int,
    num_columns: int,
    row_bytes: int,
    value_bytes: int,
    box_rows: int,
) -> ctypes.Array[ctypes.c_uint64]:
    assert address % 16 == 0 and row_bytes % 16 == 0, f"rows of {row_bytes} bytes at {address:#x}"
    room = (ctypes.c_uint8 * (ctypes.sizeof(TensorMap) + _ALIGNMENT))()
    made = TensorMap.from_buffer(room, -ctypes.addressof(room) % _ALIGNMENT)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(made)),
        _BFLOAT16 if value_bytes == 2 else _BYTE,
        ctypes.c_uint32(2),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(num_columns, num_rows),
        (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(_BOX_BYTES // value_bytes, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,  # not interleaved
        _SWIZZLE_128B,
        _PROMOTE_256B,
        0,  # zeros beyond the matrix
    )
    assert status == 0, f"cuTensorMapEncodeTiled: {status}"
    return made


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
