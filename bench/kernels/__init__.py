"""Kernels on a GPU: each compared with its reference, and timed against the machine's limits.

They need torch, triton and numpy only. Where the engine's other dependencies are not installed,
the package's own `__init__` would fail on them; then the name stands for its folder alone.
"""

import importlib.util
import sys
import types
from pathlib import Path

if "stagecoach" not in sys.modules and any(
    importlib.util.find_spec(name) is None
    for name in ("msgspec", "zmq", "tokenizers", "llguidance")
):
    _package = types.ModuleType("stagecoach")
    _package.__path__ = [str(Path(__file__).parents[2] / "stagecoach")]
    sys.modules["stagecoach"] = _package
