"""What is refused, and why: the one table of combinations.

Owns every rule that joins two options, or an option and a fact of the model. Ranges of single
options are config.py's, values of config.json that no code implements are model_config.py's.
The table is evaluated before a process starts or a weight is read; the support table, which
`stagecoach support` prints, and the tests are made from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.config import EngineConfig, option
from stagecoach.errors import ConfigError
from stagecoach.model_config import LayerKind, ModelConfig

# Name and value of everything that a rule joins, as the caller spells it.
Parts = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One refused combination."""

    name: str
    features: tuple[str, ...]  # of FEATURES, limited by this rule
    axes: frozenset[str]  # of "pp" and "tp": it can hit only when all of them are above 1
    requires: str  # what must hold, as words that follow "if" or "unless"
    reason: str
    parts: Callable[[EngineConfig, ModelConfig], Parts]
    is_refused: Callable[[EngineConfig, ModelConfig], bool]

    def message(self, engine: EngineConfig, model: ModelConfig) -> str:
        joined = " and ".join(f"{name}={value}" for name, value in self.parts(engine, model))
        return f"{joined}: refused unless {self.requires} ({self.reason})"


class SupportRow(NamedTuple):
    """One line of the support table; a cell is "yes" or what must hold."""

    feature: str
    cells: tuple[str, ...]  # one a layout


FEATURES = (
    "Kimi-K3",
    "Kimi-Linear",
    "KDA",
    "MLA",
    "MoE",
    "dense MLP",
    "attention residuals",
    "vocabulary split",
    "float32, bfloat16, float64",
    "MXFP4 experts",
    "chunked prefill",
    "continuous batching",
    "preemption",
    "abort",
    "sampling parameters",
    "logprobs, prompt logprobs",
)

LAYOUTS = (
    ("pp 1, tp 1", frozenset[str]()),
    ("pp > 1", frozenset({"pp"})),
    ("tp > 1", frozenset({"tp"})),
    ("pp > 1, tp > 1", frozenset({"pp", "tp"})),
)

_TP = "tensor_parallel_size"
_PP = "pipeline_parallel_size"


def _divides(
    name: str,
    feature: str,
    key: str,
    what: str,
    reason: str,
    size: Callable[[ModelConfig], int],
) -> Rule:
    """tensor_parallel_size must divide a size; 0 stands for a part that the model lacks."""
    return Rule(
        name=name,
        features=(feature,),
        axes=frozenset({"tp"}),
        requires=f"tp divides {what}",
        reason=reason,
        parts=lambda engine, model: (
            (option(_TP), engine.tensor_parallel_size),
            (key, size(model)),
        ),
        is_refused=lambda engine, model: size(model) % engine.tensor_parallel_size != 0,
    )


def _partition_rule(
    name: str,
    requires: str,
    reason: str,
    fact: Callable[[EngineConfig, ModelConfig], tuple[str, object]],
    is_refused: Callable[[tuple[int, ...], EngineConfig, ModelConfig], bool],
) -> Rule:
    """A rule about pp_partition, which holds without one."""
    return Rule(
        name=name,
        features=(),
        axes=frozenset(),
        requires=requires,
        reason=reason,
        parts=lambda engine, model: (
            (option("pp_partition"), ",".join(map(str, engine.pp_partition or ()))),
            fact(engine, model),
        ),
        is_refused=lambda engine, model: (
            engine.pp_partition is not None and is_refused(engine.pp_partition, engine, model)
        ),
    )


def _num_stages(engine: EngineConfig, model: ModelConfig) -> tuple[str, object]:
    return option(_PP), engine.pipeline_parallel_size


def _num_layers(engine: EngineConfig, model: ModelConfig) -> tuple[str, object]:
    return "num_hidden_layers", model.num_layers


