"""The choice of experts in Triton, a token a program, in float32.

Dimensions: G groups of experts, M experts of a group, K experts of a token.
"""

import triton
import triton.language as tl

from stagecoach.kernels.dependent_launch import let_next_start, wait_for_earlier


@triton.jit
def ordered(value):
    """float32 -> int64 that sorts alike; a NaN comes first or last and is never lost."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def load_logits(
    row_ptr, experts, mask, num_splits, stride_split, num_experts, NUM_PARTS: tl.constexpr
):
    """The logits of some experts, summed in one order; 0 where masked."""
    logits = tl.zeros_like(experts).to(tl.float32)
    for split in range(num_splits):
        # The first part is the largest and comes last.
        for part in tl.static_range(NUM_PARTS):
            part_ptr = row_ptr + split * stride_split + (NUM_PARTS - 1 - part) * num_experts
            logits += tl.load(part_ptr + experts, mask=mask, other=0.0)
    return logits


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    num_real_ptr,
    weights_ptr,
    ids_ptr,
    num_splits,
    stride_split,
    stride_token,
    num_experts,
    group_size,
    num_groups,
    num_kept_groups,
    scaling,
    NUM_CHOSEN: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A logit is a sum of `num_splits` x NUM_PARTS addends, the parts side by side.

    The largest of `ordered(choice) * 2^11 - expert` is the best choice, the lowest of equals.
    """
    let_next_start(IS_DEPENDENT)
    wait_for_earlier(IS_DEPENDENT)
    LEAST: tl.constexpr = -(2**62)
    DROPPED: tl.constexpr = -(2**61)
    token = tl.cast(tl.program_id(0), tl.int64)
    chosen_K = tl.arange(0, BLOCK_K)
    out_places_K = token * NUM_CHOSEN + chosen_K
    is_out_K = chosen_K < NUM_CHOSEN
    if HAS_REAL:  # noqa: SIM102 (settled when compiled)
        if token >= tl.load(num_real_ptr):
            tl.store(ids_ptr + out_places_K, tl.full((BLOCK_K,), -1, tl.int32), mask=is_out_K)
            tl.store(weights_ptr + out_places_K, tl.zeros((BLOCK_K,), tl.float32), mask=is_out_K)
            return
    groups_G = tl.arange(0, BLOCK_G)
    members_M = tl.arange(0, BLOCK_M)
    experts_GM = groups_G[:, None] * group_size + members_M[None, :]
    is_expert_GM = (groups_G[:, None] < num_groups) & (members_M[None, :] < group_size)
    logits_GM = load_logits(
        logits_ptr + token * stride_token, experts_GM, is_expert_GM, num_splits, stride_split,
        num_experts, NUM_PARTS,
    )  # fmt: skip
    largest = 0.0
    total = 1.0
    if IS_SIGMOID:
        scores_GM = 1.0 / (1.0 + tl.exp(-logits_GM))
    else:
        logits_GM = tl.where(is_expert_GM, logits_GM, float("-inf"))
        largest = tl.max(tl.max(logits_GM, axis=1), axis=0)
        scores_GM = tl.exp(logits_GM - largest)
        total = tl.sum(tl.sum(scores_GM, axis=1), axis=0)
        scores_GM = scores_GM / total
    choice_GM = scores_GM
    if HAS_BIAS:
        choice_GM += tl.load(bias_ptr + experts_GM, mask=is_expert_GM, other=0.0)
    rank_GM = tl.cast(experts_GM, tl.int64)
    keys_GM = tl.where(is_expert_GM, ordered(choice_GM) * 2048 - rank_GM, LEAST)
    if HAS_GROUPS:
        best_G = tl.max(keys_GM, axis=1)
        second_GM = tl.where(keys_GM == best_G[:, None], LEAST, keys_GM)
        is_best_GM = (keys_GM == best_G[:, None]) & is_expert_GM
        is_second_GM = (second_GM == tl.max(second_GM, axis=1)[:, None]) & is_expert_GM
        sums_G = tl.sum(tl.where(is_best_GM | is_second_GM, choice_GM, 0.0), axis=1)
        group_keys_G = ordered(sums_G) * 2048 - tl.cast(groups_G, tl.int64)
        group_keys_G = tl.where(groups_G < num_groups, group_keys_G, LEAST)
        is_kept_G = tl.zeros((BLOCK_G,), dtype=tl.int1)
        for _ in range(num_kept_groups):
            is_next_G = group_keys_G == tl.max(group_keys_G, axis=0)
            is_kept_G |= is_next_G
            group_keys_G = tl.where(is_next_G, LEAST, group_keys_G)
        # As the reference: a dropped group's experts come after all others, lowest id first.
        dropped_GM = tl.where(is_expert_GM, DROPPED - rank_GM, LEAST)
        keys_GM = tl.where(is_kept_G[:, None], keys_GM, dropped_GM)
    ids_K = tl.full((BLOCK_K,), 0, dtype=tl.int32)
    for choice in tl.static_range(NUM_CHOSEN):
        best = tl.max(tl.max(keys_GM, axis=1), axis=0)
        expert = ((-best) & 2047).to(tl.int32)
        ids_K = tl.where(chosen_K == choice, expert, ids_K)
        keys_GM = tl.where(keys_GM == best, LEAST, keys_GM)
    logits_K = load_logits(
        logits_ptr + token * stride_token, ids_K, is_out_K, num_splits, stride_split, num_experts,
        NUM_PARTS,
    )  # fmt: skip
    if IS_SIGMOID:
        weights_K = 1.0 / (1.0 + tl.exp(-logits_K))
    else:
        weights_K = tl.exp(logits_K - largest) / total
    weights_K = tl.where(is_out_K, weights_K, 0.0)
    if RENORMALIZE:
        weights_K = weights_K / (tl.sum(weights_K, axis=0) + 1e-20)
    weights_K = weights_K * scaling
    tl.store(ids_ptr + out_places_K, ids_K, mask=is_out_K)
    tl.store(weights_ptr + out_places_K, weights_K, mask=is_out_K)
