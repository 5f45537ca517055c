"""Norms, mixture and activations in Triton's interpreter against the references, in float32.

Their inputs are views: rows that follow no more than the strides say, NaN between them.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stagecoach.kernels import nvrtc
from stagecoach.kernels.activation import cuda as activation_cuda
from stagecoach.kernels.activation import reference as activation_reference
from stagecoach.kernels.attn_res import cluster_cuda
from stagecoach.kernels.attn_res import cuda as mixture_cuda
from stagecoach.kernels.attn_res import reference as mixture_reference
from stagecoach.kernels.norm import cuda as norm_cuda
from stagecoach.kernels.norm import reference as norm_reference
from tests.compiling_process import run_compiling

EPS = 1e-5


def amid_nan(values: Tensor, padding: int = 3) -> Tensor:
    """The same values as a view with NaN behind every row and every plane of rows."""
    shape = [extent + (padding if dim else 0) for dim, extent in enumerate(values.shape)]
    storage = torch.full(shape, math.nan)
    view = storage[tuple(slice(0, extent) for extent in values.shape)]
    view.copy_(values)
    return view


def close(actual: Tensor | None, expected: Tensor | None, tolerance: float = 2e-6) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(1, 7), (5, 72), (3, 4, 128), (2, 3, 2, 20)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = amid_nan(3 * torch.randn(shape)), torch.randn(shape[-1])
    close(norm_cuda.rms_norm(x, weight, EPS), norm_reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize(
    ("shape", "weight_shape"),
    [((4, 3, 24), (3, 24)), ((2, 3, 4, 8), (3, 1, 8)), ((2, 5, 3, 4, 8), (3, 1, 8))],
)
def test_grouped_rms_norm(shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> None:
    x, weight = amid_nan(torch.randn(shape)), torch.randn(weight_shape)
    expected = norm_reference.grouped_rms_norm(x, weight, EPS)
    close(norm_cuda.rms_norm(x, weight, EPS), expected)


def test_gated_rms_norm() -> None:
    """The gate is a view of wider rows, as the fused input projection leaves it."""
    x_THV, weight_V = torch.randn(6, 3, 20), torch.randn(20)
    gate_THV = amid_nan(4 * torch.randn(6, 60)).view(6, 3, 20)
    expected = norm_reference.gated_rms_norm(x_THV, gate_THV, weight_V, EPS)
    close(norm_cuda.gated_rms_norm(x_THV, gate_THV, weight_V, EPS), expected)


def test_add_rms_norm() -> None:
    partial_TH, addend_TH = amid_nan(torch.randn(5, 72)), amid_nan(torch.randn(5, 72), padding=8)
    weight_H = torch.randn(72)
    expected = norm_reference.add_rms_norm(partial_TH, addend_TH, weight_H, EPS)
    sum_TH, normed_TH = norm_cuda.add_rms_norm(partial_TH, addend_TH, weight_H, EPS)
    assert torch.equal(sum_TH, expected[0])
    close(normed_TH, expected[1])


def test_empty_inputs_launch_nothing() -> None:
    nothing, weight = torch.empty(0, 8), torch.ones(8)
    assert norm_cuda.rms_norm(nothing, weight, EPS).shape == (0, 8)
    assert norm_cuda.add_rms_norm(nothing, nothing, weight, EPS)[1].shape == (0, 8)
    assert activation_cuda.gated_product(
        nothing, nothing, is_situ=False, beta=1.0, linear_beta=None
    ).shape == (0, 8)
    bank_TBH = torch.empty(0, 2, 8)
    assert mixture_cuda.mix(bank_TBH, nothing, weight, EPS).shape == (0, 8)


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 8])
@pytest.mark.parametrize("has_addend", [False, True])
def test_mix_rms_norm(num_blocks: int, *, has_addend: bool) -> None:
    """The bank is the filled part of a larger one; its other blocks hold NaN."""
    bank_TBH = amid_nan(3 * torch.randn(4, num_blocks, 72), padding=5)
    partial_TH = amid_nan(torch.randn(4, 72))
    addend_TH = torch.randn(4, 72) if has_addend else None
    key_weight_H, norm_weight_H = torch.randn(2, 72).unbind()
    inputs = bank_TBH, partial_TH, addend_TH, key_weight_H, norm_weight_H, EPS
    expected = mixture_reference.mix_rms_norm(*inputs)
    mixed = mixture_cuda.mix_rms_norm(*inputs, keeps_mixed=True)
    assert torch.equal(mixed.sum_TH, expected.sum_TH)
    close(mixed.mixed_TH, expected.mixed_TH, 1e-5)
    close(mixed.normed_TH, expected.normed_TH, 1e-5)
    if num_blocks:
        assert mixture_cuda.mix_rms_norm(*inputs).mixed_TH is None
        alone = mixture_cuda.mix(bank_TBH, expected.sum_TH, key_weight_H, EPS)
        close(alone, expected.mixed_TH, 1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # right: a sigmoid of 0
@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ(linear_beta: float | None) -> None:
    """Small gates too, where one minus an exponential would lose its digits."""
    sizes = torch.tensor([1e-6, 1e-2, 0.5, 3.0, 1e3])[:, None]
    gate, up = (amid_nan(sizes * torch.randn(5, 1030)) for _ in range(2))
    product = activation_cuda.gated_product(
        gate, up, is_situ=True, beta=4.0, linear_beta=linear_beta
    )
    expected = activation_reference.situ_and_mul(gate.double(), up.double(), 4.0, linear_beta)
    torch.testing.assert_close(product.double(), expected, rtol=2e-6, atol=1e-30)


def test_silu() -> None:
    gate, up = torch.randn(3, 2, 2 * 20).chunk(2, dim=-1)
    product = activation_cuda.gated_product(gate, up, is_situ=False, beta=1.0, linear_beta=None)
    close(product, activation_reference.silu_and_mul(gate, up))


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stagecoach.kernels.activation.activation_kernel import gated_product_kernel
from stagecoach.kernels.attn_res.mix_kernel import mix_kernel
from stagecoach.kernels.norm.norm_kernel import add_rms_norm_kernel, rms_norm_kernel

def compile_for_hopper(kernel, num_warps, **constants):
    def kind(name):
        if name.isupper():
            return "constexpr"
        if name in ("eps", "beta", "linear_beta"):
            return "fp32"
        if name == "key_weight_ptr":
            return "*fp32"
        return "*bf16" if name.endswith("_ptr") else "i32"
    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    options = {"num_warps": num_warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

early = dict(IS_DEPENDENT=True)
for ptx in (
    compile_for_hopper(rms_norm_kernel, 4, D=128, BLOCK_D=128, ROWS=16, HAS_GATE=True, **early),
    compile_for_hopper(add_rms_norm_kernel, 8, D=2304, BLOCK_D=4096, **early),
    compile_for_hopper(gated_product_kernel, 4, IS_SITU=True, IS_BOUND=True, BLOCK=1024, **early),
):
    assert ptx.index("griddepcontrol.wait") < ptx.index("st.global"), "writes after the wait"
compile_for_hopper(
    mix_kernel, 16, H=7168, BLOCK_H=8192, BLOCK_B=8,
    HAS_ADDEND=True, KEEPS_MIXED=False, HAS_NORM=True,
)
"""


