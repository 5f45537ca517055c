"""Bytes of the weights of one rank, from the modules that would allocate them.

Owns no formula: the stage's model and the drafter are built on torch's "meta" device, which gives
their tensors shapes and types without memory. Layers of one kind are built once, since stages are
sums of layers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.config.engine import ResolvedConfig
from stagecoach.config.model import Taps
from stagecoach.config.quantization import NamePatterns
from stagecoach.draft.model import DraftModel
from stagecoach.kernels.moe import split_in_bfloat16
from stagecoach.model.checkpoint_reader import INDEX_NAME, CheckpointReader, target_naming
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.weight_formats import WeightFormats, expected_formats, stored_formats
from stagecoach.model.weight_slots import WeightKind
from stagecoach.pipeline.stage import Stage, whole_model
from stagecoach.runner.stage_runner import DTYPES


@dataclass(frozen=True, slots=True)
class Rank:
    """A place among the ranks of a stage, where nothing is exchanged."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Shapes only."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Shapes only."""
        return torch.cat([tensor] * self.size, dim=dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Shapes only."""
        return tensor


class WeightBytes(NamedTuple):
    """Of one rank."""

    parameters: int  # as loaded
    derived: int  # made of them once, and kept beside them

    @property
    def total(self) -> int:
        return self.parameters + self.derived


class Footprints:
    """Weights of the stages of one engine's model, for any partition.

    Args:
        config: its layout is not looked at, apart from the ranks of a stage.
        tp_rank: rank 0 holds most: the heads of a draft are there alone.
    """

    def __init__(self, config: ResolvedConfig, tp_rank: int = 0) -> None:
        self._config = config
        self._rank = Rank(tp_rank, config.engine.tensor_parallel_size)
        self._dtype = DTYPES[config.dtype]
        self._taps = config.speculation.draft.taps if config.speculation else None
        self._formats = _formats(config)
        self._known: dict[tuple[object, ...], WeightBytes] = {}

    def stage_bytes(self, stage: Stage) -> WeightBytes:
        """Of the target's part of a stage."""
        is_whole = stage.is_first and stage.is_last
        if is_whole and (self._config.model.tie_word_embeddings or stage.num_layers == 1):
            # Embedding and head may be one tensor.
            return self._built(stage, self._taps)
        layers = [self._layer_bytes(stage, layer) for layer in stage.layers]
        return WeightBytes(*(sum(sizes) for sizes in zip(*layers, strict=True)))

    def drafter_bytes(self) -> int:
        """Of the draft on the last stage; 0 without one."""
        speculation = self._config.speculation
        if speculation is None:
            return 0
        formats = WeightFormats(fp8=self._config.draft_quantization.fp8)
        draft = DraftModel(speculation.draft, self._rank, self._dtype, "meta", formats)
        return draft.num_parameter_bytes

    def _layer_bytes(self, stage: Stage, layer: int) -> WeightBytes:
        """Of a layer, with the end of the model that stands beside it."""
        is_first = stage.is_first and layer == stage.start
        is_last = stage.is_last and layer == stage.end - 1
        model = self._config.model
        kinds = (model.layer_kinds[layer], model.is_moe_layer[layer])
        # A copy of the embedding, for a drafter, where it is not there anyway.
        taps = None if stage.is_first else self._taps
        alike = (*kinds, layer in self._formats.packed_layers, is_first, is_last, taps)
        key = (*alike, self._own_choice(layer))
        if key not in self._known:
            # As a stage of this layer alone.
            index = 0 if is_first else 2 if is_last else 1
            self._known[key] = self._built(
                Stage(index=index, num_stages=3, start=layer, end=layer + 1), taps
            )
        return self._known[key]

    def _own_choice(self, layer: int) -> int | None:
        """The layer, where patterns of names may tell it from others of its kind."""
        fp8 = self._formats.fp8
        return None if fp8 is None or fp8 == NamePatterns() else layer

    def _built(self, stage: Stage, taps: Taps | None) -> WeightBytes:
        model = StageModel(
            self._config.model, stage, self._rank, self._dtype, "meta", taps, self._formats
        )
        return WeightBytes(model.num_parameter_bytes, self._derived_bytes(model))

    def _derived_bytes(self, model: StageModel) -> int:
        """What `prepare` keeps: parts of routers on a GPU, and products of mixing weights."""
        has_router_parts = self._config.device == "cuda" and self._dtype == torch.bfloat16
        num_bytes = 0
        for slot in model.slots:
            if slot.kind is WeightKind.ROUTER and has_router_parts:
                parts = split_in_bfloat16(torch.empty(slot.shape, device="meta"))
                num_bytes += parts.nbytes
            elif slot.name.endswith("_res_proj.weight"):
                wide = torch.promote_types(self._dtype, torch.float32)
                num_bytes += torch.empty(slot.shape, dtype=wide, device="meta").nbytes
        return num_bytes


def _formats(config: ResolvedConfig) -> WeightFormats:
    """As a worker decides it: by what is stored, or by the config where nothing is."""
    model, folder = config.model, config.checkpoint
    whole = whole_model(model.num_layers)
    # The index alone names all tensors.
    has_names = (folder / INDEX_NAME).is_file() or any(folder.glob("*.safetensors"))
    is_stored = config.dummy_seed is None and has_names
    if not is_stored or not config.quantization.keeps_packed:
        return expected_formats(model, config.quantization, whole)
    naming = target_naming(has_tied_head=model.tie_word_embeddings, num_layers=model.num_layers)
    reader = CheckpointReader(folder, naming)
    return stored_formats(model, config.quantization, whole, reader.stored)
