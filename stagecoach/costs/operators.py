"""The operators of a layer and of a stage's two ends: what each reads and computes.

Owns the only list of them that is made without a tensor: layers are balanced over stages by it
and steps are timed by it. Sizes are those of the whole model; what a rank has of them follows
from `whole_reads`. Knows no machine.
"""

from dataclasses import dataclass
from enum import Enum

from stagecoach.config.draft import DraftConfig, DraftGqaConfig, DraftMlaConfig
from stagecoach.config.model import LayerKind, MlaConfig, ModelConfig


class OperatorKind(Enum):
    """What decides an operator's time."""

    LINEAR = "linear"
    EXPERTS = "experts"
    RECURRENCE = "recurrence"  # of KDA, with its convolution
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    EXCHANGE = "exchange"  # a sum over the ranks of a stage
    LOOKUP = "lookup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of a layer."""

    kind: OperatorKind
    reads: int = 0  # values of weights; of the recurrence what stands for them, a pass each
    whole_reads: int = 0  # values of weights that every rank of a stage reads
    token_values: int = 0  # of activations that a token reads and writes
    launches: int = 1
    heads: int = 0  # of attention and recurrence
    head_dim: int = 0  # of a recurrence
    row_width: int = 0  # cached values of a position
    head_products: int = 0  # multiply-adds of a head with a position, in the cached space
    expanded_products: int = 0  # the same in a chunk, where keys and values are made first
    is_fp8_weight: bool = False  # among what online quantisation stores as fp8 by default


def layer_operators(config: ModelConfig, layer: int) -> tuple[Operator, ...]:
    """Of one decoder layer, in their order."""
    is_kda = config.layer_kinds[layer] is LayerKind.KDA
    attention = _kda(config) if is_kda else _mla(config)
    feed_forward = _moe(config) if config.is_moe_layer[layer] else _dense(config)
    return (*_reads(config, layer), *attention, *feed_forward)


def first_stage_operators(config: ModelConfig) -> tuple[Operator, ...]:
    """The embedding."""
    hidden = config.hidden_size
    return (
        Operator(kind=OperatorKind.LOOKUP, reads=hidden, token_values=2 * hidden),
        Operator(kind=OperatorKind.EXCHANGE, token_values=hidden),
    )


def last_stage_operators(config: ModelConfig) -> tuple[Operator, ...]:
    """The final norm and the output head, both of sampled rows alone."""
    hidden = config.hidden_size
    return (
        Operator(kind=OperatorKind.ELEMENTWISE, whole_reads=hidden, token_values=2 * hidden),
        Operator(
            kind=OperatorKind.LINEAR,
            reads=config.vocab_size * hidden,
            # In float32, written once and read by what samples.
            token_values=hidden + 4 * config.vocab_size,
        ),
    )


def context_operators(draft: DraftConfig) -> tuple[Operator, ...]:
    """What a draft makes of each token of its target."""
    hidden, num_taps = draft.hidden_size, len(draft.taps.layers)
    row = _draft_row(draft)
    return (
        _linear(num_taps * hidden, 0, hidden),
        *(_linear(hidden, 0, row) for _ in range(draft.num_layers)),
    )


def block_operators(draft: DraftConfig) -> tuple[Operator, ...]:
    """One pass over blocks, without the head: draft layers, then the Markov bias."""
    hidden, attention = draft.hidden_size, draft.attention
    layers: list[Operator] = []
    for _ in range(draft.num_layers):
        if isinstance(attention, DraftGqaConfig):
            width = attention.num_heads * attention.head_dim
            row = 2 * attention.num_kv_heads * attention.head_dim
            layers += [
                _linear(hidden, width + row),
                Operator(
                    kind=OperatorKind.ATTENTION,
                    heads=attention.num_heads,
                    row_width=row,
                    head_products=2 * attention.head_dim,
                    expanded_products=2 * attention.head_dim,
                ),
                _linear(width, hidden),
            ]
        else:
            layers += _latent_attention(attention, hidden)
        layers += [
            _elementwise(hidden),
            _exchange(hidden),
            _linear(hidden, 2 * draft.intermediate_size),
            _linear(draft.intermediate_size, hidden),
            _elementwise(hidden),
            _exchange(hidden),
        ]
    return tuple(layers)


def head_operators(draft: DraftConfig) -> tuple[Operator, ...]:
    """The head of a block's rows, and the bias of the token before each."""
    return (
        Operator(
            kind=OperatorKind.LINEAR,
            reads=draft.vocab_size * draft.hidden_size,
            token_values=draft.hidden_size + 4 * draft.vocab_size,
        ),
        Operator(
            kind=OperatorKind.LINEAR,
            whole_reads=draft.vocab_size * draft.markov_rank,
            token_values=draft.markov_rank + 4 * draft.vocab_size,
        ),
    )


def _draft_row(draft: DraftConfig) -> int:
    attention = draft.attention
    if isinstance(attention, DraftGqaConfig):
        return 2 * attention.num_kv_heads * attention.head_dim
    return attention.cache_row_width


