"""No step of requests launches a form of a Triton kernel that the rehearsal has not launched."""

import pytest

from tests.compiling_process import run_compiling

pytest.importorskip("triton")
pytestmark = pytest.mark.cpu


def run_script(name: str, *arguments: str) -> str:
    """Output of a script of this folder."""
    module = f"tests.cpu.runner.{name}"
    return run_compiling("-m", module, *arguments, OMP_NUM_THREADS="1").stdout


@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_rehearsal_meets_every_form(dtype: str, mode: str) -> None:
    output = run_script("launch_keys", dtype, mode)
    # Kernels of every operator were launched.
    for name in ("conv", "chunk_scan", "chunk_saves", "prefill", "attend_pieces", "rms_norm"):
        assert f"{name}_kernel" in output
    for name in ("sort_pairs", "route", "head_product", "markov_bias"):
        assert f"{name}_kernel" in output
    # Of windows alone.
    assert ("count_accepted_kernel" in output) == (mode == "eager")


def test_the_rehearsal_meets_every_form_of_quantised_weights() -> None:
    output = run_script("launch_keys", "bfloat16", "eager", "quantised")
    for name in ("multiply_few", "product_mxfp4_kernel", "fp8_linear", "multiply_fp8", "quantize"):
        assert name in output


def test_another_process_would_compile_the_same_forms() -> None:
    """Every form reaches it whole: Triton's key of what it is told is that of the launch."""
    num_forms, _, _, num_kernels, _ = run_script("told_forms").split()
    assert int(num_forms) > 60 and int(num_kernels) > 20
