"""Many pairs of packed experts in CUDA: the source compiled for a host, against the reference.

Beside it, what a host can see of the form for a GPU: it compiles, without waits between products.
"""

import ctypes
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
from stagecoach.kernels.moe import cuda, mxfp4_many_cuda
from stagecoach.kernels.moe.mxfp4_many_cuda import (
    ManyArguments,
    in_chunk_order,
    many_definitions,
)
from stagecoach.kernels.moe.mxfp4_tiles import (
    MOST_ROWS,
    ManyTiles,
    all_many_tiles,
    few_tiles,
    many_tiles,
)
from stagecoach.kernels.quantization import Mxfp4Weight, unpack_mxfp4

_SOURCE = Path(mxfp4_many_cuda.__file__).with_name("mxfp4_many.cu")
_HOST_DEVICE = Path(__file__).parent / "host_device" / "mxfp4_many_device.cuh"
_LAUNCH = """
extern "C" int size_of_arguments() { return sizeof(Arguments); }
extern "C" void launch_many(const Arguments *given, int num_blocks) {
    launch<Arguments>(multiply_many, *given, num_blocks, NUM_THREADS, NUM_PRODUCERS);
}
"""
_SITU = Activation("situ", 4.0, 25.0)
# By whether a product is gated: of three forms, and of two with more rows.
_TILES = {True: ManyTiles(48, 8, 16, 2), False: ManyTiles(16, 8, 16, 4)}
_NUM_EXPERTS = 3
# Pairs of each expert: more than a tile has, few, and some more.
_COUNTS = (35, 3, 12)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, ctypes.CDLL]:
    """By whether it is gated."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("mxfp4_many")
    for header in (_HOST_DEVICE, _HOST_DEVICE.with_name("host.cuh")):
        shutil.copy(header, folder)
    shutil.copy(_SOURCE.with_name("mxfp4_values.cuh"), folder)
    source = folder / "mxfp4_many.cpp"
    source.write_text(_SOURCE.read_text() + _LAUNCH)
    made = {}
    for is_gated, tiles in _TILES.items():
        library = folder / f"mxfp4_many_{is_gated}.so"
        values = many_definitions(tiles, is_gated=is_gated)
        definitions = [f"-D{name}={value}" for name, value in values.items()]
        options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *options, *definitions, source, "-o", library], check=True)
        made[is_gated] = ctypes.CDLL(str(library))
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
    is_gated: bool,
    blocks_of_rows: int,
) -> tuple[Tensor, cuda.SortedPairs]:
    order = cuda.sort_pairs(ids_TK, _NUM_EXPERTS, _TILES[is_gated].pairs)
    x = in_chunk_order(x)
    out_PO = torch.full((ids_TK.numel(), num_outputs), 7.0).bfloat16()
    names = ("pairs", "offsets", "tile_experts", "tile_rows", "num_tiles")
    arguments = ManyArguments(
        x=x.data_ptr(),
        packed=weight.packed.data_ptr(),
        scale=weight.scale.data_ptr(),
        out=out_PO.data_ptr(),
        x_row_bytes=x.stride(0) * 2,
        num_inputs=weight.shape[2],
        num_outputs=num_outputs,
        num_chosen=1,
        blocks_of_rows=blocks_of_rows,
        is_situ=1,
        is_bound=1,
        beta=_SITU.beta,
        linear_beta=_SITU.linear_beta,
        **{name: part.data_ptr() for name, part in zip(names, order, strict=True)},
    )
    assert library.size_of_arguments() == ctypes.sizeof(arguments)
    library.launch_many(ctypes.byref(arguments), 2)
    return out_PO, order


def _choices() -> Tensor:
    """Of tokens in no order, two of which are nobody's."""
    ids = [expert for expert, count in enumerate(_COUNTS) for _ in range(count)]
    ids_T1 = torch.tensor([*ids, -1, -1], dtype=torch.int32).view(-1, 1)
    return ids_T1[torch.randperm(len(ids_T1), generator=torch.Generator().manual_seed(3))]


