"""RMS norms in Triton. Statistics are float32; what is out of bounds is neither read nor written.

Dimensions: R rows of one program, D values of a row.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    num_rows,
    size_1,
    size_2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_weight_0,
    stride_weight_1,
    stride_weight_2,
    stride_gate_0,
    stride_gate_1,
    stride_gate_2,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Rows of an [A, size_1, size_2, D] tensor; `out` is contiguous, the gate a logit."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    row_R = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    place_2 = row_R % size_2
    place_1 = (row_R // size_2) % size_1
    place_0 = row_R // size_2 // size_1
    d_D = tl.arange(0, BLOCK_D)
    mask_RD = (row_R < num_rows)[:, None] & (d_D < D)[None, :]

    x_row_R = place_0 * stride_x_0 + place_1 * stride_x_1 + place_2 * stride_x_2
    x_RD = tl.load(x_ptr + x_row_R[:, None] + d_D[None, :], mask=mask_RD, other=0.0)
    x_RD = x_RD.to(tl.float32)
    scale_R = 1.0 / tl.sqrt(tl.sum(x_RD * x_RD, axis=1) / D + eps)
    weight_row_R = place_0 * stride_weight_0 + place_1 * stride_weight_1 + place_2 * stride_weight_2
    weight_RD = tl.load(
        weight_ptr + weight_row_R[:, None] + d_D[None, :], mask=mask_RD, other=0.0
    ).to(tl.float32)
    out_RD = x_RD * scale_R[:, None] * weight_RD
    if HAS_GATE:
        gate_row_R = place_0 * stride_gate_0 + place_1 * stride_gate_1 + place_2 * stride_gate_2
        gate_RD = tl.load(gate_ptr + gate_row_R[:, None] + d_D[None, :], mask=mask_RD, other=0.0)
        out_RD = out_RD / (1.0 + tl.exp(-gate_RD.to(tl.float32)))
    tl.store(
        out_ptr + row_R[:, None] * D + d_D[None, :],
        out_RD.to(out_ptr.dtype.element_ty),
        mask=mask_RD,
    )


@triton.jit
def add_rms_norm_kernel(
    partial_ptr,
    addend_ptr,
    weight_ptr,
    sum_ptr,
    normed_ptr,
    stride_partial,
    stride_addend,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One row a program: its sum, rounded as it is kept, and the norm of that."""
    let_next_start(IS_DEPENDENT)
    row = tl.cast(tl.program_id(0), tl.int64)
    d_D = tl.arange(0, BLOCK_D)
    mask_D = d_D < D
    weight_D = tl.load(weight_ptr + d_D, mask=mask_D, other=0.0)
    wait_for_earlier(IS_DEPENDENT)
    partial_D = tl.load(partial_ptr + row * stride_partial + d_D, mask=mask_D, other=0.0)
    addend_D = tl.load(addend_ptr + row * stride_addend + d_D, mask=mask_D, other=0.0)
    sum_D = (partial_D.to(tl.float32) + addend_D.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * D + d_D, sum_D, mask=mask_D)
    sum_D = sum_D.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(sum_D * sum_D, axis=0) / D + eps)
    normed_D = sum_D * scale * weight_D.to(tl.float32)
    tl.store(normed_ptr + row * D + d_D, normed_D.to(normed_ptr.dtype.element_ty), mask=mask_D)
