"""A matrix for each head: what absorbs the up-projections into queries and outputs.

For few tokens, where the product is bound by reading the matrices once.

Dimensions: T tokens, K inputs and O outputs of a head.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def head_product_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    num_tokens,
    x_token_stride,
    x_head_stride,
    weight_head_stride,
    weight_in_stride,
    weight_out_stride,
    gate_token_stride,
    gate_head_stride,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_O: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[t, h] = x[t, h] @ weight[h], times sigmoid(gate[t, h]) where there is a gate.

    Programs: (heads, tiles of outputs, tiles of tokens).
    """
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    outputs_O = tl.program_id(1) * TILE_O + tl.arange(0, TILE_O)
    tokens_T = tl.program_id(2) * TILE_T + tl.arange(0, TILE_T)
    is_output_O = outputs_O < NUM_OUTPUTS
    is_token_T = tokens_T < num_tokens
    tokens_T = tokens_T.to(tl.int64)
    x_at_T = x_ptr + tokens_T * x_token_stride + head * x_head_stride
    weight_at_O = (
        weight_ptr + head.to(tl.int64) * weight_head_stride + outputs_O * weight_out_stride
    )
    sum_TO = tl.zeros((TILE_T, TILE_O), tl.float32)
    for first in tl.static_range(0, NUM_INPUTS, TILE_K):
        inputs_K = first + tl.arange(0, TILE_K)
        is_input_K = inputs_K < NUM_INPUTS
        x_TK = tl.load(
            x_at_T[:, None] + inputs_K[None, :],
            mask=is_token_T[:, None] & is_input_K[None, :],
            other=0.0,
        )
        weight_KO = tl.load(
            weight_at_O[None, :] + (inputs_K * weight_in_stride)[:, None],
            mask=is_input_K[:, None] & is_output_O[None, :],
            other=0.0,
        )
        sum_TO = tl.dot(x_TK, weight_KO, sum_TO, input_precision=PRECISION)
    is_value_TO = is_token_T[:, None] & is_output_O[None, :]
    if HAS_GATE:
        gate_TO = tl.load(
            gate_ptr
            + (tokens_T * gate_token_stride + head * gate_head_stride)[:, None]
            + outputs_O[None, :],
            mask=is_value_TO,
            other=0.0,
        )
        # Rounded as the product alone would be.
        sum_TO = sum_TO.to(out_ptr.dtype.element_ty).to(tl.float32)
        sum_TO = sum_TO * tl.sigmoid(gate_TO.to(tl.float32))
    out_at_T = out_ptr + (tokens_T * num_heads + head) * NUM_OUTPUTS
    tl.store(
        out_at_T[:, None] + outputs_O[None, :],
        sum_TO.to(out_ptr.dtype.element_ty),
        mask=is_value_TO,
    )
