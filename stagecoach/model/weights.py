"""Fills the slots of one rank's model from a checkpoint, each exactly once.

Owns the order of the load and the checks of shape and dtype; drafts are filled by it too. Reads
only the tensors, and of them only the parts, that this rank needs; what the whole checkpoint
holds is compared with the whole model by name first, so that a wrong checkpoint fails before a
tensor is read.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.model.checkpoint_reader import CheckpointReader, target_naming
from stagecoach.model.dummy_weights import fill_slot
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.ledger import (
    LoadLedger,
    check_checkpoint,
    model_tensors,
    packed_names,
)
from stagecoach.model.parallel_linear import TensorParallel
from stagecoach.model.quantization import GROUP_SIZE, unpack_mxfp4
from stagecoach.model.weight_slots import WeightKind, WeightSlot
from stagecoach.model.weight_upload import WeightUpload
from stagecoach.model_config import ModelConfig, Taps
from stagecoach.pipeline.stage import Stage

logger = logging.getLogger(__name__)


class LoadProgress(NamedTuple):
    """State of a load after one more tensor."""

    tensor: str
    num_loaded: int
    num_tensors: int
    num_bytes: int  # of parameters filled so far
    total_bytes: int  # of all parameters of this rank


Progress = Callable[[LoadProgress], None]

# Types, as safetensors spells them, in which unpacked weights may be stored.
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def load_stage(  # noqa: PLR0913 (what one rank is, and where it comes from)
    folder: Path,
    config: ModelConfig,
    stage: Stage,
    tp: TensorParallel,
    dtype: torch.dtype,
    dummy_seed: int | None = None,
    progress: Progress | None = None,
    taps: Taps | None = None,
    device: str | torch.device = "cpu",
) -> StageModel:
    """Build and fill one rank's model.

    Args:
        folder: checkpoint folder; not touched for dummy weights.
        dtype: of the parameters; tensors that need it stay at least float32.
        dummy_seed: draw random weights from this seed; None reads the checkpoint.
        progress: called after every tensor.
        taps: of a drafter; None without one.
        device: where the parameters live.

    Raises:
        CheckpointError: a tensor is missing, unused, mis-shaped, mistyped or unreadable, or a
            file is missing or cut short; the text names files and tensors.
    """
    model = StageModel(config, stage, tp, dtype, str(device), taps)
    if dummy_seed is not None:
        fill_dummy(model.slots, dummy_seed, progress)
    else:
        naming = target_naming(has_tied_head=config.tie_word_embeddings)
        reader = CheckpointReader(folder, naming)
        check_checkpoint(folder, reader.stored, model_tensors(config))
        if stage.is_first and tp.rank == 0:  # the same on every rank
            logger.info("%s", reader.summary)
        fill_from(reader, model.slots, progress)
    model.prepare()
    return model


def fill_dummy(slots: list[WeightSlot], seed: int, progress: Progress | None) -> None:
    """Fill slots with random values that depend on nothing but the seed and their names."""

    def fill(slot: WeightSlot) -> None:
        fill_slot(slot, seed)

    _fill_each(slots, fill, progress)


def fill_from(reader: CheckpointReader, slots: list[WeightSlot], progress: Progress | None) -> None:
    """Fill slots from a checkpoint that `check_checkpoint` has passed.

    Raises:
        CheckpointError: a tensor is mis-shaped, mistyped or unreadable.
    """
    fill = _CheckpointFiller(reader)
    _fill_each(sorted(slots, key=fill.file_order), fill, progress)
    fill.finish()


def _fill_each(
    slots: list[WeightSlot], fill: Callable[[WeightSlot], None], progress: Progress | None
) -> None:
    ledger = LoadLedger(slots)
    num_bytes = 0
    total_bytes = sum(slot.target.nbytes for slot in slots)
    for count, slot in enumerate(slots, start=1):
        fill(slot)
        ledger.fill(slot)
        num_bytes += slot.target.nbytes
        if progress is not None:
            progress(LoadProgress(slot.name, count, len(slots), num_bytes, total_bytes))
    ledger.close()


class _CheckpointFiller:
    """Copies a slot's region of a stored tensor into its target."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._upload = WeightUpload()

    def finish(self) -> None:
        """Wait for copies on their way to a GPU."""
        self._upload.finish()

    def file_order(self, slot: WeightSlot) -> str:
        """Slots sorted by this open each shard once."""
        name = slot.name if slot.name in self._reader.stored else packed_names(slot.name)[0]
        return str(self._reader.stored[name].path)

    def __call__(self, slot: WeightSlot) -> None:
        if slot.name not in self._reader.stored:
            part = self._read_packed(slot)
        elif slot.kind in (WeightKind.DECAY, WeightKind.DECAY_BIAS):
            part = self._read_vector(slot)
        else:
            self._check(slot.name, slot.shape)
            part = self._reader.read(slot.name, slot.region)
        self._upload.copy(slot.target, part)

    def _read_vector(self, slot: WeightSlot) -> Tensor:
        """A vector stored with axes of length one around it; A_log may be padded at its end."""
        shape, _ = self._check(slot.name, None)
        vector = self._reader.read(slot.name, ()).flatten()
        (size,) = slot.shape
        is_padded = slot.kind is WeightKind.DECAY and len(vector) > size
        if max(shape) != len(vector) or (len(vector) != size and not is_padded):
            raise self._reader.error(slot.name, f"has shape {list(shape)}, not [{size}]")
        return vector[:size][slot.region]

    def _read_packed(self, slot: WeightSlot) -> Tensor:
        """Decode the groups that cover the region, then cut to it."""
        codes, scales = packed_names(slot.name)
        num_rows, num_columns = slot.shape
        if num_columns % GROUP_SIZE:
            raise self._reader.error(
                codes, f"packs {num_columns} columns, not a multiple of {GROUP_SIZE}"
            )
        self._check(codes, (num_rows, num_columns // 2), "U8")
        self._check(scales, (num_rows, num_columns // GROUP_SIZE), "U8")
        rows, columns = slot.region
        first, last = columns.start // GROUP_SIZE, -(-columns.stop // GROUP_SIZE)
        per_group = GROUP_SIZE // 2
        weight = unpack_mxfp4(
            self._reader.read(codes, (rows, slice(first * per_group, last * per_group))),
            self._reader.read(scales, (rows, slice(first, last))),
            slot.target.dtype,
        )
        offset = first * GROUP_SIZE
        return weight[:, columns.start - offset : columns.stop - offset]

    def _check(
        self, name: str, expected_shape: tuple[int, ...] | None, expected_dtype: str | None = None
    ) -> tuple[tuple[int, ...], str]:
        shape, dtype = self._reader.shape_and_dtype(name)
        if expected_shape is not None and shape != expected_shape:
            raise self._reader.error(name, f"has shape {list(shape)}, not {list(expected_shape)}")
        if expected_dtype is None and dtype not in _FLOAT_DTYPES:
            raise self._reader.error(
                name, f"has dtype {dtype}, not one of {', '.join(_FLOAT_DTYPES)}"
            )
        if expected_dtype is not None and dtype != expected_dtype:
            raise self._reader.error(name, f"has dtype {dtype}, not {expected_dtype}")
        return shape, dtype