def _pages_of_longest_request(engine: EngineConfig) -> int:
    """0 where no length was asked for: then requests that do not fit are refused one by one."""
    if engine.max_model_len is None:
        return 0
    return NUM_RESERVED_PAGES + -(-engine.max_model_len // engine.block_size)


TABLE: tuple[Rule, ...] = (
    _divides(
        "kda-heads",
        "KDA",
        "linear_attn_config.num_heads",
        "the KDA heads",
        "a rank holds whole heads and their state",
        lambda model: model.kda.num_heads if LayerKind.KDA in model.layer_kinds else 0,
    ),
    _divides(
        "mla-heads",
        "MLA",
        "num_attention_heads",
        "the MLA heads",
        "a rank holds whole heads",
        lambda model: model.mla.num_heads if LayerKind.MLA in model.layer_kinds else 0,
    ),
    _divides(
        "dense-width",
        "dense MLP",
        "intermediate_size",
        "the width of the dense MLP",
        "ranks hold equal parts of it",
        lambda model: 0 if all(model.is_moe_layer) else model.dense_intermediate_size,
    ),
    _divides(
        "expert-width",
        "MoE",
        "moe_intermediate_size",
        "the width of an expert",
        "ranks hold equal parts of each; shared experts are a multiple of it",
        lambda model: model.moe.intermediate_size if model.moe and any(model.is_moe_layer) else 0,
    ),
    Rule(
        name="stages",
        features=("Kimi-K3", "Kimi-Linear"),
        axes=frozenset({"pp"}),
        requires="pp is at most the number of layers",
        reason="a stage holds at least one layer",
        parts=lambda engine, model: (_num_stages(engine, model), _num_layers(engine, model)),
        is_refused=lambda engine, model: engine.pipeline_parallel_size > model.num_layers,
    ),
    _partition_rule(
        "partition-length",
        "pp_partition has one number for every stage",
        "a stage holds the layers that its number says",
        _num_stages,
        lambda partition, engine, model: len(partition) != engine.pipeline_parallel_size,
    ),
    _partition_rule(
        "partition-empty-stage",
        "every number of pp_partition is at least 1",
        "a stage holds at least one layer",
        _num_stages,
        lambda partition, engine, model: min(partition) < 1,
    ),
    _partition_rule(
        "partition-sum",
        "pp_partition adds up to num_hidden_layers",
        "each layer belongs to one stage",
        _num_layers,
        lambda partition, engine, model: sum(partition) != model.num_layers,
    ),
    Rule(
        name="model-length",
        features=(),
        axes=frozenset(),
        requires="max_model_len is at most max_position_embeddings",
        reason="the model never saw longer texts; to insist, raise its key with --hf-overrides",
        parts=lambda engine, model: (
            (option("max_model_len"), engine.max_model_len),
            ("max_position_embeddings", model.max_position_embeddings),
        ),
        is_refused=lambda engine, model: (
            (engine.max_model_len or 0) > model.max_position_embeddings
        ),
    ),
    Rule(
        name="pages",
        features=(),
        axes=frozenset(),
        requires="the pages, one of which is reserved, hold a request of max_model_len",
        reason="a request that can never finish is not started",
        parts=lambda engine, model: (
            (option("num_gpu_blocks_override"), engine.num_gpu_blocks_override),
            (option("block_size"), engine.block_size),
            (option("max_model_len"), engine.max_model_len),
            ("pages needed", _pages_of_longest_request(engine)),
        ),
        is_refused=lambda engine, model: (
            engine.num_gpu_blocks_override is not None
            and engine.num_gpu_blocks_override < _pages_of_longest_request(engine)
        ),
    ),
)


def check(engine: EngineConfig, model: ModelConfig) -> None:
    """Refuse what cannot be served.

    Raises:
        ConfigError: names the options and model keys of the first rule that hits, with their
            values, what must hold, and why.
    """
    for rule in TABLE:
        if rule.is_refused(engine, model):
            raise ConfigError(rule.message(engine, model))


def support_table() -> tuple[SupportRow, ...]:
    """Each feature in each layout: "yes", or the conditions of the rules that limit it."""
    return tuple(
        SupportRow(feature, tuple(_cell(feature, above_one) for _, above_one in LAYOUTS))
        for feature in FEATURES
    )


def _cell(feature: str, above_one: frozenset[str]) -> str:
    limits = [
        rule.requires
        for rule in TABLE
        if feature in rule.features and rule.axes and rule.axes <= above_one
    ]
    return "; ".join(limits) or "yes"


def render_markdown() -> str:
    """The support table, then the refused combinations, as two Markdown tables."""
    layouts = [layout for layout, _ in LAYOUTS]
    support = [(row.feature, *_with_notes(row.cells)) for row in support_table()]
    refused = [(f"`{rule.name}`", rule.requires, rule.reason) for rule in TABLE]
    return (
        _markdown(["", *layouts], support)
        + "\nRefused before anything starts:\n\n"
        + _markdown(["rule", "what must hold", "why"], refused)
    )


def _with_notes(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("yes" if cell == "yes" else f"yes, if {cell}" for cell in cells)


def _markdown(head: list[str], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