def test_the_kernels_compile_for_hopper_in_bfloat16() -> None:
    run_compiling("-c", _COMPILE)


@pytest.mark.parametrize("num_blocks", [1, 8])
def test_the_cluster_form_compiles_for_hopper(num_blocks: int) -> None:
    """Kimi-K3's width; a thread's rows stay in registers."""
    pytest.importorskip("cuda.bindings")
    source = Path(cluster_cuda.__file__).with_name("mix.cu")
    sizes = {"NUM_BLOCKS": num_blocks, "WIDTH": 7168, "CLUSTER": 8, "NUM_THREADS": 128}
    cubin = nvrtc.compile_cubin(source, "sm_90a", sizes)
    assert cubin.startswith(b"\x7fELF") and b"mix" in cubin
    with pytest.raises(nvrtc.CudaCompileError, match="even parts"):
        nvrtc.compile_cubin(source, "sm_90a", sizes | {"WIDTH": 7100})


def test_the_cluster_form_takes_nothing_on_a_cpu() -> None:
    assert not cluster_cuda.is_taken(torch.zeros(1, 2, 7168, dtype=torch.bfloat16))


def test_clusters_mix_few_tokens_and_programs_many(monkeypatch: pytest.MonkeyPatch) -> None:
    clustered: list[int] = []
    monkeypatch.setattr(cluster_cuda, "is_taken", lambda *_: True)
    monkeypatch.setattr(cluster_cuda, "mix", lambda bank_TBH, *_: clustered.append(len(bank_TBH)))
    for num_tokens in (1, 64, 65):
        bank_TBH = torch.randn(num_tokens, 2, 8)
        partial_TH, key_H = torch.randn(num_tokens, 8), torch.randn(8)
        mixed_TH = mixture_cuda.mix(bank_TBH, partial_TH, key_H, EPS)
    assert clustered == [1, 64]
    expected_TH = mixture_reference.mix(bank_TBH, partial_TH, key_H, EPS)
    torch.testing.assert_close(mixed_TH, expected_TH)
