"""Products of E4M3 in CUDA: the source compiled for a host, thread by thread, and for Hopper."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stagecoach.kernels import nvrtc
from stagecoach.kernels.linear import fp8_product_cuda
from stagecoach.kernels.linear.fp8_product_cuda import (
    Fp8Arguments,
    choose_product_tiles,
    product_definitions,
)
from stagecoach.kernels.quantization import fp8_linear, quantize_fp8

_SOURCE = Path(fp8_product_cuda.__file__).with_name("fp8_product.cu")
_HOST_DEVICE = Path(__file__).parent / "host_device" / "fp8_product_device.cuh"
_LAUNCH = """
extern "C" int size_of_arguments() { return sizeof(Arguments); }
extern "C" void launch_product(const Arguments *given, int num_clusters, int cluster) {
    launch<Arguments, Shared>(multiply_fp8, *given, num_clusters, cluster, NUM_THREADS,
                              NUM_CONSUMERS);
}
"""


class OnHost(NamedTuple):
    """The kernel with a size of tiles; clusters are a matter of the launch."""

    rows: int
    quantizes: bool
    library: ctypes.CDLL


@pytest.fixture(scope="module", params=[(8, False), (32, False), (8, True)])
def on_host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    rows, quantizes = request.param
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("product")
    for header in (_HOST_DEVICE, _HOST_DEVICE.with_name("host.cuh")):
        shutil.copy(header, folder)
    source, library = folder / "product.cpp", folder / "product.so"
    source.write_text(_SOURCE.read_text() + _LAUNCH)
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
    values = product_definitions(rows, quantizes=quantizes)
    values |= {"NUM_STAGES": 2}
    definitions = [f"-D{name}={value}" for name, value in values.items()]
    subprocess.run([compiler, *options, *definitions, source, "-o", library], check=True)
    return OnHost(rows, quantizes, ctypes.CDLL(str(library)))


def _multiply(
    on_host: OnHost, num_rows: int, num_outputs: int, num_inputs: int, cluster: int
) -> tuple[Tensor, Tensor]:
    """What the kernel makes of random rows, of which the second is NaN, and the reference."""
    torch.manual_seed(0)
    tile_rows, quantizes, library = on_host
    if quantizes:
        num_rows = 1
    x_TI = torch.randn(num_rows, num_inputs).bfloat16()
    x_TI[1:2, num_inputs // 2] = float("nan")
    weight = quantize_fp8(torch.randn(num_outputs, num_inputs))
    values_TI, factors_T = quantize_fp8(x_TI)
    out_TO = torch.full((num_rows + 1, num_outputs), 7.0).bfloat16()

    def described(x: Tensor) -> tuple[int, ...]:
        return (x.data_ptr(), *x.shape, x.stride(0))

    arguments = Fp8Arguments(
        weights=described(weight.weight),
        rows=() if quantizes else described(values_TI),
        row_factors=None if quantizes else factors_T.data_ptr(),
        x=x_TI.data_ptr() if quantizes else None,
        weight_factors=weight.scale.data_ptr(),
        out=out_TO.data_ptr(),
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
    )
    assert library.size_of_arguments() == ctypes.sizeof(arguments)
    num_clusters = -(-num_rows // tile_rows) * -(-num_outputs // 64)
    library.launch_product(ctypes.byref(arguments), num_clusters, cluster)
    assert (out_TO[num_rows:] == 7).all(), "written behind the last row"
    return out_TO[:num_rows].double(), fp8_linear(x_TI.double(), weight)


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "cluster"),
    [(1, 72, 144, 1), (5, 136, 640, 2), (2, 64, 128, 4)],
)
def test_tiles_that_are_not_full(
    on_host: OnHost, num_rows: int, num_outputs: int, num_inputs: int, cluster: int
) -> None:
    """Few rows, outputs and inputs; more tiles of inputs than are on their way; a share of none."""
    found_TO, expected_TO = _multiply(on_host, num_rows, num_outputs, num_inputs, cluster)
    torch.testing.assert_close(found_TO, expected_TO, rtol=4e-3, atol=1e-3, equal_nan=True)


def test_several_tiles_of_rows(on_host: OnHost) -> None:
    """Nine tiles: one more than share weights."""
    found_TO, expected_TO = _multiply(on_host, 8 * on_host.rows + 3, 136, 16, 1)
    torch.testing.assert_close(found_TO, expected_TO, rtol=4e-3, atol=1e-3, equal_nan=True)


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
def test_a_launch_tells_the_cluster_and_that_it_may_start_early() -> None:
    cluster, early = nvrtc._launch_attributes(4, is_dependent=True)
    assert (int(cluster.id), cluster.value.clusterDim.x, cluster.value.clusterDim.y) == (4, 4, 1)
    assert (int(early.id), early.value.programmaticStreamSerializationAllowed) == (6, 1)
    assert nvrtc._launch_attributes(1, is_dependent=False) == []


def test_cuts() -> None:
    """Rows of a tile add up in one order, and shares of the inputs are whole tiles."""
    cuts = {rows: choose_product_tiles(rows, 2304, 4096) for rows in (1, 8, 9, 33, 64, 65, 300)}
    assert cuts[1] == cuts[8] == (8, 4)
    assert [cuts[rows].rows for rows in (9, 33, 64, 65, 300)] == [32, 64, 64, 64, 64]
    assert choose_product_tiles(5, 100_000, 4096).cluster == 1, "blocks enough"
    assert choose_product_tiles(5, 64, 256).cluster == 1, "nothing to share"


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
@pytest.mark.parametrize(("rows", "quantizes"), [(8, True), (8, False), (32, False), (64, False)])
def test_compiles_for_hopper(rows: int, tmp_path: Path, *, quantizes: bool) -> None:
    """Products of E4M3 by warpgroups, several before one waits; no register in local memory."""
    cubin = tmp_path / "product.cubin"
    definitions = product_definitions(rows, quantizes=quantizes)
    assert definitions["SHARED_BYTES"] <= 75 * 1024, "three blocks a processor"
    cubin.write_bytes(nvrtc.compile_cubin(_SOURCE, "sm_90a", definitions))
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("needs nvdisasm")
    listing = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    num_products = len(re.findall(r"\bQGMMA\b", listing))
    assert num_products and num_products % 4 == 0
    assert len(re.findall(r"\bWARPGROUP\.DEPBAR\b", listing)) == num_products // 4
    assert not re.search(r"\b(LDL|STL)\b", listing)


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
def test_too_little_shared_memory_is_an_error() -> None:
    definitions = product_definitions(8, quantizes=False)
    definitions["SHARED_BYTES"] -= 64
    with pytest.raises(nvrtc.CudaCompileError, match="the host reserves less"):
        nvrtc.compile_cubin(_SOURCE, "sm_90a", definitions)
