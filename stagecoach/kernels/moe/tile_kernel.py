"""Experts' products on tiles of pairs sorted by expert, in Triton.

A tile is up to BLOCK_M pairs of one expert. Weights come through a tensor descriptor of all rows
of all experts, or by pointers.

Dimensions: M pairs of a tile, N outputs, K inputs of a product; L and I as in `reference.py`.
"""

import triton
import triton.language as tl

from stagecoach.kernels.activation.activation_kernel import gated
from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit
def load_rows(
    weights,
    row,
    num_inputs,
    last_row,
    start,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
):
    """[N, K] of the weights from int32 `row` on; rows past `last_row` hold anything."""
    if HAS_DESCRIPTOR:
        return weights.load([row, start])
    else:
        rows_N = tl.cast(tl.minimum(row + tl.arange(0, BLOCK_N), last_row), tl.int64)
        inputs_K = start + tl.arange(0, BLOCK_K)
        places_NK = rows_N[:, None] * num_inputs + inputs_K[None, :]
        if IS_EVEN:
            return tl.load(weights + places_NK)
        else:
            return tl.load(weights + places_NK, mask=inputs_K[None, :] < num_inputs, other=0.0)


@triton.jit
def gate_up_tile(
    x_ptr,
    weights,
    out_ptr,
    pairs_ptr,
    expert,
    first,
    end,
    first_output,
    width,
    num_inputs,
    stride_x,
    beta,
    linear_beta,
    NUM_CHOSEN: tl.constexpr,
    IS_SITU: tl.constexpr,
    IS_BOUND: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The places from `first` to before `end`, BLOCK_M at most."""
    places_M = first + tl.arange(0, BLOCK_M)
    is_real_M = places_M < end
    pairs_M = tl.load(pairs_ptr + places_M, mask=is_real_M, other=0)
    tokens_M = tl.cast(pairs_M // NUM_CHOSEN, tl.int64)
    inputs_K = tl.arange(0, BLOCK_K)
    x_ptrs_MK = x_ptr + tokens_M[:, None] * stride_x + inputs_K[None, :]
    gate_row = expert * (2 * width) + first_output
    last_gate = expert * (2 * width) + width - 1
    gate_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, num_inputs, BLOCK_K, num_stages=NUM_STAGES):
        if IS_EVEN:
            x_MK = tl.load(x_ptrs_MK + start, mask=is_real_M[:, None], other=0.0)
        else:
            is_input_K = start + inputs_K < num_inputs
            x_MK = tl.load(
                x_ptrs_MK + start, mask=is_real_M[:, None] & is_input_K[None, :], other=0.0
            )
        gate_NK = load_rows(
            weights, gate_row, num_inputs, last_gate, start, IS_EVEN, BLOCK_N, BLOCK_K,
            HAS_DESCRIPTOR,
        )  # fmt: skip
        up_NK = load_rows(
            weights, gate_row + width, num_inputs, last_gate + width, start, IS_EVEN, BLOCK_N,
            BLOCK_K, HAS_DESCRIPTOR,
        )  # fmt: skip
        gate_MN = tl.dot(x_MK, tl.trans(gate_NK), gate_MN, input_precision="ieee")
        up_MN = tl.dot(x_MK, tl.trans(up_NK), up_MN, input_precision="ieee")
    product_MN = gated(gate_MN, up_MN, beta, linear_beta, IS_SITU, IS_BOUND)
    outputs_N = first_output + tl.arange(0, BLOCK_N)
    out_ptrs_MN = out_ptr + tl.cast(places_M, tl.int64)[:, None] * width + outputs_N[None, :]
    is_place_MN = is_real_M[:, None] & (outputs_N < width)[None, :]
    tl.store(out_ptrs_MN, product_MN.to(out_ptr.dtype.element_ty), mask=is_place_MN)


@triton.jit
def gate_up_kernel(
    x_ptr,
    weights,
    out_ptr,
    pairs_ptr,
    offsets_ptr,
    tile_experts_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    width,
    num_inputs,
    stride_x,
    beta,
    linear_beta,
    NUM_CHOSEN: tl.constexpr,
    IS_SITU: tl.constexpr,
    IS_BOUND: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    HALVES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """out[place] = activation(gate x, up x) of the pair at each place of the sorted order.

    With `HALVES` a tile that is at most half full costs half as much.
    """
    num_blocks = tl.cdiv(width, BLOCK_N)
    tile = tl.program_id(0) // num_blocks
    first_output = (tl.program_id(0) % num_blocks) * BLOCK_N
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tile_experts_ptr + tile)
    first = tl.load(tile_rows_ptr + tile)
    end = tl.load(offsets_ptr + expert + 1)
    if HALVES:  # noqa: SIM102 (settled when compiled)
        if end - first <= BLOCK_M // 2:
            gate_up_tile(
                x_ptr, weights, out_ptr, pairs_ptr, expert, first, end, first_output, width,
                num_inputs, stride_x, beta, linear_beta, NUM_CHOSEN, IS_SITU, IS_BOUND, IS_EVEN,
                BLOCK_M // 2, BLOCK_N, BLOCK_K, HAS_DESCRIPTOR, NUM_STAGES,
            )  # fmt: skip
            return
    gate_up_tile(
        x_ptr, weights, out_ptr, pairs_ptr, expert, first, end, first_output, width, num_inputs,
        stride_x, beta, linear_beta, NUM_CHOSEN, IS_SITU, IS_BOUND, IS_EVEN, BLOCK_M, BLOCK_N,
        BLOCK_K, HAS_DESCRIPTOR, NUM_STAGES,
    )  # fmt: skip


@triton.jit
def down_tile(
    x_ptr,
    weights,
    out_ptr,
    pairs_ptr,
    expert,
    first,
    end,
    first_output,
    num_outputs,
    num_inputs,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The places from `first` to before `end`, BLOCK_M at most."""
    places_M = first + tl.arange(0, BLOCK_M)
    is_real_M = places_M < end
    inputs_K = tl.arange(0, BLOCK_K)
    x_ptrs_MK = x_ptr + tl.cast(places_M, tl.int64)[:, None] * num_inputs + inputs_K[None, :]
    row = expert * num_outputs + first_output
    last_row = expert * num_outputs + num_outputs - 1
    out_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, num_inputs, BLOCK_K, num_stages=NUM_STAGES):
        if IS_EVEN:
            x_MK = tl.load(x_ptrs_MK + start, mask=is_real_M[:, None], other=0.0)
        else:
            is_input_K = start + inputs_K < num_inputs
            x_MK = tl.load(
                x_ptrs_MK + start, mask=is_real_M[:, None] & is_input_K[None, :], other=0.0
            )
        down_NK = load_rows(
            weights, row, num_inputs, last_row, start, IS_EVEN, BLOCK_N, BLOCK_K, HAS_DESCRIPTOR
        )
        out_MN = tl.dot(x_MK, tl.trans(down_NK), out_MN, input_precision="ieee")
    pairs_M = tl.cast(tl.load(pairs_ptr + places_M, mask=is_real_M, other=0), tl.int64)
    outputs_N = first_output + tl.arange(0, BLOCK_N)
    out_ptrs_MN = out_ptr + pairs_M[:, None] * num_outputs + outputs_N[None, :]
    is_place_MN = is_real_M[:, None] & (outputs_N < num_outputs)[None, :]
    tl.store(out_ptrs_MN, out_MN.to(out_ptr.dtype.element_ty), mask=is_place_MN)


