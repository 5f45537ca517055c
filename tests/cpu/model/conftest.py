"""Small checkpoints that the model tests share, each written once a session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stagecoach.model.tiny import TinyShape, kimi_k3_config, write_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def k3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default tiny Kimi-K3: 9 layers, blocks of 4, packed experts, several shards."""
    folder = tmp_path_factory.mktemp("kimi_k3")
    write_tiny_model(folder, kimi_k3_config(TinyShape()), seed=1, max_shard_bytes=200_000)
    return folder


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """Writes a random model of a config to a fresh folder."""

    def write(config: dict[str, Any], seed: int = 2) -> Path:
        folder = tmp_path_factory.mktemp("model")
        write_tiny_model(folder, config, seed)
        return folder

    return write
