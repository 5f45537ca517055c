"""What a GPU holds beside weights, pages and slots: the part of a plan that is estimated.

Owns the estimates of what the driver and libraries take, of activations and of graphs. An engine
measures all of them when it starts (`runner/device_budget.py`); estimates are held against
measurements by `bench/h200/memory.py`.
"""

from math import prod
from typing import NamedTuple

from stagecoach.config.engine import ResolvedConfig
from stagecoach.config.model import LayerKind
from stagecoach.pipeline.boundary import incoming_fields, outgoing_fields
from stagecoach.pipeline.stage import Stage
from stagecoach.runner.buckets import make_buckets
from stagecoach.runner.stage_runner import DTYPES

# The driver's context, loaded kernels and the libraries' own memory; between GPUs NCCL's as well.
_CONTEXT_BYTES = 830 << 20
_NEIGHBOUR_BYTES = 1100 << 20
# Keys and values that are made from cached rows for some heads; the next heads' are made before
# those are let go of.
_EXPANDED_BYTES = 1 << 30
# Of one captured graph, beside the pool that all share.
_GRAPH_BYTES = 4 << 20
# Of a logit: float32 as computed, and copies while tokens are chosen; in graphs only the choice
# without rules.
_LOGIT_BYTES, _GRAPH_LOGIT_BYTES = 40, 18
_CHUNK_SIZE = 64


class Reserve(NamedTuple):
    """Estimated bytes of one rank."""

    context: int  # of the driver and libraries
    activations: int  # most of a step, with what is on its way between stages
    graphs: int  # all that are captured

    @property
    def total(self) -> int:
        return sum(self)


NO_RESERVE = Reserve(0, 0, 0)


def estimate_reserve(config: ResolvedConfig, stage: Stage) -> Reserve:
    """Of one rank of a stage on a GPU; nothing of it is set aside on a CPU."""
    if config.device == "cpu":
        return NO_RESERVE
    engine = config.engine
    has_neighbours = engine.num_workers > 1
    chunk = min(engine.max_num_batched_tokens, config.max_model_len - 1)
    width = 1 + config.num_draft_tokens
    windows = min(engine.max_num_seqs, max(1, engine.max_num_batched_tokens // width))
    logits = windows * width * config.model.vocab_size if stage.is_last else 0
    layers = _layer_bytes(config, stage, chunk, config.max_model_len)
    activations = max(layers, _stream_bytes(config, stage, chunk) + logits * _LOGIT_BYTES)
    return Reserve(
        context=_CONTEXT_BYTES + (_NEIGHBOUR_BYTES if has_neighbours else 0),
        activations=activations + _in_flight_bytes(config, stage, chunk),
        graphs=_graph_bytes(config, stage, logits),
    )


def _graph_bytes(config: ResolvedConfig, stage: Stage, num_logits: int) -> int:
    if config.engine.enforce_eager:
        return 0
    buckets = make_buckets(config).all
    if not buckets:
        return 0
    largest = buckets[0].num_tokens
    shared = _layer_bytes(config, stage, largest, 0) + num_logits * _GRAPH_LOGIT_BYTES
    return shared + len(buckets) * _GRAPH_BYTES * (2 if stage.is_last else 1)


def _stream_bytes(config: ResolvedConfig, stage: Stage, num_tokens: int) -> int:
    """The residual stream of a step: sums, what reads them, and closed blocks."""
    num_blocks = config.model.num_closed_blocks(stage.end)
    num_taps = len(config.speculation.draft.taps.layers) if config.speculation else 0
    rows = 4 + num_blocks + num_taps
    return num_tokens * rows * config.model.hidden_size * DTYPES[config.dtype].itemsize


def _layer_bytes(config: ResolvedConfig, stage: Stage, num_tokens: int, context: int) -> int:
    """Most that one of the stage's layers has at a time, with the stream."""
    most = max(_most_values(config, layer, num_tokens, context) for layer in stage.layers)
    size = DTYPES[config.dtype].itemsize
    return _stream_bytes(config, stage, num_tokens) + int(most * size)


def _most_values(config: ResolvedConfig, layer: int, num_tokens: int, context: int) -> float:
    """Values of activations of the layer's larger sublayer."""
    model, tp_size = config.model, config.engine.tensor_parallel_size
    if model.layer_kinds[layer] is LayerKind.KDA:
        attention = _kda_values(config, num_tokens, is_chunk=context > 0)
    else:
        attention = _mla_values(config, num_tokens, context)
    moe = model.moe
    if moe is None or not model.is_moe_layer[layer]:
        return max(attention, num_tokens * 3 * model.dense_intermediate_size / tp_size)
    pairs = num_tokens * moe.num_experts_per_token
    width = moe.latent_size or model.hidden_size
    routed = pairs * (moe.intermediate_size / tp_size + width) + 2 * num_tokens * width
    shared = num_tokens * 3 * moe.shared_intermediate_size / tp_size
    # Weights and ids, and the order of the pairs: numbers of four bytes.
    order = 8 * pairs + 3 * 2 * num_tokens * moe.num_experts
    return max(attention, routed + shared + order)


def _kda_values(config: ResolvedConfig, num_tokens: int, *, is_chunk: bool) -> float:
    kda, tp_size = config.model.kda, config.engine.tensor_parallel_size
    heads = kda.num_heads / tp_size
    width = heads * kda.head_dim
    # Channels, gate and decay, then the output; a chunk's channels after the convolution, and
    # its tiles, too.
    values = 6 * width + config.model.hidden_size
    if is_chunk:
        values += 3 * width + heads * (4 * kda.head_dim + _CHUNK_SIZE)
    return num_tokens * values


def _mla_values(config: ResolvedConfig, num_tokens: int, context: int) -> float:
    mla, tp_size = config.model.mla, config.engine.tensor_parallel_size
    heads = mla.num_heads / tp_size
    # Queries (of windows in the latent space, too), gate, the output and its projection; of
    # contexts the rows and what is made of them.
    latent = 0 if context else mla.kv_lora_rank
    values = num_tokens * (
        heads * (mla.qk_head_dim + 2 * mla.v_head_dim + latent)
        + mla.cache_row_width
        + config.model.hidden_size
    )
    expanded = context * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    limit = 2 * _EXPANDED_BYTES / DTYPES[config.dtype].itemsize
    return values + context * mla.cache_row_width + min(expanded, limit)


def _in_flight_bytes(config: ResolvedConfig, stage: Stage, num_tokens: int) -> int:
    """As `pipeline/handoff.py:Handoff.bytes_in_flight` counts it."""
    taps = config.speculation.draft.taps if config.speculation else None
    fields = (
        *incoming_fields(config.model, stage, taps),
        *outgoing_fields(config.model, stage, taps),
    )
    values = num_tokens * sum(prod(field.row_shape) for field in fields)
    return (stage.num_stages - 1) * values * DTYPES[config.dtype].itemsize
