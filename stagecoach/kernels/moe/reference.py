"""Mixture of experts in plain PyTorch: the specification and the CPU implementation.

Dimensions: T tokens, E experts, K experts a token, P = T * K (token, expert) pairs,
L latent width, I intermediate width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stagecoach.kernels.activation import Activation
from stagecoach.kernels.precision import accumulate_dtype
from stagecoach.kernels.quantization import ExpertWeight, Mxfp4Weight, unpack_mxfp4


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    num_experts_per_token: int,
    score_function: str,
    renormalize: bool,
    scaling: float,
    num_expert_groups: int,
    topk_group: int,
) -> tuple[Tensor, Tensor]:
    """Choose experts by score + bias, weigh them by score.

    Ties go to the lowest expert index: the choice is the head of a stable descending sort,
    which keeps equal scores in index order (torch.topk promises no order). Groups of experts
    are ranked by the sum of their two best choice scores, ties to the lowest group.
    Formula: DeepSeek-V3 (arXiv 2412.19437), §2.1.2, the correction bias without its loss.

    Args:
        logits_TE: [T, E], any floating type; scores are made in its accumulate type.
        bias_E: [E] added for the choice only; None adds nothing.
        num_experts_per_token: K.
        score_function: "sigmoid" or "softmax".
        renormalize: divide the K weights by their sum.
        scaling: factor of the final weights.
        num_expert_groups: equal groups of neighbouring experts; 1 for no grouping.
        topk_group: groups that stay eligible.

    Returns:
        weights [T, K] in the accumulate type and expert ids int64 [T, K], best choice first.
    """
    assert score_function in ("sigmoid", "softmax"), score_function
    logits_TE = logits_TE.to(accumulate_dtype(logits_TE.dtype))
    scores_TE = logits_TE.sigmoid() if score_function == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    if topk_group < num_expert_groups:
        choice_TE = _keep_best_groups(choice_TE, num_expert_groups, topk_group)
    ids_TE = choice_TE.sort(dim=-1, descending=True, stable=True).indices
    expert_ids_TK = ids_TE[:, :num_experts_per_token]
    weights_TK = scores_TE.gather(1, expert_ids_TK)
    if renormalize:
        weights_TK /= weights_TK.sum(-1, keepdim=True).add_(1e-20)
    if scaling != 1.0:
        weights_TK *= scaling
    return weights_TK, expert_ids_TK


def _keep_best_groups(choice_TE: Tensor, num_expert_groups: int, topk_group: int) -> Tensor:
    """Experts outside the `topk_group` best groups get -inf."""
    choice_TGM = choice_TE.unflatten(1, (num_expert_groups, -1))
    best_TG = choice_TGM.topk(min(2, choice_TGM.shape[2]), dim=-1).values.sum(-1)
    order_TG = best_TG.sort(dim=-1, descending=True, stable=True).indices
    is_dropped_TG = torch.zeros_like(best_TG, dtype=torch.bool)
    is_dropped_TG.scatter_(1, order_TG[:, topk_group:], value=True)
    return choice_TGM.masked_fill(is_dropped_TG.unsqueeze(2), float("-inf")).flatten(1)


def routed_experts(
    x_TL: Tensor,
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    gate_up_E2IL: ExpertWeight,
    down_ELI: ExpertWeight,
    activation: Activation | Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """y_t = Σ_k weights[t, k] · down_e(activation(gate_e x_t, up_e x_t)), e = expert_ids[t, k].

    Args:
        x_TL: [T, L], any floating type.
        weights_TK: [T, K] in the accumulate type.
        expert_ids_TK: int64 [T, K], different within a row.
        gate_up_E2IL: [E, 2I, L] in `x_TL.dtype`, gate rows first, then up rows; or packed, of
            which the experts in use are decoded to that type.
        down_ELI: [E, L, I], likewise.
        activation: (gate, up) -> product, elementwise on the last dim.

    Returns:
        [T, L] in `x_TL.dtype`; the weighted sum is made in the accumulate type.
    """
    num_tokens, num_chosen = expert_ids_TK.shape
    num_pairs = num_tokens * num_chosen
    ids_P = expert_ids_TK.reshape(-1)
    # One product per expert in use: experts are met in order of id, each with its own rows.
    # A single token's experts all differ, so sorting would only cost calls.
    if num_tokens == 1:
        order_P = None
        spans = [(pair, pair + 1, expert) for pair, expert in enumerate(ids_P.tolist())]
        x_PL = x_TL.expand(num_pairs, -1)
    else:
        sorted_P, order_P = ids_P.sort(stable=True)
        spans = _spans(sorted_P, gate_up_E2IL.shape[0])
        x_PL = x_TL.index_select(0, order_P // num_chosen)
    gate_up_P2I = x_TL.new_empty(num_pairs, gate_up_E2IL.shape[1])
    for start, end, expert in spans:
        weight_2IL = _expert(gate_up_E2IL, expert, x_TL.dtype)
        torch.mm(x_PL[start:end], weight_2IL.t(), out=gate_up_P2I[start:end])
    gate_PI, up_PI = gate_up_P2I.chunk(2, dim=1)
    product_PI = activation(gate_PI, up_PI)
    out_PL = x_TL.new_empty(num_pairs, down_ELI.shape[1])
    for start, end, expert in spans:
        weight_LI = _expert(down_ELI, expert, x_TL.dtype)
        torch.mm(product_PI[start:end], weight_LI.t(), out=out_PL[start:end])
    if order_P is not None:
        out_PL = torch.empty_like(out_PL).index_copy_(0, order_P, out_PL)
    out_TKL = out_PL.view(num_tokens, num_chosen, down_ELI.shape[1]).to(weights_TK.dtype)
    return torch.bmm(weights_TK.unsqueeze(1), out_TKL).squeeze(1).to(x_TL.dtype)


def _expert(weight_EOI: ExpertWeight, expert: int, dtype: torch.dtype) -> Tensor:
    """[O, I] of one expert."""
    if isinstance(weight_EOI, Mxfp4Weight):
        return unpack_mxfp4(weight_EOI.part(expert), dtype)
    return weight_EOI[expert]


def _spans(sorted_ids_P: Tensor, num_experts: int) -> list[tuple[int, int, int]]:
    """(start, end, expert) of each expert that has pairs."""
    counts = torch.bincount(sorted_ids_P, minlength=num_experts).tolist()
    spans = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((start, start + count, expert))
            start += count
    return spans
