"""Experts' products from packed MXFP4 weights on tiles of sorted pairs, in Triton.

Weights are decoded in registers: the bits of a magnitude are those of a tiny floating number, so
that one multiplication by a power of two gives the value, exact. Products are made as
[outputs, pairs], weights first, so that few pairs pad little.

Dimensions: M pairs of a tile, N outputs, K inputs of a product, B = K / 2 bytes, G = K / 32 groups.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier

GROUP = tl.constexpr(32)
# Inputs of a segment are in operand order: a thread of the matrix units has four times two of 16
# inputs, and so its weights of a segment are 8 bytes side by side.
SEGMENT = tl.constexpr(64)
# Decoded weights are 2^-32 of what they mean, so that no usual scale leaves bfloat16's range;
# sums are multiplied by its inverse. Exact for scales from 2^-93 to 2^32; above that infinite.
SUM_FACTOR = tl.constexpr(2.0**32)
# The magnitude's bits are a number's lowest exponents: 2^126 makes 1 of 1. E8M0 has a bias of 127.
_EXPONENT_SHIFT = tl.constexpr(126 - 32)


# Four bytes and the factors of each: first the values of the low nibbles, then of the high ones.
# A magnitude's three bits go to bits 6 to 8 of a bfloat16, its sign to the last one.
_DECODE_BYTES = tl.constexpr(
    """
    {
    .reg .b32 near, far, moved, bits;
    prmt.b32 near, $4, 0, 0x1404;
    prmt.b32 far, $4, 0, 0x3424;
    shr.b32 moved, near, 2;
    and.b32 moved, moved, 0x01C001C0;
    shl.b32 bits, near, 4;
    lop3.b32 bits, bits, 0x80008000, moved, 0xEA;
    mul.bf16x2 $0, bits, $5;
    shr.b32 moved, far, 2;
    and.b32 moved, moved, 0x01C001C0;
    shl.b32 bits, far, 4;
    lop3.b32 bits, bits, 0x80008000, moved, 0xEA;
    mul.bf16x2 $1, bits, $6;
    shr.b32 moved, near, 6;
    and.b32 moved, moved, 0x01C001C0;
    lop3.b32 bits, near, 0x80008000, moved, 0xEA;
    mul.bf16x2 $2, bits, $5;
    shr.b32 moved, far, 6;
    and.b32 moved, moved, 0x01C001C0;
    lop3.b32 bits, far, 0x80008000, moved, 0xEA;
    mul.bf16x2 $3, bits, $6;
    }
    """
)


@triton.jit
def decode(packed, factors, IS_FLOAT32: tl.constexpr):
    """Bytes of two E2M1 codes times `powers_of_two`: those of the low and of the high nibbles.

    float32 or bfloat16, as the factors.
    """
    if IS_FLOAT32:
        codes = packed.to(tl.int32)
        low_bits = ((codes & 0x08) << 28) | ((codes & 0x07) << 22)
        high_bits = ((codes & 0x80) << 24) | ((codes & 0x70) << 18)
        low = low_bits.to(tl.float32, bitcast=True) * factors
        return low, high_bits.to(tl.float32, bitcast=True) * factors
    else:
        return tl.inline_asm_elementwise(
            _DECODE_BYTES,
            "=r,=r,=r,=r,r,r,r",
            [packed, factors],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def powers_of_two(scales, IS_FLOAT32: tl.constexpr):
    """E8M0 scales as what `decode` multiplies by; infinite for what is too large and for NaN."""
    exponents = tl.minimum(scales.to(tl.int32) + _EXPONENT_SHIFT, 255)
    if IS_FLOAT32:
        return (exponents << 23).to(tl.float32, bitcast=True)
    else:
        return (exponents << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def in_operand_order(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns 16 t + 4 s + 2 h + p of each segment go to its columns 16 s + 8 h + 2 t + p."""
    parts = x.reshape(ROWS, COLUMNS // SEGMENT, 4, 4, 2, 2)
    return tl.permute(parts, (0, 1, 3, 4, 2, 5)).reshape(ROWS, COLUMNS)


@triton.jit
def order_columns_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    num_columns,
    stride_x,
    BLOCK_R: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Columns 32 t + 8 w + 4 p + 2 i + h of each 128 go to its columns 32 w + 16 i + 8 h + 2 t + p.

    One block of rows and one chunk of 128 columns a program; `out` is contiguous.
    """
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    rows_R1 = tl.cast(tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.int64)[:, None]
    to_1C = tl.arange(0, 128)[None, :]
    of_t = to_1C // 2 % 4 * 32
    from_1C = of_t + to_1C // 32 * 8 + to_1C % 2 * 4 + to_1C // 16 % 2 * 2 + to_1C // 8 % 2
    first = tl.program_id(1) * 128
    is_row_R1 = rows_R1 < num_rows
    x_RC = tl.load(x_ptr + rows_R1 * stride_x + first + from_1C, mask=is_row_R1)
    tl.store(out_ptr + rows_R1 * num_columns + first + to_1C, x_RC, mask=is_row_R1)


@triton.jit
def load_scales(
    scale_ptr,
    row,
    last_row,
    num_inputs,
    number,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[N, G], block `number` of the groups of the rows from int32 `row` on, 0 past the inputs.

    Rows past `last_row` hold anything.
    """
    rows_N1 = tl.cast(tl.minimum(row + tl.arange(0, BLOCK_N), last_row), tl.int64)[:, None]
    groups_1G = number * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)[None, :]
    num_groups = num_inputs // GROUP
    if IS_EVEN:
        num_groups = tl.multiple_of(num_groups, BLOCK_K // GROUP)
    scale_ptrs_NG = scale_ptr + rows_N1 * num_groups + groups_1G
    return tl.load(scale_ptrs_NG, mask=groups_1G < num_groups, other=0)


@triton.jit
def load_weights(
    packed_ptr,
    scales_NG,
    row,
    last_row,
    num_inputs,
    number,
    IS_EVEN: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[N, K], block `number` of the weights from int32 `row` on, times 2^-32, in operand order.

    Rows past `last_row` hold anything; inputs past the end are zeros.
    """
    rows_N1 = tl.cast(tl.minimum(row + tl.arange(0, BLOCK_N), last_row), tl.int64)[:, None]
    bytes_1B = number * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)[None, :]
    num_bytes = tl.multiple_of(num_inputs // 2, 16)  # a row is a whole number of groups
    packed_ptrs_NB = packed_ptr + rows_N1 * num_bytes + bytes_1B
    if IS_EVEN:
        packed_NB = tl.load(packed_ptrs_NB)
    else:
        packed_NB = tl.load(packed_ptrs_NB, mask=bytes_1B < num_bytes, other=0)
    factors_NG1 = powers_of_two(scales_NG, IS_FLOAT32)[:, :, None]
    factors_NGW = tl.broadcast_to(factors_NG1, (BLOCK_N, BLOCK_K // GROUP, GROUP // 2))
    factors_NB = factors_NGW.reshape(BLOCK_N, BLOCK_K // 2)
    low_NB, high_NB = decode(packed_NB, factors_NB, IS_FLOAT32)
    return in_operand_order(tl.join(low_NB, high_NB), BLOCK_N, BLOCK_K)


@triton.jit
def product_mxfp4_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    out_ptr,
    pairs_ptr,
    offsets_ptr,
    tile_experts_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    num_outputs,
    num_inputs,
    stride_x,
    NUM_CHOSEN: tl.constexpr,
    IS_FIRST: tl.constexpr,
    ORDERS_OUTPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The product of a tile's expert with the input of each of its pairs.

    With `IS_FIRST` inputs are the tokens' and outputs lie in sorted order, otherwise the other way
    round: outputs lie by pair. Rows of `x` are whole segments in operand order, `stride_x` long;
    with `ORDERS_OUTPUTS` those of `out` are, too.
    """
    num_blocks = tl.cdiv(num_outputs, BLOCK_N)
    tile = tl.program_id(0) // num_blocks
    first_output = (tl.program_id(0) % num_blocks) * BLOCK_N
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tile_experts_ptr + tile)
    first = tl.load(tile_rows_ptr + tile)
    end = tl.load(offsets_ptr + expert + 1)
    places_M = first + tl.arange(0, BLOCK_M)
    is_real_M = places_M < end
    pairs_M = tl.load(pairs_ptr + places_M, mask=is_real_M, other=0)
    if IS_FIRST:
        from_M = tl.cast(pairs_M // NUM_CHOSEN, tl.int64)
        to_M = tl.cast(places_M, tl.int64)
    else:
        from_M = tl.cast(places_M, tl.int64)
        to_M = tl.cast(pairs_M, tl.int64)
    inputs_K = tl.arange(0, BLOCK_K)
    x_ptrs_MK = x_ptr + from_M[:, None] * stride_x + inputs_K[None, :]
    row = expert * num_outputs + first_output
    last_row = expert * num_outputs + num_outputs - 1
    out_NM = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # Scales come a block ahead: they are too few bytes for the copies that bring the rest.
    scales_NG = load_scales(scale_ptr, row, last_row, num_inputs, 0, IS_EVEN, BLOCK_N, BLOCK_K)
    for number in tl.range(0, tl.cdiv(num_inputs, BLOCK_K), num_stages=NUM_STAGES):
        start = number * BLOCK_K
        if IS_EVEN:
            x_MK = tl.load(x_ptrs_MK + start, mask=is_real_M[:, None], other=0.0)
        else:
            is_input_K = start + inputs_K < stride_x
            x_MK = tl.load(
                x_ptrs_MK + start, mask=is_real_M[:, None] & is_input_K[None, :], other=0.0
            )
        weight_NK = load_weights(
            packed_ptr, scales_NG, row, last_row, num_inputs, number, IS_EVEN, IS_FLOAT32, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
        scales_NG = load_scales(
            scale_ptr, row, last_row, num_inputs, number + 1, IS_EVEN, BLOCK_N, BLOCK_K
        )
        out_NM = tl.dot(weight_NK, tl.trans(x_MK), out_NM, input_precision="ieee")
    out_MN = tl.trans((out_NM * SUM_FACTOR).to(out_ptr.dtype.element_ty))
    if ORDERS_OUTPUTS:
        out_MN = in_operand_order(out_MN, BLOCK_M, BLOCK_N)
    outputs_N = first_output + tl.arange(0, BLOCK_N)
    out_ptrs_MN = out_ptr + to_M[:, None] * num_outputs + outputs_N[None, :]
    is_place_MN = is_real_M[:, None] & (outputs_N < num_outputs)[None, :]
    tl.store(out_ptrs_MN, out_MN, mask=is_place_MN)