def _linear(
    num_inputs: int,
    num_split: int,
    num_whole: int = 0,
    *,
    launches: int = 1,
    is_fp8_weight: bool = False,
) -> Operator:
    """One product; of its outputs (or inputs) `num_whole` are computed on every rank."""
    return Operator(
        kind=OperatorKind.LINEAR,
        reads=num_inputs * num_split,
        whole_reads=num_inputs * num_whole,
        token_values=num_inputs + num_split + num_whole,
        launches=launches,
        is_fp8_weight=is_fp8_weight,
    )


def _elementwise(width: int, *, num_passes: int = 4) -> Operator:
    return Operator(kind=OperatorKind.ELEMENTWISE, token_values=num_passes * width)


def _exchange(width: int) -> Operator:
    return Operator(kind=OperatorKind.EXCHANGE, token_values=width)


def _reads(config: ModelConfig, layer: int) -> tuple[Operator, ...]:
    """The two norms of a layer, with the mixture of the blocks that are closed by then."""
    hidden = config.hidden_size
    if config.attn_res_block_size is None:
        return (_elementwise(hidden), _elementwise(hidden))
    return tuple(
        _elementwise(hidden, num_passes=4 + config.num_closed_blocks(place))
        for place in (layer, layer + 1)
    )


def _kda(config: ModelConfig) -> tuple[Operator, ...]:
    kda, hidden = config.kda, config.hidden_size
    width = kda.num_heads * kda.head_dim
    # Side by side one product; the low ranks of the gates are there on every rank.
    num_gates = 1 if kda.has_full_rank_gate else 2
    split = 3 * width + kda.num_heads + (width if kda.has_full_rank_gate else 0)
    return (
        _linear(hidden, split, num_gates * kda.head_dim, is_fp8_weight=True),
        _linear(num_gates * kda.head_dim, width),
        Operator(
            kind=OperatorKind.RECURRENCE,
            reads=3 * width * kda.conv_kernel_size + 3 * width * kda.head_dim,
            heads=kda.num_heads,
            head_dim=kda.head_dim,
        ),
        _linear(width, hidden, is_fp8_weight=True),
        _exchange(hidden),
    )


def _latent_attention(
    mla: MlaConfig | DraftMlaConfig, hidden: int, gate_width: int = 0
) -> tuple[Operator, ...]:
    query_width, value_width = mla.num_heads * mla.qk_head_dim, mla.num_heads * mla.v_head_dim
    inputs: tuple[Operator, ...]
    if mla.q_lora_rank is None:
        inputs = (
            _linear(hidden, query_width + gate_width, mla.cache_row_width, is_fp8_weight=True),
        )
    else:
        whole = mla.q_lora_rank + mla.cache_row_width
        inputs = (
            _linear(hidden, gate_width, whole, is_fp8_weight=True),
            _elementwise(mla.q_lora_rank),
            _linear(mla.q_lora_rank, query_width, is_fp8_weight=True),
        )
    return (
        *inputs,
        _elementwise(mla.cache_row_width),
        # Keys go into the query, values into the output.
        _linear(
            mla.kv_lora_rank,
            mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            launches=2,
        ),
        Operator(
            kind=OperatorKind.ATTENTION,
            heads=mla.num_heads,
            row_width=mla.cache_row_width,
            head_products=mla.cache_row_width + mla.kv_lora_rank,
            expanded_products=mla.qk_head_dim + mla.v_head_dim,
        ),
        _linear(value_width, hidden, is_fp8_weight=True),
    )


def _mla(config: ModelConfig) -> tuple[Operator, ...]:
    mla, hidden = config.mla, config.hidden_size
    gate_width = mla.num_heads * mla.v_head_dim if mla.has_output_gate else 0
    return (*_latent_attention(mla, hidden, gate_width), _exchange(hidden))


def _dense(config: ModelConfig) -> tuple[Operator, ...]:
    hidden, width = config.hidden_size, config.dense_intermediate_size
    return (
        _linear(hidden, 2 * width, is_fp8_weight=True),
        _linear(width, hidden, is_fp8_weight=True),
        _exchange(hidden),
    )


def _moe(config: ModelConfig) -> tuple[Operator, ...]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None, "a MoE layer needs its configuration"
    width = moe.latent_size or hidden
    latent_width = moe.latent_size or 0
    shared_width = moe.shared_intermediate_size
    operators = [_linear(hidden, 0, moe.num_experts)]
    if latent_width or shared_width:
        operators.append(_linear(hidden, 2 * shared_width, latent_width))
    operators.append(
        Operator(
            kind=OperatorKind.EXPERTS,
            reads=3 * width * moe.intermediate_size,  # of one expert
            token_values=moe.num_experts_per_token * width,
        )
    )
    if shared_width:
        operators += [_elementwise(shared_width), _linear(shared_width, hidden)]
    if latent_width:
        operators += [_elementwise(latent_width), _linear(latent_width, 0, hidden)]
    return (*operators, _exchange(hidden + latent_width))
