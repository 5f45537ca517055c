"""How many layers each pipeline stage gets.

Owns the estimate of what a layer costs and the search for the most even contiguous split.
Pure functions of numbers: knows no tensor, so the engine settles the partition before any
worker starts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stagecoach.draft_config import DraftConfig, DraftGqaConfig, DraftMlaConfig
from stagecoach.model_config import LayerKind, MlaConfig, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Multiply-adds per token: of each layer, and of what the two ends hold beside layers."""

    layers: tuple[int, ...]
    first_stage: int  # embedding
    last_stage: int  # final norm, output head and a drafter if there is one

    def folded(self) -> tuple[int, ...]:
        """One cost a layer, the ends added to the first and the last layer.

        Contiguous stages always put those layers on the first and the last stage.
        """
        costs = list(self.layers)
        costs[0] += self.first_stage
        costs[-1] += self.last_stage
        return tuple(costs)


def estimate_layer_costs(
    model_config: ModelConfig,
    draft: DraftConfig | None = None,
    num_draft_tokens: int = 0,
    num_requests: int = 1,
) -> LayerCosts:
    """Weights that a decode step reads.

    Of one request without drafts that is what one token is multiplied with. The tokens of a step
    share all weights but the experts, of which each chooses its own; a block pass reads the draft
    once. Attention over the context is left out: its length is not known here.

    Args:
        draft: what the last stage drafts with.
        num_draft_tokens: drafts of a window.
        num_requests: of the step.
    """
    hidden_size = model_config.hidden_size
    head = model_config.vocab_size * hidden_size
    return LayerCosts(
        layers=tuple(
            _layer_cost(model_config, layer, num_requests * (1 + num_draft_tokens))
            for layer in range(model_config.num_layers)
        ),
        first_stage=hidden_size,
        last_stage=hidden_size + head + (_draft_cost(draft) if draft else 0),
    )


def attention_balance(model_config: ModelConfig) -> float:
    """The position from which on attention to the context costs a token more than all else.

    In multiply-adds; infinite without a layer that attends to its context.
    """
    mla = model_config.mla
    num_layers = sum(kind is LayerKind.MLA for kind in model_config.layer_kinds)
    each_position = num_layers * mla.num_heads * (mla.qk_head_dim + mla.v_head_dim)
    return (
        sum(estimate_layer_costs(model_config).layers) / each_position
        if each_position
        else math.inf
    )


def partition(
    model_config: ModelConfig,
    num_stages: int,
    override: Sequence[int] | None = None,
    draft: DraftConfig | None = None,
    num_draft_tokens: int = 0,
    num_requests: int = 1,
) -> tuple[int, ...]:
    """Layers of each stage: the override, else the most even split by cost.

    A `draft` makes the last stage the heavier; many requests of a step the experts, beside which
    the output head counts for less.

    `compatibility.py` has seen to it that the layers can be shared out so.
    """
    num_layers = model_config.num_layers
    if override is not None:
        is_split = len(override) == num_stages and sum(override) == num_layers
        assert is_split and min(override) > 0, f"{override} of {num_layers} layers"
        return tuple(override)
    costs = estimate_layer_costs(model_config, draft, num_draft_tokens, num_requests)
    return balance(costs.folded(), num_stages)