def test_gate_and_up(libraries: dict[bool, ctypes.CDLL]) -> None:
    ids_TK = _choices()
    width, num_inputs = 128, 256
    weight = _packed(2 * width, num_inputs)
    x_TL = torch.randn(len(ids_TK), num_inputs + 8).bfloat16()[:, :num_inputs]
    x_TL[ids_TK[:, 0] < 0] = torch.nan
    out_PI, order = _run(
        libraries[True], x_TL, weight, ids_TK, width, is_gated=True, blocks_of_rows=1
    )
    num_real = sum(_COUNTS)
    assert (out_PI[num_real:] == 7).all()
    weight_EOI = unpack_mxfp4(weight, torch.float32)
    for place, pair in enumerate(order.pairs_P[:num_real].tolist()):
        both = weight_EOI[int(ids_TK[pair])] @ x_TL[pair].float()
        expected_I = in_chunk_order(_SITU(*both.chunk(2)).view(1, -1))[0]
        assert (out_PI[place] - expected_I).norm() < 4e-3 * expected_I.norm()


def test_down(libraries: dict[bool, ctypes.CDLL]) -> None:
    ids_TK = _choices()
    num_outputs, num_inputs = 768, 128
    weight = _packed(num_outputs, num_inputs)
    by_pair_PI = torch.randn(len(ids_TK), num_inputs).bfloat16()
    order = cuda.sort_pairs(ids_TK, _NUM_EXPERTS, _TILES[False].pairs)
    num_real = sum(_COUNTS)
    product_PI = torch.full_like(by_pair_PI, torch.nan)
    product_PI[:num_real] = by_pair_PI[order.pairs_P[:num_real].long()]
    out_PO, _ = _run(
        libraries[False],
        product_PI,
        weight,
        ids_TK,
        num_outputs,
        is_gated=False,
        blocks_of_rows=2,
    )
    weight_EOI = unpack_mxfp4(weight, torch.float32)
    for pair, expert in enumerate(ids_TK.flatten().tolist()):
        if expert < 0:
            assert (out_PO[pair] == 7).all()
            continue
        expected_O = weight_EOI[expert] @ by_pair_PI[pair].float()
        assert (out_PO[pair] - expected_O).norm() < 4e-3 * expected_O.norm()


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
@pytest.mark.parametrize("tiles", [all_many_tiles()[0], all_many_tiles()[-1]])
def test_compiles_for_hopper(tmp_path: Path, tiles: ManyTiles) -> None:
    """Each form's eight products a chunk in two groups, with nothing in local memory."""
    import triton

    cubin = tmp_path / "mxfp4_many.cubin"
    definitions = many_definitions(tiles, is_gated=False)
    cubin.write_bytes(nvrtc.compile_cubin(_SOURCE, "sm_90a", definitions))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("needs nvdisasm")
    listing = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    products = re.findall(r"\bHGMMA\.[^;]*", listing)
    num_forms = len({tiles.few_pairs, tiles.more_pairs, tiles.pairs})
    assert len(products) == num_forms * 8
    assert sum("gsb0" in product for product in products) == num_forms * 2
    assert not re.search(r"\b(LDL|STL)\b", listing)


@pytest.mark.parametrize("mean", [5, 11, 40, 70, 150, 400])
@pytest.mark.parametrize(("latent", "width"), [(3584, 384), (3584, 3072)])
def test_tiles_fit_a_processor(mean: int, latent: int, width: int) -> None:
    tiles = many_tiles(mean * 896, 896)
    assert tiles.rows <= MOST_ROWS
    assert tiles.num_stages >= 3 and tiles.shared_bytes <= 227 * 1024
    assert tiles.few_pairs <= tiles.more_pairs <= tiles.pairs
    for is_gated in (False, True):
        sizes = (latent, width) if is_gated else (width, latent)
        cut = tiles.cut(*sizes, 896, 132, is_gated=is_gated)
        assert cut.num_blocks == 132 and cut.blocks_of_rows >= 1


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(896, 16), (256, 8), (100, 6)])
def test_powers_of_two_meet_every_cut(num_experts: int, num_chosen: int) -> None:
    def cut(num_tokens: int) -> object:
        num_pairs = num_tokens * num_chosen
        few = few_tiles(num_pairs, num_experts, has_many=True)
        return few.is_sorted if few is not None else many_tiles(num_pairs, num_experts)

    met = {cut(2**power) for power in range(14)}
    assert {cut(num_tokens) for num_tokens in range(1, 2**13)} <= met
