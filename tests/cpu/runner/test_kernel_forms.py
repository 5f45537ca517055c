"""No step of requests launches a form of a Triton kernel that the rehearsal has not launched."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_rehearsal_meets_every_form(dtype: str, mode: str) -> None:
    """In a process of its own: this one's Triton interprets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.cpu.runner.launch_keys", dtype, mode],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    # Kernels of every operator were launched.
    for name in ("conv", "chunk_scan", "chunk_saves", "prefill", "attend_pieces", "rms_norm"):
        assert f"{name}_kernel" in result.stdout
    for name in ("sort_pairs", "route", "head_product", "markov_bias"):
        assert f"{name}_kernel" in result.stdout
    # Of windows alone.
    assert ("count_accepted_kernel" in result.stdout) == (mode == "eager")
