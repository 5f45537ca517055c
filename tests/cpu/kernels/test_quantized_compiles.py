"""The kernels of quantised weights compile for Hopper in bfloat16, as they are launched."""

import pytest

from tests.compiling_process import run_compiling

pytest.importorskip("triton")

_COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stagecoach.kernels.linear import fp8_cuda
from stagecoach.kernels.linear.fp8_kernel import fp8_linear_kernel, fp8_vector_kernel
from stagecoach.kernels.moe.mxfp4_kernel import product_mxfp4_kernel
from stagecoach.kernels.moe.mxfp4_tiles import all_mxfp4_sorted_tiles
from stagecoach.kernels.quantization.quantize_kernel import quantize_rows_kernel

POINTERS = {
    "x_ptr": "*bf16", "out_ptr": "*bf16", "packed_ptr": "*u8", "scale_ptr": "*u8",
    "weight_ptr": "*fp8e4nv", "weight_factors_ptr": "*fp32", "x_factors_ptr": "*fp32",
    "factors_ptr": "*fp32",
}
MOST_SHARED_BYTES = 227 * 1024

def compile_for_hopper(kernel, num_warps, types={}, **constants):
    def kind(name):
        if name.isupper():
            return "constexpr"
        known = types.get(name) or POINTERS.get(name)
        return known or ("*i32" if name.endswith("_ptr") else "i32")
    signature = {name: kind(name) for name in kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith(("num_inputs", "num_outputs", "stride"))
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= MOST_SHARED_BYTES, (kernel, constants)
    return compiled.asm["ptx"]

for tiles in all_mxfp4_sorted_tiles()[::2]:
    for is_first, cut in ((True, tiles.gate_up), (False, tiles.down)):
        ptx = compile_for_hopper(
            product_mxfp4_kernel, cut.num_warps, NUM_CHOSEN=16, IS_FIRST=is_first,
            ORDERS_OUTPUTS=is_first, IS_EVEN=True, IS_FLOAT32=False, BLOCK_M=tiles.block_m,
            BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, NUM_STAGES=cut.num_stages,
        )
        assert "wgmma" in ptx and "mul.bf16x2" in ptx
        assert "ld.shared.v2" in ptx or "ld.shared.v4" in ptx, "weights of a thread in one piece"
cut = fp8_cuda.choose_fp8_tiles(8, 7168, 1536, torch.bfloat16)
ptx = compile_for_hopper(
    fp8_linear_kernel, cut.num_warps, {"x_ptr": "*fp16"}, IS_EVEN=True, BLOCK_T=cut.block_rows,
    BLOCK_O=cut.block_outputs, BLOCK_I=cut.block_inputs, NUM_SPLITS=1, NUM_STAGES=cut.num_stages,
    IS_DEPENDENT=True,
)
assert "f16.f16" in ptx and "cvt.rn.f16x2.e4m3x2" in ptx
ptx = compile_for_hopper(
    fp8_vector_kernel, 4, BLOCK_O=4, BLOCK_I=1024, BLOCK_REST=512, IS_DEPENDENT=True
)
assert ptx.rindex("cache_hint.v4") < ptx.index("griddepcontrol.wait"), "weights before the wait"
ptx = compile_for_hopper(
    quantize_rows_kernel, 4, {"out_ptr": "*fp8e4nv"}, BLOCK_I=2048, IS_WHOLE=True,
    IS_DEPENDENT=True,
)
assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "div.rn.f32" in ptx
"""


def test_the_kernels_compile_for_hopper_in_bfloat16() -> None:
    run_compiling("-c", _COMPILE)
