"""Layer groups: runs of layers that fit the memory together, none across a stage's end.

Owns how a model is cut into them and what each takes, by the code that allocates it. Reads headers
and no weight.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

from stagecoach.config.model import ModelConfig, Taps
from stagecoach.config.quantization import QuantizationChoice
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.weight_formats import WeightFormats, stored_formats
from stagecoach.pipeline.stage import Stage, make_stages

# Packed experts are computed from as they are, which takes the least memory.
_FORMATS = QuantizationChoice(keeps_packed=True)


class LayerGroup(NamedTuple):
    """Layers that are loaded together.

    Attributes:
        layers: as one of the ranges that all groups cut the model into; the first group has the
            embedding, the last the head.
        stage: the pipeline stage that they are a part of.
        num_bytes: of their weights.
    """

    layers: Stage
    stage: Stage
    num_bytes: int

    @property
    def name(self) -> str:
        first, last = self.layers.start, self.layers.end - 1
        return f"layer {first}" if first == last else f"layers {first} to {last}"


class Architecture(NamedTuple):
    """What layers are made from.

    Attributes:
        stored: names of the checkpoint's tensors: they say which experts are packed.
    """

    config: ModelConfig
    dtype: torch.dtype
    taps: Taps | None
    stored: Container[str]

    def build(self, layers: Stage, device: str = "cpu") -> StageModel:
        """Fresh layers, whole, without a split over ranks."""
        formats: WeightFormats = stored_formats(self.config, _FORMATS, layers, self.stored)
        return StageModel(self.config, layers, SingleRank(), self.dtype, device, self.taps, formats)


def make_groups(
    architecture: Architecture, partition: Sequence[int], most_bytes: int
) -> list[LayerGroup]:
    """As few groups as keep within `most_bytes`; a layer that is larger is a group of its own."""
    stages = make_stages(partition)
    single = make_stages([1] * architecture.config.num_layers)
    sizes = [architecture.build(layer, "meta").num_parameter_bytes for layer in single]
    counts: list[int] = []
    group_bytes: list[int] = []
    group_stages: list[Stage] = []
    for stage in stages:
        for layer in stage.layers:
            is_new = layer == stage.start or group_bytes[-1] + sizes[layer] > most_bytes
            if is_new:
                counts.append(0)
                group_bytes.append(0)
                group_stages.append(stage)
            counts[-1] += 1
            group_bytes[-1] += sizes[layer]
    return [
        LayerGroup(layers, stage, num_bytes)
        for layers, stage, num_bytes in zip(
            make_stages(counts), group_stages, group_bytes, strict=True
        )
    ]
