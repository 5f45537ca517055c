"""What a run leaves: one JSON file a part, with machine, versions and commit.

`bench/h200/summary.py` makes the tables and `summary.json` of them.
"""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.report import commit_name

_PACKAGES = ("torch", "triton", "stagecoach")


def environment() -> dict[str, Any]:
    """The machine and the code that is measured."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "commit": commit_name(),
        "gpus": devices,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
    }


def write_part(folder: Path, name: str, results: dict[str, Any]) -> None:
    """Write `<folder>/<name>.json`: the results beside their environment."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": environment(), "results": results}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def read_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """All parts of a folder by name."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
        if path.stem != "summary"
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"
