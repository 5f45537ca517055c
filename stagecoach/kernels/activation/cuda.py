"""Launches the gated activations on a GPU."""

import torch
from torch import Tensor

from stagecoach.kernels.activation.activation_kernel import gated_product_kernel
from stagecoach.kernels.dependent_launch import launch_options

_BLOCK = 1024


def gated_product(
    gate: Tensor, up: Tensor, *, is_situ: bool, beta: float, linear_beta: float | None
) -> Tensor:
    """SiTU or SwiGLU of two tensors of one shape and type, whose rows lie in one piece.

    Returns:
        [...] contiguous, in `gate.dtype`, rounded once.
    """
    assert gate.shape == up.shape and gate.dtype == up.dtype != torch.float64
    out = gate.new_empty(gate.shape)
    if not out.numel():
        return out
    width = gate.shape[-1]
    gate_RW, up_RW, out_RW = (tensor.reshape(-1, width) for tensor in (gate, up, out))
    assert width == 1 or gate_RW.stride(1) == up_RW.stride(1) == 1, "rows in one piece"
    gated_product_kernel[(len(out_RW), -(-width // _BLOCK))](
        gate_RW,
        up_RW,
        out_RW,
        width,
        gate_RW.stride(0),
        up_RW.stride(0),
        beta,
        1.0 if linear_beta is None else linear_beta,
        IS_SITU=is_situ,
        IS_BOUND=linear_beta is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(gate),
    )
    return out
