"""A trained draft in the published checkpoint layout: writing it, and reading it back."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.draft.model import Draft

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


def write_checkpoint(draft: Draft, config: dict[str, Any], folder: Path) -> None:
    """Write the config and one bfloat16 file. Embedding and head are the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in draft.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    write_config(config, folder)


def write_config(config: dict[str, Any], folder: Path) -> None:
    """Write `config.json` alone."""
    text = f"{json.dumps(config, indent=2)}\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def read_checkpoint(folder: Path) -> tuple[Draft, dict[str, Any]]:
    """The draft of a checkpoint with float32 weights, and its config."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    draft = Draft(config)
    draft.load_state_dict(load_file(folder / WEIGHTS_FILE))
    return draft, config
