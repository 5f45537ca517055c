"""Forms of kernels that are found without a launch, and compiled by another process."""

from pathlib import Path

import pytest

from tests.compiling_process import run_compiling

pytest.importorskip("triton")
pytestmark = pytest.mark.cpu


def test_a_form_is_found_then_compiled_then_on_disk(tmp_path: Path) -> None:
    told = run_compiling(
        "-m",
        "tests.cpu.kernels.compiled_ahead",
        OMP_NUM_THREADS="1",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert "found 2" in told.stdout
