"""Experts' products for very few tokens in Triton: each pair reads its expert by itself.

A shared expert of the same width counts as one more choice of every token, of weight 1.

Dimensions: I intermediate width, L latent width, as in `reference.py`.
"""

import triton
import triton.language as tl

from stagecoach.kernels.activation.activation_kernel import gated
from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit
def pair_gate_up_kernel(
    x_ptr,
    weights_ptr,
    shared_weights_ptr,
    ids_ptr,
    out_ptr,
    width,
    num_inputs,
    stride_x,
    beta,
    linear_beta,
    NUM_CHOSEN: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    IS_SITU: tl.constexpr,
    IS_BOUND: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """out[pair] = activation(gate x, up x) for a few rows of the width.

    A program has all its weights on their way at once, BLOCK_L inputs and then the rest. Pairs
    are neighbours on the grid, so that what two tokens share is read once from memory.
    """
    pair = tl.program_id(0)
    token = pair // (NUM_CHOSEN + NUM_SHARED)
    choice = pair % (NUM_CHOSEN + NUM_SHARED)
    columns_I = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    safe_I = tl.minimum(columns_I, width - 1)
    inputs_1L = tl.arange(0, BLOCK_L)[None, :]
    wait_for_earlier(IS_DEPENDENT)
    # Not before: the next kernel relies on the choice of experts as soon as it starts.
    let_next_start(IS_DEPENDENT)
    is_shared = choice == NUM_CHOSEN
    expert = tl.load(ids_ptr + token * NUM_CHOSEN + tl.where(is_shared, 0, choice))
    if expert < 0:
        return
    if NUM_SHARED > 0:
        expert = tl.where(is_shared, 0, expert)
        weights_ptr = tl.where(is_shared, shared_weights_ptr, weights_ptr)
    rows_I = tl.cast(expert, tl.int64) * (2 * width) + safe_I
    gate_ptrs_I1 = weights_ptr + rows_I[:, None] * num_inputs
    up_ptrs_I1 = gate_ptrs_I1 + tl.cast(width, tl.int64) * num_inputs
    x_row_ptr = x_ptr + tl.cast(token, tl.int64) * stride_x
    gate_IL = tl.load(gate_ptrs_I1 + inputs_1L, eviction_policy="evict_first")
    up_IL = tl.load(up_ptrs_I1 + inputs_1L, eviction_policy="evict_first")
    if BLOCK_REST > 0:
        rest_1R = BLOCK_L + tl.arange(0, BLOCK_REST)[None, :]
        is_input_1R = rest_1R < num_inputs
        gate_IR = tl.load(
            gate_ptrs_I1 + rest_1R, mask=is_input_1R, other=0.0, eviction_policy="evict_first"
        )
        up_IR = tl.load(
            up_ptrs_I1 + rest_1R, mask=is_input_1R, other=0.0, eviction_policy="evict_first"
        )
    # Otherwise the compiler would wait for some weights before it asks for the others.
    tl.debug_barrier()
    x_1L = tl.load(x_row_ptr + inputs_1L)
    if BLOCK_REST > 0:
        x_1R = tl.load(x_row_ptr + rest_1R, mask=is_input_1R, other=0.0).to(tl.float32)
    x_1L = x_1L.to(tl.float32)
    gate_I = tl.sum(gate_IL.to(tl.float32) * x_1L, axis=1)
    up_I = tl.sum(up_IL.to(tl.float32) * x_1L, axis=1)
    if BLOCK_REST > 0:
        gate_I += tl.sum(gate_IR.to(tl.float32) * x_1R, axis=1)
        up_I += tl.sum(up_IR.to(tl.float32) * x_1R, axis=1)
    product_I = gated(gate_I, up_I, beta, linear_beta, IS_SITU, IS_BOUND)
    tl.store(
        out_ptr + tl.cast(pair, tl.int64) * width + columns_I,
        product_I.to(out_ptr.dtype.element_ty),
        mask=columns_I < width,
    )


@triton.jit
def pair_down_kernel(
    x_ptr,
    weights_ptr,
    shared_weights_ptr,
    chosen_weights_ptr,
    ids_ptr,
    out_ptr,
    num_outputs,
    width,
    NUM_CHOSEN: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_I: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The weighted sum over a token's experts of a block of outputs.

    One loop over experts and blocks of the width, so that loads of the next expert are on their
    way while one is summed.
    """
    token = tl.cast(tl.program_id(0), tl.int64)
    outputs_L = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    safe_L = tl.cast(tl.minimum(outputs_L, num_outputs - 1), tl.int64)
    columns_I = tl.arange(0, BLOCK_I)
    is_real = tl.load(ids_ptr + token * NUM_CHOSEN) >= 0
    num_blocks = tl.cdiv(width, BLOCK_I)
    num_rounds = tl.where(is_real, (NUM_CHOSEN + NUM_SHARED) * num_blocks, 0)
    total_LI = tl.zeros((BLOCK_L, BLOCK_I), dtype=tl.float32)
    for index in tl.range(0, num_rounds, num_stages=NUM_STAGES):
        choice = index // num_blocks
        pair = token * (NUM_CHOSEN + NUM_SHARED) + choice
        start = (index % num_blocks) * BLOCK_I
        is_shared = choice == NUM_CHOSEN
        place = token * NUM_CHOSEN + tl.where(is_shared, 0, choice)
        expert = tl.cast(tl.load(ids_ptr + place), tl.int64)
        weight = tl.load(chosen_weights_ptr + place)
        expert_weights_ptr = weights_ptr
        if NUM_SHARED > 0:
            expert = tl.where(is_shared, 0, expert)
            weight = tl.where(is_shared, 1.0, weight)
            expert_weights_ptr = tl.where(is_shared, shared_weights_ptr, weights_ptr)
        rows_L = expert * num_outputs + safe_L
        places_LI = rows_L[:, None] * width + (start + columns_I)[None, :]
        if IS_EVEN:
            x_I = tl.load(x_ptr + pair * width + start + columns_I)
            weight_LI = tl.load(expert_weights_ptr + places_LI)
        else:
            is_column_I = start + columns_I < width
            x_I = tl.load(x_ptr + pair * width + start + columns_I, mask=is_column_I, other=0.0)
            weight_LI = tl.load(
                expert_weights_ptr + places_LI, mask=is_column_I[None, :], other=0.0
            )
        total_LI += weight_LI.to(tl.float32) * (x_I.to(tl.float32) * weight)[None, :]
    total_L = tl.sum(total_LI, axis=1)
    tl.store(
        out_ptr + token * num_outputs + outputs_L,
        total_L.to(out_ptr.dtype.element_ty),
        mask=outputs_L < num_outputs,
    )


@triton.jit
def pair_down_whole_kernel(
    x_ptr,
    weights_ptr,
    shared_weights_ptr,
    chosen_weights_ptr,
    ids_ptr,
    out_ptr,
    num_outputs,
    width,
    NUM_CHOSEN: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The weighted sum over a token's experts of one output, all weights on their way at once.

    It starts behind a kernel that waited for the choice of experts before it let this one start:
    only its products have to be waited for.
    """
    let_next_start(IS_DEPENDENT)
    token = tl.cast(tl.program_id(0), tl.int64)
    output = tl.program_id(1)
    choices_C = tl.arange(0, BLOCK_C)
    columns_1I = tl.arange(0, BLOCK_I)[None, :]
    is_column_1I = columns_1I < width
    if NUM_SHARED > 0:
        shared_1I = tl.load(
            shared_weights_ptr + tl.cast(output, tl.int64) * width + columns_1I,
            mask=is_column_1I,
            other=0.0,
            eviction_policy="evict_first",
        )
    # Past the first level of caches, which earlier kernels may have filled.
    ids_C = tl.load(
        ids_ptr + token * NUM_CHOSEN + choices_C,
        mask=choices_C < NUM_CHOSEN,
        other=-1,
        cache_modifier=".cg",
    )
    is_chosen_C1 = (ids_C >= 0)[:, None]
    rows_C = tl.cast(tl.maximum(ids_C, 0), tl.int64) * num_outputs + output
    weight_ptrs_CI = weights_ptr + rows_C[:, None] * width + columns_1I
    is_place_CI = is_chosen_C1 & is_column_1I
    weight_CI = tl.load(weight_ptrs_CI, mask=is_place_CI, other=0.0, eviction_policy="evict_first")
    wait_for_earlier(IS_DEPENDENT)
    row_ptr = x_ptr + token * (NUM_CHOSEN + NUM_SHARED) * width
    x_CI = tl.load(
        row_ptr + choices_C[:, None] * width + columns_1I, mask=is_place_CI, other=0.0
    ).to(tl.float32)
    chosen_C = tl.load(
        chosen_weights_ptr + token * NUM_CHOSEN + choices_C, mask=choices_C < NUM_CHOSEN, other=0.0
    )
    total_I = tl.sum(weight_CI.to(tl.float32) * x_CI * chosen_C[:, None], axis=0)
    if NUM_SHARED > 0:
        x_1I = tl.load(row_ptr + NUM_CHOSEN * width + columns_1I, mask=is_column_1I, other=0.0)
        total_I += tl.sum(shared_1I.to(tl.float32) * x_1I.to(tl.float32), axis=0)
    total = tl.sum(total_I, axis=0)
    total = tl.where(tl.max(ids_C, axis=0) >= 0, total, 0.0)
    tl.store(out_ptr + token * num_outputs + output, total.to(out_ptr.dtype.element_ty))
