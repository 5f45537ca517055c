"""A kernel that is compiled late is named in the log, one that lies in the cache is not."""

from pathlib import Path

import pytest

from tests.compiling_process import run_compiling

pytest.importorskip("triton")
pytestmark = pytest.mark.cpu

_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stagecoach.kernels import late_compiles
from stagecoach.kernels.newest.newest_kernel import note_kernel
from stagecoach.observe import log

def compile_for_hopper(block):
    signature = dict.fromkeys(("newest", "sampling_rows", "token_ids"), "*i32")
    signature |= {"num_segments": "i32", "BLOCK": "constexpr"}
    source = ASTSource(note_kernel, signature=signature, constexprs={"BLOCK": block})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))

log.configure("worker")
compile_for_hopper(32)
late_compiles.report_from_now_on()
compile_for_hopper(32)
compile_for_hopper(64)
"""


def test_late_compiles_are_logged(tmp_path: Path) -> None:
    told = run_compiling("-c", _COMPILE, TRITON_CACHE_DIR=str(tmp_path)).stderr
    [line] = [line for line in told.splitlines() if " info " in line]
    assert "compiled a form of note_kernel in " in line
