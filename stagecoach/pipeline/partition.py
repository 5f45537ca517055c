"""How many layers each pipeline stage gets.

Owns the search for the most even contiguous split, by what layers read or by their time; what
they are made of is in `costs/`. Pure functions of numbers: knows no tensor, so the engine settles
the partition before any worker starts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagecoach.config.draft import DraftConfig
from stagecoach.config.model import LayerKind, ModelConfig
from stagecoach.costs.operators import (
    Operator,
    OperatorKind,
    block_operators,
    context_operators,
    first_stage_operators,
    head_operators,
    last_stage_operators,
    layer_operators,
)
from stagecoach.costs.step_time import StepCosts, StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What each layer costs, and what the two ends hold beside layers, in one unit."""

    layers: tuple[float, ...]
    first_stage: float  # embedding
    last_stage: float  # final norm, output head and a drafter if there is one

    def folded(self) -> tuple[float, ...]:
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
) -> LayerCosts:
    """Values that a decode step reads: what a CPU's time follows.

    Of one request: without drafts what its token is multiplied with. The tokens of a window
    share all weights but the experts, of which each chooses its own; a block pass reads the draft
    once. Attention over the context is left out: its length is not known here.

    Args:
        draft: what the last stage drafts with.
        num_draft_tokens: drafts of a window.
    """
    num_tokens = 1 + num_draft_tokens
    last_stage = _decode_reads(last_stage_operators(model_config), model_config, num_tokens)
    return LayerCosts(
        layers=tuple(
            _decode_reads(layer_operators(model_config, layer), model_config, num_tokens)
            for layer in range(model_config.num_layers)
        ),
        first_stage=_decode_reads(first_stage_operators(model_config), model_config, num_tokens),
        last_stage=last_stage + (_draft_cost(draft, model_config) if draft else 0),
    )


def time_layer_costs(costs: StepCosts, step: StepShape) -> LayerCosts:
    """Seconds that a rank of a stage takes for its part of `step`, on a GPU."""
    return LayerCosts(
        layers=tuple(costs.layer_seconds(layer, step) for layer in range(costs.model.num_layers)),
        first_stage=costs.first_stage_seconds(step),
        last_stage=costs.last_stage_seconds(step),
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
    costs: LayerCosts, num_stages: int, override: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Layers of each stage: the override, else the most even split by cost.

    `compatibility/rules.py` has seen to it that the layers can be shared out so.
    """
    num_layers = len(costs.layers)
    if override is not None:
        is_split = len(override) == num_stages and sum(override) == num_layers
        assert is_split and min(override) > 0, f"{override} of {num_layers} layers"
        return tuple(override)
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


def _decode_reads(operators: Iterable[Operator], config: ModelConfig, num_tokens: int) -> int:
    """Values that a step of so many tokens reads, over all ranks."""
    return sum(
        item.reads * _num_chosen(item, config, num_tokens) + item.whole_reads for item in operators
    )


def _num_chosen(item: Operator, config: ModelConfig, num_tokens: int) -> int:
    """1, or how many experts are read."""
    moe = config.moe
    if item.kind is not OperatorKind.EXPERTS or moe is None:
        return 1
    return min(moe.num_experts, num_tokens * moe.num_experts_per_token)


def _draft_cost(draft: DraftConfig, config: ModelConfig) -> int:
    """One target token's context row, and one row of a block through layers and head."""
    operators = (
        *context_operators(draft),
        *block_operators(draft),
        *head_operators(draft),
    )
    return _decode_reads(operators, config, 1)
