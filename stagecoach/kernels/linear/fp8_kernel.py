"""Products of E4M3 activations with an E4M3 matrix in Triton.

Values of E4M3 are exact in float16, so that sums are as exact as float32's.

Dimensions: T rows, O outputs, I inputs.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier
from stagecoach.kernels.quantization.quantize_kernel import factor_of, largest_of, quotient_of


@triton.jit(do_not_specialize=["num_rows"])
def fp8_linear_kernel(
    x_ptr,
    x_factors_ptr,
    weight_ptr,
    weight_factors_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    IS_EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A block of outputs and rows and a share of the inputs a program, weights first.

    `x_ptr` holds values of E4M3 in the type of the product, rows in one piece. With splits
    `out_ptr` gets float32 sums [splits, T, O], without factors.
    """
    let_next_start(IS_DEPENDENT)
    outputs_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    split = tl.program_id(1)
    rows_T = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    inputs_I = tl.arange(0, BLOCK_I)
    share = tl.cdiv(tl.cdiv(num_inputs, BLOCK_I), NUM_SPLITS) * BLOCK_I
    first = split * share
    end = tl.minimum(first + share, num_inputs)
    is_row_T = rows_T < num_rows
    is_output_O = outputs_O < num_outputs
    # Outputs past the end read the last row again and are not stored: a mask would cost more.
    safe_O = tl.cast(tl.minimum(outputs_O, num_outputs - 1), tl.int64)
    x_ptrs_TI = x_ptr + tl.cast(rows_T, tl.int64)[:, None] * num_inputs + inputs_I[None, :]
    weight_ptrs_OI = weight_ptr + safe_O[:, None] * num_inputs + inputs_I[None, :]
    sum_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    wait_for_earlier(IS_DEPENDENT)
    for start in tl.range(first, end, BLOCK_I, num_stages=NUM_STAGES):
        if IS_EVEN:
            x_TI = tl.load(x_ptrs_TI + start, mask=is_row_T[:, None], other=0.0)
            weight_OI = tl.load(weight_ptrs_OI + start)
        else:
            is_input_I = start + inputs_I < end
            x_TI = tl.load(
                x_ptrs_TI + start, mask=is_row_T[:, None] & is_input_I[None, :], other=0.0
            )
            weight_OI = tl.load(weight_ptrs_OI + start, mask=is_input_I[None, :], other=0.0)
        weight_OI = weight_OI.to(x_ptr.dtype.element_ty)
        sum_OT = tl.dot(weight_OI, tl.trans(x_TI), sum_OT, input_precision="ieee")
    sum_TO = tl.trans(sum_OT)
    is_place_TO = is_row_T[:, None] & is_output_O[None, :]
    places_TO = tl.cast(rows_T, tl.int64)[:, None] * num_outputs + outputs_O[None, :]
    if NUM_SPLITS == 1:
        x_factors_T = tl.load(x_factors_ptr + rows_T, mask=is_row_T, other=0.0)
        weight_factors_O = tl.load(weight_factors_ptr + safe_O)
        sum_TO = sum_TO * x_factors_T[:, None] * weight_factors_O[None, :]
    else:
        places_TO += tl.cast(split, tl.int64) * num_rows * num_outputs
    tl.store(out_ptr + places_TO, sum_TO.to(out_ptr.dtype.element_ty), mask=is_place_TO)


@triton.jit(do_not_specialize=["num_rows"])
def sum_fp8_splits_kernel(
    sums_ptr,
    x_factors_ptr,
    weight_factors_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    NUM_SPLITS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """float32 [S, T, O] -> their sum over S times both factors, rounded once."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    row = tl.program_id(1)
    outputs_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output_O = outputs_O < num_outputs
    total_O = tl.zeros((BLOCK_O,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        sums_ptrs_O = sums_ptr + (split * num_rows + row) * num_outputs + outputs_O
        total_O += tl.load(sums_ptrs_O, mask=is_output_O, other=0.0)
    weight_factors_O = tl.load(weight_factors_ptr + outputs_O, mask=is_output_O, other=0.0)
    total_O = total_O * tl.load(x_factors_ptr + row) * weight_factors_O
    tl.store(
        out_ptr + row * num_outputs + outputs_O,
        total_O.to(out_ptr.dtype.element_ty),
        mask=is_output_O,
    )


@triton.jit
def fp8_vector_kernel(
    x_ptr,
    weight_ptr,
    weight_factors_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One row, quantised by each program for itself, without tensor cores.

    A program has all its weights on their way at once, BLOCK_I inputs of each output and then
    the rest, and that before the kernel that makes `x` has ended.
    """
    let_next_start(IS_DEPENDENT)
    outputs_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    safe_O = tl.minimum(outputs_O, num_outputs - 1)
    inputs_1I = tl.arange(0, BLOCK_I)[None, :]
    row_ptrs_O1 = weight_ptr + tl.cast(safe_O, tl.int64)[:, None] * num_inputs
    weight_OI = tl.load(row_ptrs_O1 + inputs_1I, eviction_policy="evict_first")
    if BLOCK_REST > 0:
        rest_1R = BLOCK_I + tl.arange(0, BLOCK_REST)[None, :]
        is_input_1R = rest_1R < num_inputs
        weight_OR = tl.load(
            row_ptrs_O1 + rest_1R, mask=is_input_1R, other=0.0, eviction_policy="evict_first"
        )
    weight_factors_O = tl.load(weight_factors_ptr + safe_O)
    wait_for_earlier(IS_DEPENDENT)
    x_1I = tl.load(x_ptr + inputs_1I).to(tl.float32)
    largest = tl.reduce(tl.reduce(tl.abs(x_1I), 1, largest_of), 0, largest_of)
    if BLOCK_REST > 0:
        x_1R = tl.load(x_ptr + rest_1R, mask=is_input_1R, other=0.0).to(tl.float32)
        rest_largest = tl.reduce(tl.reduce(tl.abs(x_1R), 1, largest_of), 0, largest_of)
        largest = largest_of(largest, rest_largest)
    factor = factor_of(largest)
    inverse = tl.div_rn(1.0, factor)
    x_1I = quotient_of(x_1I, factor, inverse).to(tl.float8e4nv).to(tl.float32)
    out_O = tl.sum(weight_OI.to(tl.float32) * x_1I, axis=1)
    if BLOCK_REST > 0:
        x_1R = quotient_of(x_1R, factor, inverse).to(tl.float8e4nv).to(tl.float32)
        out_O += tl.sum(weight_OR.to(tl.float32) * x_1R, axis=1)
    out_O = out_O * factor * weight_factors_O
    tl.store(out_ptr + outputs_O, out_O.to(out_ptr.dtype.element_ty), mask=outputs_O < num_outputs)
