"""Seconds of a step on one rank, from its operators and a machine's rates.

Owns the efficiencies: each is a figure of `bench/results/h200` (kernels-*.json, links.txt, the
profiles), and the sums of them are held against whole engines in tests. Between two limits, bytes
and operations, a kernel takes about their hypotenuse. Knows no engine and no tensor.
"""

import math
from dataclasses import dataclass

from stagecoach.config.draft import DraftConfig
from stagecoach.config.model import ModelConfig
from stagecoach.costs.machine import Machine
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
from stagecoach.costs.routing_skew import distinct_experts
from stagecoach.pipeline.stage import Stage

# Microseconds from one kernel of a graph to the next, with and beside a product.
_SMALL_KERNEL_US = 1.8
_PRODUCT_OF_ONE_US = 1.4
_PRODUCT_US = 4.0
_EXPERTS_US = 6.0
# Choice, order and sum of the experts of one token; of several, and of each token of a chunk.
_ROUTE_ONE_US, _ROUTE_US, _ROUTE_TOKEN_US = 4.0, 12.0, 0.024
_RECURRENCE_US = 5.0
_ATTENTION_US = 14.0
_EXCHANGE_US = 2.7
_HOP_US = 6.0
# Choice of tokens: a few small kernels, on the last stage.
_SAMPLING_US = 20.0
# Shares of the copy rate: of states, of cached rows, of experts that stay packed.
_STATE_RATE, _ROW_RATE, _PACKED_RATE = 0.88, 0.9, 0.58
# Shares of the matrix units' rate: of large products, of experts, of packed ones, and of attention
# in windows and in chunks.
_PRODUCT_FLOPS, _EXPERT_FLOPS, _PACKED_FLOPS = 0.95, 0.57, 0.5
_WINDOW_FLOPS, _CHUNK_FLOPS = 0.47, 0.6
# Seconds of a head with a token: in a window of several, and in a chunk.
_WINDOW_HEAD_TOKEN, _CHUNK_HEAD_TOKEN = 2.5e-9, 3.45e-9
# A step with a chunk, or without graphs, is launched kernel by kernel: about so long for a layer.
_EAGER_LAYER_SECONDS = 1.25e-3
# Between a step's kernels and the next step's: inputs copied, graphs launched, results fetched.
_STEP_SECONDS = 60e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How many bytes a value takes."""

    activation: float = 2.0
    expert: float = 2.0  # with its share of scales
    are_experts_packed: bool = False
    fp8_linear: float = 2.0  # of matrices that online quantisation takes
    row: float = 2.0  # cached
    draft_row: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Windows of a decode step, or one chunk of a prompt."""

    num_windows: int = 0
    width: int = 1  # tokens of a window
    context: float = 0.0  # cached positions before it, on average
    num_chunk_tokens: int = 0
    chunk_context: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.num_windows * self.width + self.num_chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Times of one model on one kind of machine."""

    machine: Machine
    model: ModelConfig
    tp_size: int = 1
    storage: Storage = Storage()
    draft: DraftConfig | None = None
    num_draft_tokens: int = 0
    has_graphs: bool = True

    def layer_seconds(self, layer: int, step: StepShape) -> float:
        """Of one decoder layer; of kernels in a graph, whoever launches them."""
        return self._sum(layer_operators(self.model, layer), step)

    def first_stage_seconds(self, step: StepShape) -> float:
        """Of the embedding."""
        return self._sum(first_stage_operators(self.model), step)

    def last_stage_seconds(self, step: StepShape) -> float:
        """Of the head, the choice of tokens, and the drafter."""
        # Of a chunk its last token alone is sampled.
        sampled = StepShape(
            num_windows=step.num_windows or 1, width=step.width if step.num_windows else 1
        )
        seconds = self._sum(last_stage_operators(self.model), sampled) + 1e-6 * _SAMPLING_US
        if self.draft is None:
            return seconds
        seconds += self._sum(context_operators(self.draft), step)
        blocks = StepShape(
            num_windows=sampled.num_windows,
            width=self.num_draft_tokens,
            context=step.context + step.chunk_context,
        )
        seconds += self._sum(block_operators(self.draft), blocks, is_draft=True)
        head, bias = head_operators(self.draft)
        seconds += self.operator_seconds(head, blocks)
        # The bias of a draft needs the draft before it.
        one = StepShape(num_windows=sampled.num_windows)
        choice = 1e-6 * 2 * _SMALL_KERNEL_US + self.operator_seconds(bias, one)
        return seconds + self.num_draft_tokens * choice

    def stage_seconds(self, stage: Stage, step: StepShape) -> float:
        """Of one step on one rank of a stage."""
        seconds = sum(self.layer_seconds(layer, step) for layer in stage.layers)
        if stage.is_first:
            seconds += self.first_stage_seconds(step)
        if stage.is_last:
            seconds += self.last_stage_seconds(step)
        if step.num_chunk_tokens or not self.has_graphs:
            seconds = max(seconds, stage.num_layers * _EAGER_LAYER_SECONDS)
        return seconds + _STEP_SECONDS

    def hop_seconds(self, num_bytes: float) -> float:
        """From a stage to the next, each rank its share."""
        return 1e-6 * _HOP_US + num_bytes / self.tp_size / self.machine.hop_bytes_per_second

    def _sum(
        self, operators: tuple[Operator, ...], step: StepShape, *, is_draft: bool = False
    ) -> float:
        return sum(self.operator_seconds(item, step, is_draft=is_draft) for item in operators)

    def operator_seconds(self, item: Operator, step: StepShape, *, is_draft: bool = False) -> float:
        """Of one operator; one of a draft has rows of its own type."""
        match item.kind:
            case OperatorKind.LINEAR:
                return self._linear(item, step)
            case OperatorKind.EXPERTS:
                return self._experts(item, step)
            case OperatorKind.RECURRENCE:
                return self._recurrence(item, step)
            case OperatorKind.ATTENTION:
                return self._attention(item, step, is_draft=is_draft)
            case OperatorKind.EXCHANGE:
                return self._exchange(item, step)
            case OperatorKind.ELEMENTWISE | OperatorKind.LOOKUP:
                num_values = step.num_tokens * item.token_values
                return 1e-6 * _SMALL_KERNEL_US + self._copied(num_values * self.storage.activation)

    def _linear(self, item: Operator, step: StepShape) -> float:
        num_weights = item.reads / self.tp_size + item.whole_reads
        value = self.storage.fp8_linear if item.is_fp8_weight else self.storage.activation
        latency = _PRODUCT_OF_ONE_US if step.num_tokens == 1 else _PRODUCT_US
        read = self._copied(num_weights * value)
        passed = self._copied(step.num_tokens * item.token_values * self.storage.activation)
        computed = self._computed(2 * step.num_tokens * num_weights, _PRODUCT_FLOPS)
        return 1e-6 * item.launches * latency + max(read + passed, computed)

    def _experts(self, item: Operator, step: StepShape) -> float:
        moe = self.model.moe
        assert moe is not None, "experts without their configuration"
        num_chosen = moe.num_experts_per_token
        num_read = distinct_experts(step.num_tokens, moe.num_experts, num_chosen)
        expert = item.reads / self.tp_size
        is_packed = self.storage.are_experts_packed
        rate = _PACKED_RATE if is_packed else 1.0
        read = self._copied(num_read * expert * self.storage.expert) / rate
        efficiency = _PACKED_FLOPS if is_packed else _EXPERT_FLOPS
        computed = self._computed(2 * step.num_tokens * num_chosen * expert, efficiency)
        routed_us = _ROUTE_ONE_US if step.num_tokens == 1 else _ROUTE_US
        routed_us += _ROUTE_TOKEN_US * step.num_tokens
        return 1e-6 * (_EXPERTS_US + routed_us) + math.hypot(read, computed)

    def _recurrence(self, item: Operator, step: StepShape) -> float:
        heads = item.heads / self.tp_size
        seconds = step.num_chunk_tokens * heads * _CHUNK_HEAD_TOKEN
        if step.num_windows:
            state = 4 * item.head_dim**2
            conv_rows = 3 * (self.model.kda.num_conv_rows + step.width - 1) * item.head_dim
            record = 4 * 3 * (step.width - 1) * item.head_dim
            tokens = 6 * step.width * item.head_dim * self.storage.activation
            kept = 2 * state + 2 * conv_rows * self.storage.activation + 2 * record
            seconds += self._copied(step.num_windows * heads * (kept + tokens)) / _STATE_RATE
            if step.width > 1:
                seconds += step.num_windows * step.width * heads * _WINDOW_HEAD_TOKEN
        return 1e-6 * _RECURRENCE_US + seconds

    def _attention(self, item: Operator, step: StepShape, *, is_draft: bool) -> float:
        heads = item.heads / self.tp_size
        row = self.storage.draft_row if is_draft else self.storage.row
        positions = step.num_windows * (step.context + step.width)
        read = self._copied(positions * item.row_width * row) / _ROW_RATE
        products = positions * step.width * heads * item.head_products
        seconds = math.hypot(read, self._computed(2 * products, _WINDOW_FLOPS))
        if step.num_chunk_tokens:
            mean_context = step.chunk_context + step.num_chunk_tokens / 2
            products = step.num_chunk_tokens * mean_context * heads * item.expanded_products
            seconds += self._computed(2 * products, _CHUNK_FLOPS)
        return 1e-6 * _ATTENTION_US + seconds

    def _exchange(self, item: Operator, step: StepShape) -> float:
        if self.tp_size == 1:
            return 0.0
        num_bytes = step.num_tokens * item.token_values * self.storage.activation
        # Every rank sends and receives that share; measured between two.
        share = 2 * (self.tp_size - 1) / self.tp_size
        return 1e-6 * _EXCHANGE_US + share * num_bytes / self.machine.exchange_bytes_per_second

    def _copied(self, num_bytes: float) -> float:
        return num_bytes / self.machine.copy_bytes_per_second

    def _computed(self, num_flops: float, efficiency: float) -> float:
        return num_flops / (efficiency * self.machine.matrix_flops_per_second)
