"""The load ledger: what a model needs, what a checkpoint holds, what was loaded.

Two accounts. Of the whole checkpoint: every tensor of the model is there once, and every
tensor that is there belongs to the model. Of one rank: every slot was filled exactly once.
Knows names only.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from stagecoach.config.model import ModelConfig
from stagecoach.config.quantization import NamePatterns
from stagecoach.errors import CheckpointError
from stagecoach.model.checkpoint_reader import name_list
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.weight_formats import packed_names
from stagecoach.model.weight_slots import WeightKind, WeightSlot
from stagecoach.pipeline.stage import whole_model


def model_tensors(config: ModelConfig) -> dict[str, WeightSlot]:
    """Every tensor of the whole model by published name, with whole shapes and no memory."""
    model = StageModel(
        config, whole_model(config.num_layers), SingleRank(), torch.float32, device="meta"
    )
    return {slot.name: slot for slot in model.slots}


def check_patterns(patterns: NamePatterns, needed: Mapping[str, WeightSlot]) -> None:
    """Compare what is to be quantised with what a model has.

    Args:
        needed: as of `model_tensors`.

    Raises:
        ConfigError: as `NamePatterns.check` has it.
    """
    patterns.check(needed, (name for name, slot in needed.items() if slot.can_become_fp8))


def check_checkpoint(folder: Path, stored: Iterable[str], needed: Mapping[str, WeightSlot]) -> None:
    """Compare what a checkpoint holds with what the model needs.

    Raises:
        CheckpointError: lists the missing and the unused names (first 20 of each and the count).
    """
    unclaimed = set(stored)
    missing = []
    for name, slot in needed.items():
        stored_as = [name]
        if slot.kind is WeightKind.EXPERT and name not in unclaimed:
            codes, scales = packed_names(name)
            # A half of the pair alone says that the tensor was meant to be packed.
            if codes in unclaimed or scales in unclaimed:
                stored_as = [codes, scales]
        missing += [part for part in stored_as if part not in unclaimed]
        unclaimed.difference_update(stored_as)
    complaints = []
    if missing:
        complaints.append(f"tensors missing from the checkpoint: {name_list(missing)}")
    if unclaimed:
        complaints.append(f"tensors that the model does not use: {name_list(unclaimed)}")
    if complaints:
        raise CheckpointError(f"{folder}: " + "; ".join(complaints))


class LoadLedger:
    """Counts how often each slot of one rank was filled."""

    def __init__(self, slots: list[WeightSlot]) -> None:
        self._fills: Counter[str] = Counter({slot.name: 0 for slot in slots})
        assert len(self._fills) == len(slots), "two slots of one name"

    def fill(self, slot: WeightSlot) -> None:
        self._fills[slot.name] += 1

    def close(self) -> None:
        """Every slot was filled once.

        Raises:
            CheckpointError: lists the slots that were not.
        """
        wrong = [f"{name} ({fills} times)" for name, fills in self._fills.items() if fills != 1]
        if wrong:
            raise CheckpointError(f"parameters not loaded exactly once: {name_list(wrong)}")
