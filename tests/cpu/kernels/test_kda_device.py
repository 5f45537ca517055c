"""The device's form of KDA windows: interpreted against the reference, compiled for Hopper."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from tests.compiling_process import run_compiling

pytest.importorskip("triton")

from stagecoach.kernels import nvrtc
from stagecoach.kernels.kda import window_cuda
from stagecoach.kernels.kda.window_cuda import WindowArguments
from tests.kda_cases import Case, errors_of, make_layer, mixed_cases, window_cases
from tests.packed_group import make_packed_group

# Logits of rates far below 0: the interpreter's exp says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

_SOURCE = Path(window_cuda.__file__).with_name("window.cu")
_ARGUMENTS = _SOURCE.with_name("window_arguments.cuh")
# Of each source: its kernel, and what it is compiled with.
_KERNELS = {
    "window.cu": ("kda_windows", window_cuda.window_definitions),
    "walk.cu": ("kda_walk", window_cuda.walk_definitions),
}
_ALL = {case.name: case for case in (*window_cases("cpu"), *mixed_cases("cpu"))}
# The interpreter is slow: what these hold, others hold too.
_CASES = {
    name: case
    for name, case in _ALL.items()
    if name not in ("W=2", "W=5", "W=9", "heads of 64", "rows not aligned")
}


@pytest.mark.parametrize("name", _CASES)
def test_equals_the_reference(name: str) -> None:
    """In float32, heads of 16: convolution, recurrence, norm, and every slot of every pool."""
    num_heads = 2 if name.startswith("ragged") else 1
    case = _CASES[name]._replace(num_heads=num_heads, head_dim=16)
    errors = errors_of(case, torch.float32, "cpu")
    assert max(errors.values()) < 2e-6, errors


def test_heads_may_have_any_size() -> None:
    windows = _CASES["ragged"]
    errors = errors_of(windows._replace(num_heads=1, head_dim=12), torch.float32, "cpu")
    assert max(errors.values()) < 2e-6, errors


def test_refuses_more_drafts_than_a_record_has_rows() -> None:
    case = _CASES["W=17"]
    wide = case.windows.packed._replace(max_replay=17)
    broken = Case("broken", case.windows._replace(packed=wide), num_heads=1, head_dim=16)
    with pytest.raises(AssertionError, match="16 rows"):
        errors_of(broken, torch.float32, "cpu")


def _fields_of_struct(name: str) -> list[tuple[str, str]]:
    """(field, type) of a struct in the CUDA source, in order."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", _ARGUMENTS.read_text(), re.DOTALL)
    assert body is not None
    text = re.sub(r"//[^\n]*", "", body.group(1))
    fields = []
    for declaration in filter(str.strip, text.split(";")):
        kind, names = re.match(
            r"\s*((?:const )?(?:long long|\w+))\s+(.*)", declaration, re.DOTALL
        ).groups()
        for field in names.split(","):
            pointer = "*" if "*" in field else ""
            fields.append((field.strip().lstrip("*"), kind.removeprefix("const ") + pointer))
    return fields


