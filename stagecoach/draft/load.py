"""Builds the drafter of one rank of the last stage and fills it from its checkpoint.

Owns the names in a draft's files. The checks are those of the target (`model/weights.py`):
every tensor once, none unused, shapes and types as the config says. Copies of the target's
embedding and head are passed over, as the target's own are used.
"""

import logging
from pathlib import Path

import torch

from stagecoach.config.draft import DraftConfig
from stagecoach.config.engine import ResolvedConfig
from stagecoach.draft.drafter import DSparkDrafter
from stagecoach.draft.model import DraftModel
from stagecoach.model.checkpoint_reader import CheckpointReader, Naming
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.ledger import check_checkpoint
from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.model.weight_formats import WeightFormats
from stagecoach.model.weight_slots import WeightSlot
from stagecoach.model.weights import Progress, fill_dummy, fill_from

logger = logging.getLogger(__name__)

# Published GQA drafts call these parts as Qwen3's DFlash does; either spelling is read.
GQA_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}

DRAFT_NAMING = Naming(
    lambda raw_name: GQA_NAMES.get(raw_name, raw_name),
    {"the target's": ("embed_tokens.", "lm_head.")},
)


def load_drafter(
    config: ResolvedConfig,
    model: StageModel,
    tp: TensorParallel,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> DSparkDrafter:
    """Build and fill the drafter of one rank.

    Args:
        config: has speculation; names the device.
        model: of the last stage on this rank, with taps; its embedding and head are shared.
        dtype: of the parameters; tensors that need it stay at least float32.
        progress: called after every tensor.

    Raises:
        CheckpointError: a tensor is missing, unused, mis-shaped, mistyped or unreadable, or a
            file is missing or cut short; the text names files and tensors.
    """
    speculation = config.speculation
    assert speculation is not None, "no draft to load"
    formats = WeightFormats(fp8=config.draft_quantization.fp8)
    draft = DraftModel(speculation.draft, tp, dtype, config.device, formats)
    if config.dummy_seed is not None:
        fill_dummy(draft.slots, config.dummy_seed, progress)
    else:
        fill_draft(draft, speculation.checkpoint, progress)
    return DSparkDrafter(draft, model.embedding, model.head, speculation.num_speculative_tokens)


def draft_tensors(config: DraftConfig) -> dict[str, WeightSlot]:
    """Every tensor of a whole draft by name, with whole shapes and no memory."""
    draft = DraftModel(config, SingleRank(), torch.float32, device="meta")
    return {slot.name: slot for slot in draft.slots}


def fill_draft(draft: DraftModel, folder: Path, progress: Progress | None = None) -> None:
    """Fill one rank's share of a draft from its folder; errors as of `load_drafter`."""
    reader = CheckpointReader(folder, DRAFT_NAMING)
    check_checkpoint(folder, reader.stored, draft_tensors(draft.config))
    if draft.markov_head is not None:  # the same on every rank
        logger.info("draft %s", reader.summary)
    fill_from(reader, draft.slots, progress)
