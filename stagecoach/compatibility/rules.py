"""What is refused, and why: the one table of combinations.

Owns every rule that joins two options, or an option or a fact of the draft and a fact of the
model. Ranges of single options are `config/engine.py`'s, values of config.json that no code
implements are those of `config/model.py` and `config/draft.py`. The table is evaluated before a
process starts or a weight is read; the tests and the support table (`support_table.py`) are made
from it.
"""

import dataclasses
from collections.abc import Callable

from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.compatibility.quantization_rules import QUANTIZATION_RULES
from stagecoach.compatibility.rule import Combination as Combination  # what the table judges
from stagecoach.compatibility.rule import Parts
from stagecoach.compatibility.rule import Rule as Rule
from stagecoach.config.draft import DraftConfig, DraftGqaConfig
from stagecoach.config.engine import EngineConfig, SpeculativeConfig, option, speculation_key
from stagecoach.config.model import LayerKind
from stagecoach.errors import ConfigError

_TP = "tensor_parallel_size"
_PP = "pipeline_parallel_size"
_DRAFTS = ("speculation, MLA draft", "speculation, GQA draft")


def _divides(
    name: str,
    features: tuple[str, ...],
    key: str,
    what: str,
    reason: str,
    size: Callable[[Combination], int],
) -> Rule:
    """tensor_parallel_size must divide a size; 0 stands for a part that is not there."""
    return Rule(
        name=name,
        features=features,
        axes=frozenset({"tp"}),
        requires=f"tp divides {what}",
        reason=reason,
        parts=lambda asked: (
            (option(_TP), asked.engine.tensor_parallel_size),
            (key, size(asked)),
        ),
        is_refused=lambda asked: size(asked) % asked.engine.tensor_parallel_size != 0,
    )


def _partition_rule(
    name: str,
    requires: str,
    reason: str,
    fact: Callable[[Combination], tuple[str, object]],
    is_refused: Callable[[tuple[int, ...], Combination], bool],
) -> Rule:
    """A rule about pp_partition, which holds without one."""
    return Rule(
        name=name,
        requires=requires,
        reason=reason,
        parts=lambda asked: (
            (option("pp_partition"), ",".join(map(str, asked.engine.pp_partition or ()))),
            fact(asked),
        ),
        is_refused=lambda asked: (
            asked.engine.pp_partition is not None and is_refused(asked.engine.pp_partition, asked)
        ),
    )


def _draft_rule(
    name: str,
    requires: str,
    reason: str,
    parts: Callable[[DraftConfig, Combination], Parts],
    is_refused: Callable[[DraftConfig, Combination], bool],
) -> Rule:
    """A rule about the draft and its target, which holds without a draft."""
    return Rule(
        name=name,
        requires=requires,
        reason=reason,
        parts=lambda asked: (
            _speculation_part(asked, "model"),
            *(() if asked.draft is None else parts(asked.draft, asked)),
        ),
        is_refused=lambda asked: asked.draft is not None and is_refused(asked.draft, asked),
    )


def _synthetic_rule(
    key: str, requires: str, reason: str, is_refused: Callable[[SpeculativeConfig], bool]
) -> Rule:
    """A rule about a key that forced acceptance leaves without meaning."""
    name = "synthetic_acceptance_length"
    return Rule(
        name=f"synthetic-{key.split('_')[-1]}",
        requires=requires,
        reason=reason,
        parts=lambda asked: (_speculation_part(asked, name), _speculation_part(asked, key)),
        is_refused=lambda asked: (
            asked.engine.speculative_config is not None
            and asked.engine.speculative_config.synthetic_acceptance_length is not None
            and is_refused(asked.engine.speculative_config)
        ),
    )


def _cache_rule(name: str, key: str, reason: str) -> Rule:
    """A rule about an option that means nothing without prefix caching; its default passes."""
    default = next(item.default for item in dataclasses.fields(EngineConfig) if item.name == key)
    return Rule(
        name=name,
        requires="prefix caching is on",
        reason=reason,
        parts=lambda asked: (
            (option(key), getattr(asked.engine, key)),
            (option("enable_prefix_caching"), asked.engine.enable_prefix_caching),
        ),
        is_refused=lambda asked: (
            not asked.engine.enable_prefix_caching and getattr(asked.engine, key) != default
        ),
    )


