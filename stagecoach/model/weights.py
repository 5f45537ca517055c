"""Fills the slots of one rank's model from a checkpoint, each exactly once.

Owns the order of the load and what is told of it; drafts are filled by it too. Reads only the
tensors, and of them only the parts, that this rank needs; what the whole checkpoint holds is
compared with the whole model by name first, and what this rank needs by shape and type, so that a
wrong checkpoint fails before a tensor is read.
"""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from stagecoach.config.model import ModelConfig, Taps
from stagecoach.config.quantization import NO_QUANTIZATION, QuantizationChoice
from stagecoach.kernels.quantization import Fp8Weight, Mxfp4Weight
from stagecoach.model.checkpoint_reader import CheckpointReader, target_naming
from stagecoach.model.dummy_weights import fill_slot
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.ledger import LoadLedger, check_checkpoint, check_patterns, model_tensors
from stagecoach.model.parallel_linear import TensorParallel
from stagecoach.model.read_ahead import read_ahead
from stagecoach.model.slot_reads import HostPlacement, check_slot, pieces, write
from stagecoach.model.weight_formats import expected_formats, stored_formats
from stagecoach.model.weight_slots import Target, WeightSlot
from stagecoach.model.weight_upload import PIECE_BYTES, WeightUpload
from stagecoach.observe.transfer_rate import TransferRate
from stagecoach.pipeline.stage import Stage

logger = logging.getLogger(__name__)


class LoadProgress(NamedTuple):
    """State of a load after one more piece of a tensor."""

    tensor: str
    num_loaded: int
    num_tensors: int
    num_bytes: int  # of parameters filled so far
    total_bytes: int  # of all parameters of this rank


Progress = Callable[[LoadProgress], None]

_LOG_SECONDS = 10


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
    quantization: QuantizationChoice = NO_QUANTIZATION,
) -> StageModel:
    """Build and fill one rank's model.

    Args:
        folder: checkpoint folder; not touched for dummy weights.
        dtype: of the parameters; tensors that need it stay at least float32.
        dummy_seed: draw random weights from this seed; None reads the checkpoint.
        progress: called after every piece of a tensor.
        taps: of a drafter; None without one.
        device: where the parameters live.
        quantization: which weights stay packed or become E4M3.

    Raises:
        CheckpointError: a tensor is missing, unused, mis-shaped, mistyped or unreadable, or a
            file is missing or cut short; the text names files and tensors.
        ConfigError: a pattern of what is quantised matches no tensor.
    """
    if dummy_seed is not None:
        if quantization.fp8 is not None:
            check_patterns(quantization.fp8, model_tensors(config))
        formats = expected_formats(config, quantization, stage)
        model = StageModel(config, stage, tp, dtype, str(device), taps, formats)
        fill_dummy(model.slots, dummy_seed, progress)
    else:
        naming = target_naming(
            has_tied_head=config.tie_word_embeddings, num_layers=config.num_layers
        )
        reader = CheckpointReader(folder, naming)
        needed = model_tensors(config)
        check_checkpoint(folder, reader.stored, needed)
        if quantization.fp8 is not None:
            check_patterns(quantization.fp8, needed)
        formats = stored_formats(config, quantization, stage, reader.stored)
        model = StageModel(config, stage, tp, dtype, str(device), taps, formats)
        if stage.is_first and tp.rank == 0:  # the same on every rank
            logger.info("%s", reader.summary)
        fill_from(reader, model.slots, progress)
    model.prepare()
    if tp.rank == 0:
        log_formats(model.slots)
    return model


def log_formats(slots: list[WeightSlot]) -> None:
    """Say what stays quantised, if anything does."""
    for kind, what in ((Mxfp4Weight, "MXFP4, as stored"), (Fp8Weight, "E4M3, quantised now")):
        targets = [slot.target for slot in slots if isinstance(slot.target, kind)]
        if targets:
            num_bytes = sum(target.nbytes for target in targets)
            logger.info("%d tensors are %s: %.3g GB", len(targets), what, num_bytes / 1e9)


def fill_dummy(slots: list[WeightSlot], seed: int, progress: Progress | None) -> None:
    """Fill slots with random values that depend on nothing but the seed and their names."""
    account = _Account(slots, progress)
    for slot in slots:
        fill_slot(slot, seed)
        account.add(slot, slot.target.nbytes, is_last=True)
    account.close()


def fill_from(reader: CheckpointReader, slots: list[WeightSlot], progress: Progress | None) -> None:
    """Fill slots from a checkpoint that `check_checkpoint` has passed.

    Files are read by several threads in the order of their bytes. On a CPU these read and copy to
    where a weight stays; all else that is done with what was read is this thread's.

    Raises:
        CheckpointError: a tensor is mis-shaped, mistyped or unreadable.
    """
    stored = {slot.name: check_slot(reader, slot) for slot in slots}
    ordered = sorted(slots, key=lambda slot: (stored[slot.name].path, stored[slot.name].start))
    jobs = (job for slot in ordered for job in pieces(reader, slot, stored[slot.name], PIECE_BYTES))
    account = _Account(slots, progress)
    device = _device(slots[0].target)
    upload = WeightUpload(device)
    placement = HostPlacement(reader) if device.type == "cpu" else None
    rate = TransferRate()
    told = began = time.monotonic()
    with closing(read_ahead(reader, jobs, upload, placement=placement)) as reads:
        for piece, tensors, buffer in reads:
            if tensors:
                with upload.bring(tensors, buffer) as parts:
                    write(piece, parts)
            account.add(piece.slot, piece.num_bytes, is_last=piece.is_last)
            now = time.monotonic()
            if now - told >= _LOG_SECONDS:
                told = now
                logger.info("weights: %s", rate.describe(account.num_bytes, account.total_bytes))
    upload.finish()
    account.close()
    seconds = time.monotonic() - began
    num_bytes = account.total_bytes
    logger.info(
        "%.2f GB of weights in %.2f s (%.2f GB/s)",
        num_bytes / 1e9,
        seconds,
        num_bytes / 1e9 / max(seconds, 1e-9),
    )


class _Account:
    """What is filled so far, told and counted."""

    def __init__(self, slots: list[WeightSlot], progress: Progress | None) -> None:
        self._ledger = LoadLedger(slots)
        self._progress = progress
        self._num_loaded = 0
        self._num_tensors = len(slots)
        self.num_bytes = 0
        self.total_bytes = sum(slot.target.nbytes for slot in slots)

    def add(self, slot: WeightSlot, num_bytes: int, *, is_last: bool) -> None:
        """So many bytes of a slot's target are filled, with `is_last` the rest of them."""
        self.num_bytes += num_bytes
        if is_last:
            self._num_loaded += 1
            self._ledger.fill(slot)
        if self._progress is not None:
            self._progress(
                LoadProgress(
                    slot.name,
                    self._num_loaded,
                    self._num_tensors,
                    self.num_bytes,
                    self.total_bytes,
                )
            )

    def close(self) -> None:
        """Raises CheckpointError if a slot was not filled exactly once."""
        self._ledger.close()
        assert self.num_bytes == self.total_bytes, f"{self.num_bytes} of {self.total_bytes} bytes"


def _device(target: Target) -> torch.device:
    return target.device if isinstance(target, torch.Tensor) else target[0].device
