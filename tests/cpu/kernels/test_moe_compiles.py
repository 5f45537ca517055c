"""The kernels of experts and of few rows compile for Hopper in bfloat16, as they are launched."""

import pytest

from tests.compiling_process import run_compiling

pytest.importorskip("triton")

_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stagecoach.kernels.linear.linear_kernel import linear_kernel, vector_kernel
from stagecoach.kernels.moe import tiles
from stagecoach.kernels.moe.pair_kernel import (
    pair_down_kernel, pair_down_whole_kernel, pair_gate_up_kernel,
)
from stagecoach.kernels.moe.route_kernel import route_kernel
from stagecoach.kernels.moe.sort_kernel import (
    count_pairs_kernel, place_experts_kernel, place_pairs_kernel, sort_pairs_kernel,
)
from stagecoach.kernels.moe.tile_kernel import down_kernel, gate_up_kernel

FLOATS = ("beta", "linear_beta", "scaling")
FLOAT_POINTERS = ("logits_ptr", "bias_ptr", "chosen_weights_ptr")
INT_POINTERS = ("ids", "pairs", "offsets", "tile", "num", "counts", "starts")
MOST_SHARED_BYTES = 227 * 1024

def compile_for_hopper(kernel, num_warps, types={}, **constants):
    def kind(name):
        if name.isupper():
            return "constexpr"
        if not name.endswith(("_ptr", "weights")):
            return "fp32" if name in FLOATS else "i32"
        if name.startswith(INT_POINTERS):
            return "*i32"
        return "*fp32" if name in FLOAT_POINTERS else "*bf16"
    signature = {name: types.get(name) or kind(name) for name in kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith(("num_inputs", "num_outputs", "width", "stride"))
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= MOST_SHARED_BYTES, (kernel, constants)
    return compiled.asm["ptx"]

def product(cut, block_m):
    types = {}
    if cut.has_descriptor:
        types["weights"] = f"tensordesc<bf16[{cut.block_n},{cut.block_k}]>"
    constants = dict(
        IS_EVEN=True, BLOCK_M=block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k,
        HAS_DESCRIPTOR=cut.has_descriptor, HALVES=cut.halves, NUM_STAGES=cut.num_stages,
    )
    return types, constants

early = dict(IS_DEPENDENT=True)
gated = dict(NUM_CHOSEN=8, IS_SITU=False, IS_BOUND=False)
for cut in tiles.all_sorted_tiles():
    types, constants = product(cut.gate_up, cut.block_m)
    ptx = compile_for_hopper(
        gate_up_kernel, cut.gate_up.num_warps, types, **gated, **constants
    )
    assert ("wgmma" in ptx) == (cut.block_m >= 64), "tensor cores"
    types, constants = product(cut.down, cut.block_m)
    compile_for_hopper(down_kernel, cut.down.num_warps, types, **constants)
pairs = dict(NUM_CHOSEN=8, NUM_SHARED=1)
sizes = dict(BLOCK_I=1024, BLOCK_L=4, IS_EVEN=True, NUM_STAGES=3)
compile_for_hopper(pair_down_kernel, 4, **sizes, **pairs)
pairs.update(early)
sizes = dict(BLOCK_I=1, BLOCK_L=2048, BLOCK_REST=256)
ptx = compile_for_hopper(
    pair_gate_up_kernel, 4, IS_SITU=False, IS_BOUND=False, **sizes, **pairs
)
assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")
assert "cache_hint.v4" in ptx, "wide loads"
ptx = compile_for_hopper(pair_down_whole_kernel, 4, BLOCK_C=8, BLOCK_I=1024, **pairs)
wait = ptx.index("griddepcontrol.wait")
assert ptx.rindex("cache_hint.v4") < wait, "weights before the wait"
compile_for_hopper(
    route_kernel, 1, {"weights_ptr": "*fp32"}, NUM_CHOSEN=16, NUM_PARTS=3, IS_SIGMOID=True,
    HAS_BIAS=True, HAS_REAL=True, HAS_GROUPS=False, RENORMALIZE=True, BLOCK_G=1, BLOCK_M=1024,
    BLOCK_K=16, **early,
)
compile_for_hopper(sort_pairs_kernel, 8, BLOCK_P=256, BLOCK_Q=32, BLOCK_E=1024, **early)
compile_for_hopper(count_pairs_kernel, 4, BLOCK_P=512, BLOCK_E=1024, **early)
compile_for_hopper(place_experts_kernel, 16, BLOCK_B=16, BLOCK_E=1024, **early)
compile_for_hopper(place_pairs_kernel, 16, BLOCK_P=512, BLOCK_Q=32, **early)
few = dict(IS_EVEN=True, BLOCK_O=16, BLOCK_I=256, NUM_SPLITS=1, NUM_STAGES=4)
compile_for_hopper(linear_kernel, 2, BLOCK_T=16, **few, **early)
ptx = compile_for_hopper(vector_kernel, 4, BLOCK_O=2, BLOCK_I=2048, BLOCK_REST=256, **early)
wait = ptx.index("griddepcontrol.wait")
assert ptx.rindex("cache_hint.v4") < wait < ptx.index("st.global"), "weights first"
"""


def test_the_kernels_compile_for_hopper_in_bfloat16() -> None:
    run_compiling("-c", _COMPILE)
