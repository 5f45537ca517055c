"""The chunked KDA kernels of devices: interpreted against the reference, compiled for Hopper."""

import pytest
import torch

from tests.compiling_process import run_compiling

triton = pytest.importorskip("triton")

from tests.kda_chunk_cases import CASES, ChunkCase, compare  # noqa: E402

# Logits of rates far below 0: the interpreter's exp says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    """In float32 on segments of odd lengths; reached: 2e-7."""
    errors = compare(CASES[name], torch.float32, "cpu")
    assert errors.output < 2e-6 and errors.state < 2e-6, errors
    assert not errors.touched, "a slot changed that no segment names"


def test_saves_of_one_chunk_share_its_start() -> None:
    """Three in one chunk and one at its border, in slots of any order."""
    saves = ((0, 3, 9), (0, 4, 5), (0, 63, 7), (0, 64, 6))
    errors = compare(ChunkCase(lengths=(80,), saves=saves), torch.float32, "cpu")
    assert errors.output < 2e-6 and errors.state < 2e-6, errors


def test_refuses_what_the_kernels_cannot_read() -> None:
    with pytest.raises(AssertionError, match="head dim 24"):
        compare(ChunkCase(lengths=(3,), head_dim=24), torch.float32, "cpu")


_COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stagecoach.kernels.kda.chunk_products_kernel import chunk_products_kernel
from stagecoach.kernels.kda.chunk_scan_kernel import chunk_saves_kernel, chunk_scan_kernel

FLOATS = {"a_log_H", "dt_bias_HK", "decay_JHK", "state_SHVK", "record_SNHX"}
VALUES = {"q_TK", "k_TK", "v_TV", "decay_TK", "beta_TH", "tiles_JHX", "o_THV"}
BLOCK_SHARED_BYTES = 227 * 1024

def compile_for_hopper(kernel, **constants):
    constants |= dict(H=32, K=128, V=128, CHUNK=64, PRECISION="tf32")
    def kind(name):
        if name in constants:
            return "constexpr"
        if name == "passed_LCC":
            return "*fp16"
        if name in FLOATS:
            return "*fp32"
        if name in VALUES:
            return "*bf16"
        return "*i32" if name[-2:] in ("_S", "_B", "_E", "_J") else "i32"
    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    assert compiled.metadata.shared <= BLOCK_SHARED_BYTES, compiled.metadata.shared

gate = dict(BLOCK_B=16, BOUND=-5.0, FINE=tl.float16)
compile_for_hopper(
    chunk_products_kernel, NUM_LEVELS=6, **gate
)
compile_for_hopper(
    chunk_scan_kernel, BLOCK_V=64, HAS_REPLAY=True, HAS_SAVES=True, NUM_STAGES=2
)
compile_for_hopper(chunk_saves_kernel, BLOCK_V=32, **gate)
"""


def test_the_kernels_compile_for_hopper_in_bfloat16() -> None:
    run_compiling("-c", _COMPILE)
