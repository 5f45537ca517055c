"""Launches the mixture in CUDA C++: a cluster of thread blocks a token, each row read once.

Owns which tensors it takes. The cluster's size depends on the width alone, so that a token's
result does not depend on how many others there are.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stagecoach.kernels import nvrtc

_SOURCE = Path(__file__).with_name("mix.cu")
_VALUES = 8  # of a thread in each row: 16 bytes
_CLUSTER = 8
_MOST_THREADS = 1024
_MOST_BLOCKS = 15  # two sums for each of 16 rows are a warp


class MixArguments(ctypes.Structure):
    """`Arguments` in `mix.cu`, field by field."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("bank", "partial", "addend", "key_weight", "norm_weight")
        ),
        *((name, ctypes.c_void_p) for name in ("sum", "mixed", "normed")),
        ("bank_token_stride", ctypes.c_longlong),
        ("bank_block_stride", ctypes.c_longlong),
        ("partial_stride", ctypes.c_longlong),
        ("addend_stride", ctypes.c_longlong),
        ("eps", ctypes.c_float),
    ]


def is_taken(bank_TBH: Tensor, *rows: Tensor) -> bool:
    """Whether `mix.cu` takes a bank and further tensors whose rows have its width."""
    num_blocks, width = bank_TBH.shape[1:]
    tensors = (bank_TBH, *rows)
    return (
        bank_TBH.is_cuda
        and bank_TBH.dtype == torch.bfloat16
        and 0 < num_blocks <= _MOST_BLOCKS
        and width % (_VALUES * _CLUSTER) == 0
        and width // (_VALUES * _CLUSTER) <= _MOST_THREADS
        and all(x.data_ptr() % 16 == 0 for x in tensors)
        and all(stride % _VALUES == 0 for x in tensors for stride in x.stride()[:-1])
        and _has_clusters(bank_TBH.device)
    )


def mix(
    bank_TBH: Tensor,
    partial_TH: Tensor,
    addend_TH: Tensor | None,
    key_weight_H: Tensor,
    norm_weight_H: Tensor | None,
    eps: float,
    sum_TH: Tensor | None,
    mixed_TH: Tensor | None,
    normed_TH: Tensor | None,
    cluster: int = _CLUSTER,
) -> None:
    """One launch over at least one token; what is None is not made.

    Args:
        sum_TH, mixed_TH, normed_TH: [T, H] contiguous, written.
        cluster: thread blocks of a token.
    """
    num_tokens, num_blocks, width = bank_TBH.shape
    assert key_weight_H.dtype == torch.float32, f"keys in {key_weight_H.dtype}"
    assert norm_weight_H is None or norm_weight_H.dtype == torch.bfloat16
    num_threads = -(-(width // _VALUES // cluster) // 32) * 32
    kernel = nvrtc.load_kernel(
        _SOURCE,
        "mix",
        bank_TBH.device,
        (
            ("NUM_BLOCKS", num_blocks),
            ("WIDTH", width),
            ("CLUSTER", cluster),
            ("NUM_THREADS", num_threads),
        ),
    )
    arguments = MixArguments(
        *(
            None if x is None else x.data_ptr()
            for x in (bank_TBH, partial_TH, addend_TH, key_weight_H, norm_weight_H)
        ),
        *(None if x is None else x.data_ptr() for x in (sum_TH, mixed_TH, normed_TH)),
        *bank_TBH.stride()[:2],
        partial_TH.stride(0),
        0 if addend_TH is None else addend_TH.stride(0),
        eps,
    )
    kernel.launch((num_tokens * cluster, 1, 1), num_threads, arguments)


@cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9 and nvrtc.is_available()