def _speculation_part(asked: Combination, key: str) -> tuple[str, object]:
    value = getattr(asked.engine.speculative_config, key)
    # As JSON spells it.
    return speculation_key(key), str(value).lower() if isinstance(value, bool) else value


def _num_stages(asked: Combination) -> tuple[str, object]:
    return option(_PP), asked.engine.pipeline_parallel_size


def _num_layers(asked: Combination) -> tuple[str, object]:
    return "num_hidden_layers", asked.model.num_layers


def _num_speculative_tokens(asked: Combination) -> int:
    return (
        asked.engine.speculative_config.num_speculative_tokens
        if asked.engine.speculative_config
        else 0
    )


def _num_draft_kv_heads(asked: Combination) -> int:
    if asked.draft is None or not isinstance(asked.draft.attention, DraftGqaConfig):
        return 0
    return asked.draft.attention.num_kv_heads


def _expert_width(asked: Combination) -> int:
    model = asked.model
    return model.moe.intermediate_size if model.moe and any(model.is_moe_layer) else 0


def _pages_of_longest_request(engine: EngineConfig) -> int:
    """0 where no length was asked for: then requests that do not fit are refused one by one."""
    if engine.max_model_len is None:
        return 0
    return NUM_RESERVED_PAGES + -(-engine.max_model_len // engine.block_size)


TABLE: tuple[Rule, ...] = (
    _divides(
        "kda-heads",
        ("KDA",),
        "linear_attn_config.num_heads",
        "the KDA heads",
        "a rank holds whole heads and their state",
        lambda asked: asked.model.kda.num_heads if LayerKind.KDA in asked.model.layer_kinds else 0,
    ),
    _divides(
        "mla-heads",
        ("MLA",),
        "num_attention_heads",
        "the MLA heads",
        "a rank holds whole heads",
        lambda asked: asked.model.mla.num_heads if LayerKind.MLA in asked.model.layer_kinds else 0,
    ),
    _divides(
        "dense-width",
        ("dense MLP",),
        "intermediate_size",
        "the width of the dense MLP",
        "ranks hold equal parts of it",
        lambda asked: 0 if all(asked.model.is_moe_layer) else asked.model.dense_intermediate_size,
    ),
    _divides(
        "expert-width",
        ("MoE",),
        "moe_intermediate_size",
        "the width of an expert",
        "ranks hold equal parts of each; shared experts are a multiple of it",
        _expert_width,
    ),
    _divides(
        "draft-heads",
        _DRAFTS,
        "the draft's num_attention_heads",
        "the draft's heads",
        "a rank holds whole heads",
        lambda asked: asked.draft.attention.num_heads if asked.draft else 0,
    ),
    _divides(
        "draft-kv-heads",
        ("speculation, GQA draft",),
        "the draft's num_key_value_heads",
        "the draft's key-value heads",
        "a rank holds whole heads and their cache rows",
        _num_draft_kv_heads,
    ),
    _divides(
        "draft-width",
        _DRAFTS,
        "the draft's intermediate_size",
        "the width of the draft's MLP",
        "ranks hold equal parts of it",
        lambda asked: asked.draft.intermediate_size if asked.draft else 0,
    ),
    Rule(
        name="stages",
        features=("Kimi-K3", "Kimi-Linear"),
        axes=frozenset({"pp"}),
        requires="pp is at most the number of layers",
        reason="a stage holds at least one layer",
        parts=lambda asked: (_num_stages(asked), _num_layers(asked)),
        is_refused=lambda asked: asked.engine.pipeline_parallel_size > asked.model.num_layers,
    ),
    _partition_rule(
        "partition-length",
        "pp_partition has one number for every stage",
        "a stage holds the layers that its number says",
        _num_stages,
        lambda partition, asked: len(partition) != asked.engine.pipeline_parallel_size,
    ),
    _partition_rule(
        "partition-empty-stage",
        "every number of pp_partition is at least 1",
        "a stage holds at least one layer",
        _num_stages,
        lambda partition, _: min(partition) < 1,
    ),
    _partition_rule(
        "partition-sum",
        "pp_partition adds up to num_hidden_layers",
        "each layer belongs to one stage",
        _num_layers,
        lambda partition, asked: sum(partition) != asked.model.num_layers,
    ),
    Rule(
        name="model-length",
        requires="max_model_len is at most max_position_embeddings",
        reason="the model never saw longer texts; to insist, raise its key with --hf-overrides",
        parts=lambda asked: (
            (option("max_model_len"), asked.engine.max_model_len),
            ("max_position_embeddings", asked.model.max_position_embeddings),
        ),
        is_refused=lambda asked: (
            (asked.engine.max_model_len or 0) > asked.model.max_position_embeddings
        ),
    ),
    Rule(
        name="pages",
        requires="the pages, one of which is reserved, hold a request of max_model_len",
        reason="a request that can never finish is not started",
        parts=lambda asked: (
            (option("num_gpu_blocks_override"), asked.engine.num_gpu_blocks_override),
            (option("block_size"), asked.engine.block_size),
            (option("max_model_len"), asked.engine.max_model_len),
            ("pages needed", _pages_of_longest_request(asked.engine)),
        ),
        is_refused=lambda asked: (
            asked.engine.num_gpu_blocks_override is not None
            and asked.engine.num_gpu_blocks_override < _pages_of_longest_request(asked.engine)
        ),
    ),
    _draft_rule(
        "draft-hidden-size",
        "the draft's hidden_size is the target's",
        "a draft works with the hidden states of the model that it was trained on",
        lambda draft, asked: (
            ("the draft's hidden_size", draft.hidden_size),
            ("the target's hidden_size", asked.model.hidden_size),
        ),
        lambda draft, asked: draft.hidden_size != asked.model.hidden_size,
    ),
    _draft_rule(
        "draft-vocabulary",
        "the draft's vocab_size is the target's",
        "it shares the target's embedding and head",
        lambda draft, asked: (
            ("the draft's vocab_size", draft.vocab_size),
            ("the target's vocab_size", asked.model.vocab_size),
        ),
        lambda draft, asked: draft.vocab_size != asked.model.vocab_size,
    ),
    _draft_rule(
        "draft-mask",
        "the draft's mask_token_id is below the target's vocab_size",
        "the target's embedding has a row for it",
        lambda draft, asked: (
            ("the draft's mask_token_id", draft.mask_token_id),
            ("the target's vocab_size", asked.model.vocab_size),
        ),
        lambda draft, asked: not 0 <= draft.mask_token_id < asked.model.vocab_size,
    ),
    _draft_rule(
        "draft-taps",
        "the draft's target_layer_ids are in -1..num_hidden_layers - 1",
        "it reads outputs of those layers; -1 is the embedding",
        lambda draft, asked: (
            ("the draft's target_layer_ids", ",".join(map(str, draft.taps.layers))),
            _num_layers(asked),
        ),
        lambda draft, asked: not ({*draft.taps.layers} <= {*range(-1, asked.model.num_layers)}),
    ),
    _draft_rule(
        "draft-block",
        "k is at most the draft's block length",
        "it was trained to propose that many tokens in one pass",
        lambda draft, asked: (
            (speculation_key("num_speculative_tokens"), _num_speculative_tokens(asked)),
            ("the draft's block length", draft.block_length),
        ),
        lambda draft, asked: (
            draft.block_length is not None and _num_speculative_tokens(asked) > draft.block_length
        ),
    ),
    _synthetic_rule(
        "confidence_schedule",
        "confidence_schedule is off where acceptance is synthetic",
        "confidences say nothing of acceptance that is forced",
        lambda config: config.confidence_schedule is True,
    ),
    _synthetic_rule(
        "watchdog",
        "watchdog is off where acceptance is synthetic",
        "it would judge the draft by acceptance that is forced",
        lambda config: config.watchdog is True,
    ),
    _synthetic_rule(
        "acceptance",
        "acceptance is shared where acceptance is synthetic",
        "it is forced by a schedule, so no other rule decides",
        lambda config: config.acceptance != "shared",
    ),
    Rule(
        name="hosts-stages",
        requires="nnodes is at most pp",
        reason="the ranks of a stage stay on one host, and no host is without a stage",
        parts=lambda asked: ((option("nnodes"), asked.engine.nnodes), _num_stages(asked)),
        is_refused=lambda asked: asked.engine.nnodes > asked.engine.pipeline_parallel_size,
    ),
    Rule(
        name="hosts-rank",
        requires="node_rank is below nnodes",
        reason="hosts are counted from 0",
        parts=lambda asked: (
            (option("node_rank"), asked.engine.node_rank),
            (option("nnodes"), asked.engine.nnodes),
        ),
        is_refused=lambda asked: asked.engine.node_rank >= asked.engine.nnodes,
    ),
    Rule(
        name="hosts-launcher",
        requires="the launcher is local where nnodes is above 1",
        reason="torchrun and Ray say themselves which hosts there are",
        parts=lambda asked: (
            (option("launcher"), asked.engine.launcher),
            (option("nnodes"), asked.engine.nnodes),
        ),
        is_refused=lambda asked: asked.engine.launcher != "local" and asked.engine.nnodes > 1,
    ),
    Rule(
        name="hosts-threads",
        requires="the backend is mp where there are several hosts",
        reason="threads are all in one process",
        parts=lambda asked: (
            (option("distributed_executor_backend"), asked.engine.distributed_executor_backend),
            (option("launcher"), asked.engine.launcher),
            (option("nnodes"), asked.engine.nnodes),
        ),
        is_refused=lambda asked: (
            asked.engine.distributed_executor_backend == "uni"
            and (asked.engine.launcher, asked.engine.nnodes) != ("local", 1)
        ),
    ),
    *QUANTIZATION_RULES,
    Rule(
        name="recover-threads",
        requires="the backend is mp",
        reason="a thread cannot be ended and started anew",
        parts=lambda asked: (
            (option("recover"), asked.engine.recover),
            (option("distributed_executor_backend"), asked.engine.distributed_executor_backend),
        ),
        is_refused=lambda asked: (
            asked.engine.recover and asked.engine.distributed_executor_backend == "uni"
        ),
    ),
    Rule(
        name="device-float64",
        requires="the device is cpu",
        reason="the kernels for GPUs compute in float32; float64 is for proofs",
        parts=lambda asked: (
            (option("device"), asked.engine.device),
            (option("dtype"), asked.engine.dtype),
        ),
        is_refused=lambda asked: (asked.engine.device, asked.engine.dtype) == ("cuda", "float64"),
    ),
    Rule(
        name="capture-sizes",
        requires="one of cudagraph_capture_sizes is at most max_num_seqs",
        reason="no step is as large as the others, so nothing would be captured",
        parts=lambda asked: (
            (
                option("cudagraph_capture_sizes"),
                ",".join(map(str, asked.engine.cudagraph_capture_sizes or ())),
            ),
            (option("max_num_seqs"), asked.engine.max_num_seqs),
        ),
        is_refused=lambda asked: (
            asked.engine.max_num_seqs < min(asked.engine.cudagraph_capture_sizes or (1,))
        ),
    ),
    _cache_rule("cache-interval", "state_checkpoint_interval", "without it no state is kept"),
    _cache_rule("cache-slots", "max_state_checkpoints", "without it no state is kept"),
    _cache_rule("cache-host-tier", "kv_offloading_size", "the host holds what the cache evicts"),
    _cache_rule("cache-verify", "verify_cache", "without it there is no hit to verify"),
)


def check(asked: Combination) -> None:
    """Refuse what cannot be served.

    Raises:
        ConfigError: the message of the first rule that hits.
    """
    for rule in TABLE:
        if rule.is_refused(asked):
            raise ConfigError(rule.message(asked))