def test_arguments_lie_as_the_source_has_them() -> None:
    types = {"long long": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float}
    expected = [
        (name, ctypes.c_void_p if kind.endswith("*") else types[kind])
        for name, kind in _fields_of_struct("Arguments")
    ]
    assert [tuple(field) for field in WindowArguments._fields_] == expected


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
@pytest.mark.parametrize("source", _KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cuda_sources_compile_for_hopper(dtype: torch.dtype, source: str) -> None:
    """And agree with the host on how much shared memory they take."""
    name, definitions_of = _KERNELS[source]
    cubin = nvrtc.compile_cubin(_SOURCE.with_name(source), "sm_90a", definitions_of(dtype))
    assert cubin.startswith(b"\x7fELF") and name.encode() in cubin


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
@pytest.mark.parametrize("source", _KERNELS)
def test_another_size_of_shared_memory_is_an_error(source: str) -> None:
    _, definitions_of = _KERNELS[source]
    definitions = definitions_of(torch.bfloat16)
    definitions["SHARED_BYTES"] += 16
    with pytest.raises(nvrtc.CudaCompileError, match="the host reserves another size"):
        nvrtc.compile_cubin(_SOURCE.with_name(source), "sm_90a", definitions)


def _is_for_walk(lengths: list[int], *, are_rows_aligned: bool = True) -> bool:
    group = make_packed_group(lengths, num_drafts=[length - 1 for length in lengths]).packed
    layer = make_layer(
        sum(lengths),
        4,
        torch.bfloat16,
        num_slots=4,
        num_drafts=2,
        are_rows_aligned=are_rows_aligned,
        device="cpu",
    )
    return window_cuda._is_for_walk(*layer, group)


def test_windows_of_several_tokens_and_aligned_rows_are_walked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not _is_for_walk([3, 1]), "there is no copy engine"
    monkeypatch.setattr(window_cuda, "_has_copy_engine", lambda device: True)
    assert _is_for_walk([3, 1])
    assert not _is_for_walk([1, 1])
    assert not _is_for_walk([3, 1], are_rows_aligned=False)


@pytest.mark.parametrize(
    ("dtype", "max_replay", "are_walked"),
    [
        (torch.bfloat16, 0, True),
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 9, False),
        (torch.float32, 4, True),
        (torch.float32, 5, False),
    ],
)
def test_windows_are_walked_where_two_states_and_their_rows_fit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, max_replay: int, are_walked: bool
) -> None:
    monkeypatch.setattr(window_cuda, "_has_copy_engine", lambda device: True)
    group = make_packed_group([2], num_drafts=[1], bounds={"max_replay": max_replay}).packed
    layer = make_layer(2, 4, dtype, num_slots=4, num_drafts=2, device="cpu")
    assert window_cuda._is_for_walk(*layer, group) == are_walked


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
def test_what_does_not_compile_says_why(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void broken() { undeclared = 1; }')
    with pytest.raises(nvrtc.CudaCompileError, match="undeclared"):
        nvrtc.compile_cubin(source, "sm_90a", {})


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
def test_a_source_includes_what_lies_beside_it(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text('#include "part.cuh"\nextern "C" __global__ void part() { number(); }')
    (tmp_path / "part.cuh").write_text("__device__ int number() { return 1; }")
    assert nvrtc.compile_cubin(source, "sm_90a", {}).startswith(b"\x7fELF")
    (tmp_path / "part.cuh").unlink()
    with pytest.raises(nvrtc.CudaCompileError, match=r"part\.cuh"):
        nvrtc.compile_cubin(source, "sm_90a", {})


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stagecoach.kernels.kda.window_kernel import kda_window_kernel
from stagecoach.kernels.short_conv.conv_kernel import conv_kernel

INDICES = (
    "offsets", "segment_of", "read_slots", "write_slots", "replays", "num_drafts",
    "first_save", "save_tokens", "save_slots",
)


def compile_for_hopper(kernel, activations, floats, scalars, constants):
    types = {name: "i32" for name in kernel.arg_names}
    types.update({name: "*i32" for name in INDICES if name in types})
    types.update({name: "*bf16" for name in activations})
    types.update({name: "*fp32" for name in floats})
    types.update({name: "fp32" for name in scalars})
    types.update({name: "constexpr" for name in constants})
    source = ASTSource(kernel, types, constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}
    )
    assert compiled.asm["cubin"]


compile_for_hopper(
    kda_window_kernel,
    ("q", "k", "v", "decay", "beta", "gate", "out"),
    ("a_log", "dt_bias", "norm", "states", "records"),
    ("lower_bound", "eps"),
    dict(NUM_HEADS=4, HEAD_DIM=64, BLOCK=64, HAS_BOUND=True, HAS_SAVES=True),
)
compile_for_hopper(
    conv_kernel,
    ("x", "rows", "q", "k", "v"),
    ("weight",),
    (),
    dict(
        NUM_HEADS=4, HEAD_DIM=64, BLOCK_D=64, TAPS=4, BLOCK_TAPS=4, FIRST=32, BLOCK=32, KEPT=8,
        HAS_SAVES=True,
    ),
)
"""


def test_the_triton_kernels_compile_for_hopper() -> None:
    run_compiling("-c", _COMPILE)
