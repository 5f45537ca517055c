"""Launches the RMS norms on a GPU: checks, strides, and how much one program does.

No result depends on the tile: a row is always reduced by one program.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from stagecoach.kernels.dependent_launch import launch_options
from stagecoach.kernels.norm.norm_kernel import add_rms_norm_kernel, rms_norm_kernel

# Values that one program holds of short rows; longer rows have programs of their own.
_TILE = 2048
_LONGEST = 65_536


class RowTile(NamedTuple):
    """How many rows one program takes, and with how many warps."""

    rows: int
    block_size: int
    num_warps: int


def row_tile(width: int) -> RowTile:
    """The tile for rows of `width` values: 16 a thread, at least a warp."""
    assert 0 < width <= _LONGEST, f"rows of {width} values"
    block_size = next_power_of_2(width)
    rows = max(1, _TILE // block_size)
    return RowTile(rows, block_size, min(32, max(1, rows * block_size // 512)))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dim.

    Args:
        x: [..., D], bfloat16, float16 or float32; rows in one piece.
        weight: [..., D], broadcast against `x`; at most four dims.
        eps: added to the mean square.

    Returns:
        [..., D] contiguous, in `x.dtype`.
    """
    return _normed(x, weight, None, eps, x.dtype)


def gated_rms_norm(
    x_THV: Tensor,
    gate_THV: Tensor,
    weight_V: Tensor,
    eps: float,
) -> Tensor:
    """RMS norm of each head times sigmoid(gate): [T, H, V] contiguous, in `gate_THV.dtype`."""
    return _normed(x_THV, weight_V, gate_THV, eps, gate_THV.dtype)


def add_rms_norm(
    partial_TH: Tensor,
    addend_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    tile: RowTile | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of two [T, H] tensors and its norm, both contiguous in `partial_TH.dtype`."""
    assert partial_TH.shape == addend_TH.shape and partial_TH.dtype == addend_TH.dtype
    assert partial_TH.stride(-1) == addend_TH.stride(-1) == 1, "rows in one piece"
    num_tokens, width = partial_TH.shape
    assert weight_H.shape == (width,) and weight_H.is_contiguous()
    sum_TH, normed_TH = (partial_TH.new_empty(num_tokens, width) for _ in range(2))
    if num_tokens:
        tile = tile or row_tile(width)
        add_rms_norm_kernel[(num_tokens,)](
            partial_TH,
            addend_TH,
            weight_H,
            sum_TH,
            normed_TH,
            partial_TH.stride(0),
            addend_TH.stride(0),
            eps,
            D=width,
            BLOCK_D=tile.block_size,
            num_warps=tile.num_warps,
            **launch_options(partial_TH),
        )
    return sum_TH, normed_TH


def _normed(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    assert x.dtype != torch.float64, "no device norm in float64"
    out = x.new_empty(x.shape, dtype=dtype)
    if not out.numel():
        return out
    x_ABCD = _as_rows(x)
    weight_ABCD = _as_rows(weight.expand(x.shape))
    gate_ABCD = x_ABCD if gate is None else _as_rows(gate)
    assert gate_ABCD.shape == x_ABCD.shape, f"a gate of {tuple(gate_ABCD.shape)} for {x.shape}"
    for rows in (x_ABCD, weight_ABCD, gate_ABCD):
        assert rows.shape[-1] == 1 or rows.stride(-1) == 1, "rows in one piece"
    width = x.shape[-1]
    tile = row_tile(width)
    num_rows = x.numel() // width
    rms_norm_kernel[(-(-num_rows // tile.rows),)](
        x_ABCD,
        weight_ABCD,
        gate_ABCD,
        out,
        num_rows,
        x_ABCD.shape[1],
        x_ABCD.shape[2],
        *x_ABCD.stride()[:3],
        *weight_ABCD.stride()[:3],
        *gate_ABCD.stride()[:3],
        eps,
        D=width,
        BLOCK_D=tile.block_size,
        ROWS=tile.rows,
        HAS_GATE=gate is not None,
        num_warps=tile.num_warps,
        **launch_options(x),
    )
    return out


def _as_rows(tensor: Tensor) -> Tensor:
    """The same with four dims: a view, where the foremost ones lie evenly.

    Tokens stay in front, so that no size but the first varies from step to step.
    """
    if tensor.dim() > 4:
        return tensor.flatten(0, tensor.dim() - 4)
    return tensor[(..., *(None,) * (4 - tensor.dim()), slice(None))]
