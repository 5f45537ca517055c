"""Few pairs of packed experts in CUDA: the source compiled for a host, against the reference.

Beside it, what a host can see of the form for a GPU: it compiles, and which instructions it has.
"""

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stagecoach.kernels import nvrtc
from stagecoach.kernels.activation import Activation
from stagecoach.kernels.moe import cuda, mxfp4_cuda
from stagecoach.kernels.moe.mxfp4_cuda import FewArguments, few_definitions
from stagecoach.kernels.moe.mxfp4_tiles import FewTiles, few_tiles
from stagecoach.kernels.quantization import Mxfp4Weight, unpack_mxfp4

_SOURCE = Path(mxfp4_cuda.__file__).with_name("mxfp4.cu")
_HOST_DEVICE = Path(__file__).parent / "host_device" / "mxfp4_device.cuh"
_LAUNCH = """
extern "C" int size_of_arguments() { return sizeof(Arguments); }
extern "C" void launch_few(const Arguments *given, int num_x, int num_y) {
    launch<Arguments>(multiply_few, *given, num_x, num_y);
}
"""
_SITU = Activation("situ", 4.0, 25.0)
_NUM_EXPERTS, _NUM_CHOSEN = 3, 2


def _tiles(k_warps: int) -> FewTiles:
    """Blocks of four warps where two share inputs, otherwise of eight."""
    return FewTiles(True, _NUM_EXPERTS, *((4, 4, 4) if k_warps == 2 else (8, 2, 3)))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], ctypes.CDLL]:
    """By whether it is gated, and how many warps share inputs."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("mxfp4")
    for header in (_HOST_DEVICE, _HOST_DEVICE.with_name("host.cuh")):
        shutil.copy(header, folder)
    shutil.copy(_SOURCE.with_name("mxfp4_values.cuh"), folder)
    source = folder / "mxfp4.cpp"
    source.write_text(_SOURCE.read_text() + _LAUNCH)
    made = {}
    for is_gated, k_warps in ((True, 2), (False, 4)):
        library = folder / f"mxfp4_{is_gated}_{k_warps}.so"
        values = few_definitions(_tiles(k_warps), k_warps, is_gated=is_gated)
        definitions = [f"-D{name}={value}" for name, value in values.items()]
        options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *options, *definitions, source, "-o", library], check=True)
        made[is_gated, k_warps] = ctypes.CDLL(str(library))
    return made


def _packed(num_outputs: int, num_inputs: int) -> Mxfp4Weight:
    size = (_NUM_EXPERTS, num_outputs)
    return Mxfp4Weight(
        torch.randint(256, (*size, num_inputs // 2), dtype=torch.uint8),
        torch.randint(122, 126, (*size, num_inputs // 32), dtype=torch.uint8),
    )


def _run(
    library: ctypes.CDLL,
    x: Tensor,
    weight: Mxfp4Weight,
    ids_TK: Tensor,
    num_outputs: int,
    *,
    is_sorted: bool,
    k_warps: int,
    blocks_of_rows: int,
    is_gated: bool,
) -> Tensor:
    out_PO = torch.full((ids_TK.numel(), num_outputs), 7.0).bfloat16()
    order = cuda.sort_pairs(ids_TK, _NUM_EXPERTS, 8) if is_sorted else None
    pointers = {}
    num_tiles = ids_TK.numel()
    if order is not None:
        names = ("pairs", "offsets", "tile_experts", "tile_rows", "num_tiles")
        pointers = {name: part.data_ptr() for name, part in zip(names, order, strict=True)}
        num_tiles = len(order.tile_rows_M)
    arguments = FewArguments(
        x=x.data_ptr(),
        packed=weight.packed.data_ptr(),
        scale=weight.scale.data_ptr(),
        out=out_PO.data_ptr(),
        expert_ids=ids_TK.data_ptr(),
        x_stride=x.stride(0),
        num_inputs=weight.shape[2],
        num_outputs=num_outputs,
        num_chosen=ids_TK.shape[1],
        blocks_of_rows=blocks_of_rows,
        is_situ=1,
        is_bound=1,
        beta=_SITU.beta,
        linear_beta=_SITU.linear_beta,
        **pointers,
    )
    assert library.size_of_arguments() == ctypes.sizeof(arguments)
    rows = blocks_of_rows * (16 if is_gated else 32) * _tiles(k_warps).num_warps // k_warps
    library.launch_few(ctypes.byref(arguments), math.ceil(num_outputs / rows), num_tiles)
    if order is None or not is_gated:
        return out_PO
    by_pair_PO = torch.full_like(out_PO, 7.0)
    num_real = int(order.offsets_E1[-1])
    by_pair_PO[order.pairs_P[:num_real].long()] = out_PO[:num_real]
    return by_pair_PO


def _choices(num_tokens: int) -> Tensor:
    """One expert has more pairs than a tile, the last token is nobody's."""
    ids_TK = torch.tensor([[0, token % 2 + 1] for token in range(num_tokens)], dtype=torch.int32)
    ids_TK[-1] = -1
    return ids_TK


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("num_inputs", "width"), [(160, 40), (1184, 16)])
def test_gate_and_up(
    libraries: dict[tuple[bool, int], ctypes.CDLL], num_inputs: int, width: int, *, is_sorted: bool
) -> None:
    """Inputs that are no whole chunks, and more of these than are on their way at once."""
    ids_TK = _choices(12 if is_sorted else 3)
    weight = _packed(2 * width, num_inputs)
    x_TL = torch.randn(len(ids_TK), num_inputs + 8).bfloat16()[:, :num_inputs]
    x_TL[-1] = math.nan
    form = {"is_sorted": is_sorted, "k_warps": 2, "blocks_of_rows": 2, "is_gated": True}
    out_PI = _run(libraries[True, 2], x_TL, weight, ids_TK, width, **form)
    weight_EOI = unpack_mxfp4(weight, torch.float32)
    for pair, expert in enumerate(ids_TK.flatten().tolist()):
        if expert < 0:
            assert (out_PI[pair] == 7).all()
            continue
        both = weight_EOI[expert] @ x_TL[pair // _NUM_CHOSEN].float()
        expected_I = _SITU(*both.chunk(2))
        assert (out_PI[pair] - expected_I).norm() < 4e-3 * expected_I.norm()


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 72), (640, 40)])
def test_down(
    libraries: dict[tuple[bool, int], ctypes.CDLL],
    num_inputs: int,
    num_outputs: int,
    *,
    is_sorted: bool,
) -> None:
    """Fewer chunks than warps, and more."""
    ids_TK = _choices(11 if is_sorted else 3)
    weight = _packed(num_outputs, num_inputs)
    by_pair_PI = torch.randn(ids_TK.numel(), num_inputs).bfloat16()
    product_PI = by_pair_PI
    if is_sorted:
        order = cuda.sort_pairs(ids_TK, _NUM_EXPERTS, 8)
        num_real = int(order.offsets_E1[-1])
        product_PI = torch.full_like(by_pair_PI, math.nan)
        product_PI[:num_real] = by_pair_PI[order.pairs_P[:num_real].long()]
    form = {"is_sorted": is_sorted, "k_warps": 4, "blocks_of_rows": 1, "is_gated": False}
    out_PO = _run(libraries[False, 4], product_PI, weight, ids_TK, num_outputs, **form)
    weight_EOI = unpack_mxfp4(weight, torch.float32)
    for pair, expert in enumerate(ids_TK.flatten().tolist()):
        if expert < 0:
            assert (out_PO[pair] == 7).all()
            continue
        expected_O = weight_EOI[expert] @ by_pair_PI[pair].float()
        assert (out_PO[pair] - expected_O).norm() < 4e-3 * expected_O.norm()


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
def test_compiles_for_gpus(tmp_path: Path) -> None:
    """Both products; a chunk takes 16 of the matrix units', of the chunks that are unrolled."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    for is_gated, architecture, num_pairs in ((False, "sm_80", 16), (True, "sm_90a", 256)):
        cubin = tmp_path / "mxfp4.cubin"
        tiles = few_tiles(num_pairs, 896, has_many=True)
        assert tiles is not None
        definitions = few_definitions(tiles, 4, is_gated=is_gated)
        cubin.write_bytes(nvrtc.compile_cubin(_SOURCE, architecture, definitions))
        if not tool.exists():
            pytest.skip("needs nvdisasm")
        listing = subprocess.run(
            [tool, "-c", cubin], capture_output=True, text=True, check=True
        ).stdout
        assert len(re.findall(r"\bHMMA\b", listing)) == tiles.num_stages * 16
