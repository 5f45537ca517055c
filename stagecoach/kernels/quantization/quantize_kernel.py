"""Rows to E4M3 with a factor each, in Triton.

Dimensions: I columns of a row.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier

# As in `reference.py`: the largest value of E4M3, and what counts as a row's largest at least.
LARGEST = tl.constexpr(448.0)
LEAST_LARGEST = tl.constexpr(1e-12)


@triton.jit
def factor_of(largest):
    """What a row whose largest magnitude is `largest` is divided by."""
    # A maximum that drops NaN would hide it; NaN is neither larger nor smaller.
    return tl.div_rn(tl.where(largest < LEAST_LARGEST, LEAST_LARGEST, largest), LARGEST)


@triton.jit
def largest_of(left, right):
    """The larger of two, NaN where one is."""
    return tl.where((left > right) | (left != left), left, right)


@triton.jit
def quotient_of(x, factor, inverse):
    """`x / factor` to nearest, `inverse` being 1 / factor to nearest.

    In a quarter of the time of a division, which takes a longer way for zeros besides.
    """
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, factor, x), inverse, quotient)


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    out_ptr,
    factors_ptr,
    num_columns,
    stride_x,
    BLOCK_I: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A row a program: values of E4M3 in whatever type `out_ptr` has, [rows, I], and its factor.

    With `IS_WHOLE` a block holds a row; otherwise rows are read twice.
    """
    let_next_start(IS_DEPENDENT)
    row = tl.cast(tl.program_id(0), tl.int64)
    columns_I = tl.arange(0, BLOCK_I)
    x_ptrs_I = x_ptr + row * stride_x + columns_I
    out_ptrs_I = out_ptr + row * num_columns + columns_I
    wait_for_earlier(IS_DEPENDENT)
    if IS_WHOLE:
        x_I = tl.load(x_ptrs_I, mask=columns_I < num_columns, other=0.0).to(tl.float32)
        factor = factor_of(tl.reduce(tl.abs(x_I), 0, largest_of))
        values_I = quotient_of(x_I, factor, tl.div_rn(1.0, factor)).to(tl.float8e4nv)
        tl.store(out_ptrs_I, values_I.to(out_ptr.dtype.element_ty), mask=columns_I < num_columns)
    else:
        largest_I = tl.zeros((BLOCK_I,), dtype=tl.float32)
        for start in tl.range(0, num_columns, BLOCK_I):
            is_column_I = start + columns_I < num_columns
            x_I = tl.load(x_ptrs_I + start, mask=is_column_I, other=0.0).to(tl.float32)
            largest_I = largest_of(tl.abs(x_I), largest_I)
        factor = factor_of(tl.reduce(largest_I, 0, largest_of))
        inverse = tl.div_rn(1.0, factor)
        for start in tl.range(0, num_columns, BLOCK_I):
            is_column_I = start + columns_I < num_columns
            x_I = tl.load(x_ptrs_I + start, mask=is_column_I, other=0.0).to(tl.float32)
            values_I = quotient_of(x_I, factor, inverse).to(tl.float8e4nv)
            tl.store(out_ptrs_I + start, values_I.to(out_ptr.dtype.element_ty), mask=is_column_I)
    tl.store(factors_ptr + row, factor)