def balance(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Split `costs` into contiguous non-empty groups whose largest sum is as small as can be.

    Among the splits that reach that bound, the last group stays below it where possible, then
    the sums are as even as can be (least squares), then the earlier groups take more.

    Args:
        costs: one non-negative cost a layer.
        num_stages: between 1 and len(costs).

    Returns:
        Number of layers in each group.
    """
    assert 1 <= num_stages <= len(costs), f"{num_stages} groups of {len(costs)} layers"
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    bound = _smallest_bound(sums, num_stages)
    counts = _most_even(sums, num_stages, bound, last_below=True)
    if counts is None:
        counts = _most_even(sums, num_stages, bound, last_below=False)
    assert counts is not None, "the bound was reached once already"
    return counts


def _smallest_bound(sums: Sequence[float], num_stages: int) -> float:
    """The least possible largest group sum, by dynamic programming over prefixes."""
    num_layers = len(sums) - 1
    bounds = [math.inf] * (num_layers + 1)
    bounds[0] = 0.0
    for stage in range(1, num_stages + 1):
        bounds = [
            min(
                (max(bounds[start], sums[end] - sums[start]) for start in range(stage - 1, end)),
                default=math.inf,
            )
            for end in range(num_layers + 1)
        ]
    return bounds[num_layers]


def _most_even(
    sums: Sequence[float], num_stages: int, bound: float, *, last_below: bool
) -> tuple[int, ...] | None:
    """The split within `bound` with the least sum of squares; None if there is none."""
    num_layers = len(sums) - 1
    # For each prefix, the best (sum of squares, last group's sum, negated counts); counts are
    # negated so that the smaller tuple is the one whose earlier groups hold more layers.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (num_layers + 1)
    best[0] = (0.0, 0.0, ())
    for stage in range(1, num_stages + 1):
        is_last = stage == num_stages
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (num_layers + 1)
        for end in range(stage, num_layers + 1):
            for start in range(stage - 1, end):
                before = best[start]
                share = sums[end] - sums[start]
                if before is None or share > bound or (is_last and last_below and share == bound):
                    continue
                tie_break = share if is_last else 0.0
                option = (before[0] + share * share, tie_break, (*before[2], start - end))
                current = following[end]
                if current is None or option < current:
                    following[end] = option
        best = following
    result = best[num_layers]
    return None if result is None else tuple(-count for count in result[2])


def _layer_cost(config: ModelConfig, layer: int, num_tokens: int) -> int:
    is_kda = config.layer_kinds[layer] is LayerKind.KDA
    attention = _kda_cost(config) if is_kda else _mla_cost(config)
    if config.is_moe_layer[layer]:
        return attention + _moe_cost(config, num_tokens)
    return attention + _dense_cost(config)


def _kda_cost(config: ModelConfig) -> int:
    kda, hidden_size = config.kda, config.hidden_size
    width = kda.num_heads * kda.head_dim
    gate = hidden_size * width if kda.has_full_rank_gate else kda.head_dim * (hidden_size + width)
    decay = kda.head_dim * (hidden_size + width)
    convolution = 3 * width * kda.conv_kernel_size
    recurrence = 3 * width * kda.head_dim
    projections = hidden_size * (4 * width + kda.num_heads)
    return projections + gate + decay + convolution + recurrence


def _latent_attention_cost(mla: MlaConfig | DraftMlaConfig, hidden_size: int) -> int:
    query_width, value_width = mla.num_heads * mla.qk_head_dim, mla.num_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        query = hidden_size * query_width
    else:
        query = mla.q_lora_rank * (hidden_size + query_width)
    latent = hidden_size * mla.cache_row_width
    absorbed = mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query + latent + absorbed + value_width * hidden_size


def _mla_cost(config: ModelConfig) -> int:
    mla = config.mla
    gate = config.hidden_size * mla.num_heads * mla.v_head_dim if mla.has_output_gate else 0
    return _latent_attention_cost(mla, config.hidden_size) + gate


def _dense_cost(config: ModelConfig) -> int:
    return 3 * config.hidden_size * config.dense_intermediate_size


def _moe_cost(config: ModelConfig, num_tokens: int) -> int:
    moe, hidden_size = config.moe, config.hidden_size
    assert moe is not None, "a MoE layer needs its configuration"
    width = moe.latent_size or hidden_size
    num_chosen = min(moe.num_experts, num_tokens * moe.num_experts_per_token)
    experts = num_chosen * 3 * width * moe.intermediate_size
    latent = 2 * hidden_size * width if moe.latent_size else 0
    shared = 3 * hidden_size * moe.shared_intermediate_size
    return experts + latent + shared + hidden_size * moe.num_experts


def _draft_cost(draft: DraftConfig) -> int:
    """One target token's context row, and one row of a block through layers and head."""
    hidden_size, attention = draft.hidden_size, draft.attention
    if isinstance(attention, DraftGqaConfig):
        width = attention.num_heads * attention.head_dim
        row = 2 * attention.num_kv_heads * attention.head_dim
        block = 2 * hidden_size * width + hidden_size * row
    else:
        row = attention.cache_row_width
        block = _latent_attention_cost(attention, hidden_size)
    mlp = 3 * hidden_size * draft.intermediate_size
    context = len(draft.taps.layers) * hidden_size**2 + draft.num_layers * hidden_size * row
    head = draft.vocab_size * (hidden_size + draft.markov_rank)
    return context + draft.num_layers * (block + mlp) + head
