"""Forms of kernels that are found without a launch, and compiled by another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.cpu


def test_a_form_is_found_then_compiled_then_on_disk(tmp_path: Path) -> None:
    """In a process of its own: this one's Triton interprets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.cpu.kernels.compiled_ahead"],
        env=environment | {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "found 2" in result.stdout
