"""Gated activations in Triton, computed in float32.

`gated` is one element-wise step that kernels of other operators may call on their tiles.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit
def gated(gate, up, beta, linear_beta, IS_SITU: tl.constexpr, IS_BOUND: tl.constexpr):
    """float32 tiles -> the float32 product; `linear_beta` counts where `IS_BOUND`."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    if IS_SITU:
        product = beta * bounded(gate, beta) * sigmoid
        if IS_BOUND:
            up = linear_beta * bounded(up, linear_beta)
        product = product * up
    else:
        product = gate * sigmoid * up
    return product


@triton.jit
def bounded(x, beta):
    """tanh(x / beta), accurate at both ends."""
    scaled = tl.abs(x) / beta
    # 1 - 2 / (e^2x + 1) loses digits of a small x, where a few terms of the series are exact.
    shrunk = tl.exp(-2.0 * scaled)
    far = (1.0 - shrunk) / (1.0 + shrunk)
    square = scaled * scaled
    near = scaled * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.05396825)))
    size = tl.where(scaled < 0.15, near, far)
    return tl.where(x < 0, -size, size)


@triton.jit
def gated_product_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    width,
    stride_gate,
    stride_up,
    beta,
    linear_beta,
    IS_SITU: tl.constexpr,
    IS_BOUND: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One piece of a row a program; `out` is contiguous."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    row = tl.cast(tl.program_id(0), tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < width
    gate = tl.load(gate_ptr + row * stride_gate + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + place, mask=mask, other=0.0).to(tl.float32)
    product = gated(gate, up, beta, linear_beta, IS_SITU, IS_BOUND)
    tl.store(out_ptr + row * width + place, product.to(out_ptr.dtype.element_ty), mask=mask)
