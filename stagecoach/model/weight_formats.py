"""Which matrices of a model stay quantised on a rank, by their published names.

Owns the way from a choice and from what a checkpoint holds to these names. Knows no bytes.
"""

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass

from stagecoach.config.model import ModelConfig
from stagecoach.config.quantization import NamePatterns, QuantizationChoice
from stagecoach.pipeline.stage import Stage

logger = logging.getLogger(__name__)

PACKED, SCALE = "weight_packed", "weight_scale"
_EXPERT_PARTS = ("w1", "w2", "w3")


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """By default every matrix is of the activations' type."""

    packed_layers: frozenset[int] = frozenset()  # whose routed experts stay MXFP4
    fp8: NamePatterns | None = None  # of matrices that become E4M3


PLAIN = WeightFormats()


def packed_names(name: str) -> tuple[str, str]:
    """Names under which `<module>.weight` is stored when packed: codes and scales."""
    stem = name.removesuffix("weight")
    return stem + PACKED, stem + SCALE


def expected_formats(
    config: ModelConfig, choice: QuantizationChoice, stage: Stage
) -> WeightFormats:
    """Where nothing is read: what the config says is packed is packed in every layer."""
    return _formats(config, choice, stage, lambda layer: config.has_packed_experts)


def stored_formats(
    config: ModelConfig, choice: QuantizationChoice, stage: Stage, stored: Container[str]
) -> WeightFormats:
    """What a checkpoint of these tensors allows.

    A layer stays packed where all its routed experts are stored so. One that mixes is decoded as a
    whole, which the log tells.
    """
    return _formats(config, choice, stage, lambda layer: _is_packed(config, layer, stored))


def _formats(
    config: ModelConfig,
    choice: QuantizationChoice,
    stage: Stage,
    is_packed: Callable[[int], bool],
) -> WeightFormats:
    packed_layers = frozenset(
        layer
        for layer in stage.layers
        if choice.keeps_packed and config.is_moe_layer[layer] and is_packed(layer)
    )
    return WeightFormats(packed_layers, choice.fp8)


def _is_packed(config: ModelConfig, layer: int, stored: Container[str]) -> bool:
    assert config.moe is not None, "a MoE layer needs its configuration"
    names = [
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
        for expert in range(config.moe.num_experts)
        for part in _EXPERT_PARTS
    ]
    plain = [name for name in names if packed_names(name)[0] not in stored]
    if plain and len(plain) < len(names):
        logger.warning(
            "layer %d: some experts are packed and some are not (%s); all are decoded",
            layer,
            plain[0],
        )
    return not plain
