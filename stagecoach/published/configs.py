"""Configs of published models and drafts, by name: facts of their architecture, no weights.

Owns the names. A folder of one holds a `config.json` and nothing else, so what needs no weights
(planning, sparse checkpoints) takes it where it takes a checkpoint's. Reads no weights.
"""

from pathlib import Path
from typing import Any

from stagecoach.json_file import read_json_object

_FOLDER = Path(__file__).parent
MODELS = ("kimi-k3", "kimi-linear-48b")
DRAFTS = ("kimi-k3-dspark", "kimi-k3-dspark-gqa")


def published_folder(name: str) -> Path:
    """The folder with the config of a name in MODELS or DRAFTS."""
    assert name in (*MODELS, *DRAFTS), f"no published config is called {name}"
    return _FOLDER / name


def published_config(name: str) -> dict[str, Any]:
    """The parsed `config.json` of a name in MODELS or DRAFTS."""
    return read_json_object(published_folder(name) / "config.json")
