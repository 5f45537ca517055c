"""A product of few rows with a matrix in Triton: the matrix is streamed once.

Dimensions: T rows, O outputs, I inputs.
"""

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    stride_weight,
    stride_split,
    stride_out,
    stride_x_group,
    stride_weight_group,
    stride_out_group,
    IS_EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A block of outputs and a share of the inputs of one product a program.

    With `IS_EVEN` the inputs are a multiple of BLOCK_I.
    """
    let_next_start(IS_DEPENDENT)
    rows_T = tl.arange(0, BLOCK_T)
    outputs_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    inputs_I = tl.arange(0, BLOCK_I)
    split = tl.program_id(1)
    group = tl.cast(tl.program_id(2), tl.int64)
    x_ptr += group * stride_x_group
    weight_ptr += group * stride_weight_group
    out_ptr += group * stride_out_group
    share = tl.cdiv(tl.cdiv(num_inputs, BLOCK_I), NUM_SPLITS) * BLOCK_I
    first = split * share
    end = tl.minimum(first + share, num_inputs)
    is_row_T = rows_T < num_rows
    is_output_O = outputs_O < num_outputs
    # Outputs past the end read the last row again and are not stored: a mask would cost more.
    safe_O = tl.cast(tl.minimum(outputs_O, num_outputs - 1), tl.int64)
    x_ptrs_TI = x_ptr + rows_T[:, None] * stride_x + inputs_I[None, :]
    weight_ptrs_OI = weight_ptr + safe_O[:, None] * stride_weight + inputs_I[None, :]
    sum_TO = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    wait_for_earlier(IS_DEPENDENT)
    for start in tl.range(first, end, BLOCK_I, num_stages=NUM_STAGES):
        if IS_EVEN:
            x_TI = tl.load(x_ptrs_TI + start, mask=is_row_T[:, None], other=0.0)
            weight_OI = tl.load(weight_ptrs_OI + start)
        else:
            is_input_I = start + inputs_I < end
            is_place_TI = is_row_T[:, None] & is_input_I[None, :]
            x_TI = tl.load(x_ptrs_TI + start, mask=is_place_TI, other=0.0)
            weight_OI = tl.load(weight_ptrs_OI + start, mask=is_input_I[None, :], other=0.0)
        sum_TO = tl.dot(x_TI, tl.trans(weight_OI), sum_TO, input_precision="ieee")
    out_ptrs_TO = out_ptr + split * stride_split + rows_T[:, None] * stride_out + outputs_O[None, :]
    is_place_TO = is_row_T[:, None] & is_output_O[None, :]
    tl.store(out_ptrs_TO, sum_TO.to(out_ptr.dtype.element_ty), mask=is_place_TO)


@triton.jit
def vector_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    stride_weight,
    stride_x_group,
    stride_weight_group,
    stride_out_group,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """`linear_kernel` for one row, without tensor cores.

    A program has all its weights on their way at once, BLOCK_I inputs of each output and then
    the rest, and that before the kernel that makes `x` has ended.
    """
    let_next_start(IS_DEPENDENT)
    group = tl.cast(tl.program_id(1), tl.int64)
    x_ptr += group * stride_x_group
    weight_ptr += group * stride_weight_group
    out_ptr += group * stride_out_group
    outputs_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    safe_O = tl.cast(tl.minimum(outputs_O, num_outputs - 1), tl.int64)
    inputs_1I = tl.arange(0, BLOCK_I)[None, :]
    row_ptrs_O1 = weight_ptr + safe_O[:, None] * stride_weight
    weight_OI = tl.load(row_ptrs_O1 + inputs_1I, eviction_policy="evict_first")
    if BLOCK_REST > 0:
        rest_1R = BLOCK_I + tl.arange(0, BLOCK_REST)[None, :]
        is_input_1R = rest_1R < num_inputs
        weight_OR = tl.load(
            row_ptrs_O1 + rest_1R, mask=is_input_1R, other=0.0, eviction_policy="evict_first"
        )
    wait_for_earlier(IS_DEPENDENT)
    x_1I = tl.load(x_ptr + inputs_1I)
    if BLOCK_REST > 0:
        x_1R = tl.load(x_ptr + rest_1R, mask=is_input_1R, other=0.0)
    out_O = tl.sum(weight_OI.to(tl.float32) * x_1I.to(tl.float32), axis=1)
    if BLOCK_REST > 0:
        out_O += tl.sum(weight_OR.to(tl.float32) * x_1R.to(tl.float32), axis=1)
    tl.store(out_ptr + outputs_O, out_O.to(out_ptr.dtype.element_ty), mask=outputs_O < num_outputs)


@triton.jit
def sum_splits_kernel(
    sums_ptr,
    out_ptr,
    num_values,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """float32 [S, values] -> their sum over S, rounded once."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_values
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(sums_ptr + split * num_values + places, mask=mask, other=0.0)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)