@triton.jit
def down_kernel(
    x_ptr,
    weights,
    out_ptr,
    pairs_ptr,
    offsets_ptr,
    tile_experts_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    num_outputs,
    num_inputs,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    HALVES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """out[pair] = down x[place] of the pair at each place of the sorted order."""
    num_blocks = tl.cdiv(num_outputs, BLOCK_N)
    tile = tl.program_id(0) // num_blocks
    first_output = (tl.program_id(0) % num_blocks) * BLOCK_N
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tile_experts_ptr + tile)
    first = tl.load(tile_rows_ptr + tile)
    end = tl.load(offsets_ptr + expert + 1)
    if HALVES:  # noqa: SIM102 (settled when compiled)
        if end - first <= BLOCK_M // 2:
            down_tile(
                x_ptr, weights, out_ptr, pairs_ptr, expert, first, end, first_output, num_outputs,
                num_inputs, IS_EVEN, BLOCK_M // 2, BLOCK_N, BLOCK_K, HAS_DESCRIPTOR, NUM_STAGES,
            )  # fmt: skip
            return
    down_tile(
        x_ptr, weights, out_ptr, pairs_ptr, expert, first, end, first_output, num_outputs,
        num_inputs, IS_EVEN, BLOCK_M, BLOCK_N, BLOCK_K, HAS_DESCRIPTOR, NUM_STAGES,
    )  # fmt: skip


@triton.jit
def combine_kernel(
    pair_outputs_ptr,
    weights_ptr,
    ids_ptr,
    addend_ptr,
    out_ptr,
    num_outputs,
    stride_addend,
    NUM_CHOSEN: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The weighted sum over a token's experts, and what is added to it, rounded once."""
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    token = tl.cast(tl.program_id(1), tl.int64)
    outputs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < num_outputs
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    num_read = tl.where(tl.load(ids_ptr + token * NUM_CHOSEN) >= 0, num_outputs, 0)
    mask = outputs < num_read
    for choice in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + choice
        value = tl.load(pair_outputs_ptr + pair * num_outputs + outputs, mask=mask, other=0.0)
        total += tl.load(weights_ptr + pair) * value.to(tl.float32)
    if HAS_ADDEND:
        addend = tl.load(addend_ptr + token * stride_addend + outputs, mask=mask, other=0.0)
        total += addend.to(tl.float32)
    tl.store(
        out_ptr + token * num_outputs + outputs,
        total.to(out_ptr.dtype.element_ty),
        mask=is_output,
    )
