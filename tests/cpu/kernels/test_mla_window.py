"""Windows in CUDA: the source compiled for a host, thread by thread, against the reference.

Beside it, what a host can see of the form for Hopper: it compiles, and which instructions it has.
"""

import ctypes
import random
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
from stagecoach.kernels.mla import reference, window_cuda
from stagecoach.kernels.mla.window_cuda import WindowArguments, query_tile, window_definitions
from stagecoach.kernels.quantization import FP8_DTYPE
from tests.packed_group import make_packed_group

_SOURCE = Path(window_cuda.__file__).with_name("window.cu")
_HOST_DEVICE = Path(__file__).parent / "host_device" / "window_device.cuh"
_SCALE, _LATENT, _PE = 0.05, 512, 64
_LAUNCH = """
extern "C" int size_of_arguments() { return sizeof(Arguments); }
extern "C" void launch_windows(const Arguments *given, int num_blocks) {
    launch<Arguments>(attend_windows, *given, num_blocks, NUM_THREADS, NUM_CONSUMERS);
}
"""


class OnHost(NamedTuple):
    """The kernel with so many query rows a block, over a cache of E4M3 or of bfloat16."""

    rows: int
    is_fp8: bool
    library: ctypes.CDLL


@pytest.fixture(scope="module", params=[(32, False), (64, False), (32, True)])
def on_host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    rows, is_fp8 = request.param
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("window")
    own, host = _SOURCE.with_name("window_tiles.cuh"), _HOST_DEVICE.with_name("host.cuh")
    for header in (_HOST_DEVICE, host, own):
        shutil.copy(header, folder)
    source, library = folder / "window.cpp", folder / "window.so"
    source.write_text(_SOURCE.read_text() + _LAUNCH)
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
    values = window_definitions(rows, is_fp8=is_fp8)
    definitions = [f"-D{name}={value}" for name, value in values.items()]
    subprocess.run([compiler, *options, *definitions, source, "-o", library], check=True)
    return OnHost(rows, is_fp8, ctypes.CDLL(str(library)))


def _attend(
    on_host: OnHost,
    num_heads: int,
    lengths: list[int],
    starts: list[int],
    target_pieces: int,
    spoilt: tuple[int, int] | None = None,
    page_size: int = 64,
    query_sizes: tuple[float, ...] = (1.0,),
) -> tuple[Tensor, Tensor]:
    """What the kernel makes of ragged windows over shuffled pages, and the reference: [T, H, C].

    Latents are NaN wherever nothing may be read and at position `spoilt[1]` of one segment.
    """
    tile_rows, is_fp8, library = on_host
    torch.manual_seed(0)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    counts = [-(-end // page_size) for end in ends]
    pages = list(range(1, sum(counts) + 3))
    random.Random(0).shuffle(pages)
    pair = make_packed_group(
        lengths,
        starts,
        num_drafts=[length - 1 for length in lengths],
        page_tables=[[pages.pop() for _ in range(count)] for count in counts],
        capacity_segments=len(lengths) + 2,
        capacity_tokens=sum(lengths) + 3,
        block_size=page_size,
    )
    group, rows_BL = pair.packed, pair.segments.context_rows_BL
    cache_RD = torch.full(((sum(counts) + 4) * page_size, _LATENT + _PE), float("nan")).bfloat16()
    cache_RD[:page_size] = 0
    for rows_L, end in zip(rows_BL, ends, strict=True):
        cache_RD[rows_L[:end]] = torch.randn(end, _LATENT + _PE).bfloat16()
    if spoilt is not None:
        cache_RD[rows_BL[spoilt], :_LATENT] = float("nan")
    if is_fp8:
        cache_RD = cache_RD.to(FP8_DTYPE)
        rows = {"fp8_rows": cache_RD.data_ptr(), "fp8_row_bytes": cache_RD.stride(0)}
    else:
        rows = {"rows": (cache_RD.data_ptr(), cache_RD.stride(0) * 2)}
    num_real = sum(lengths)
    q_THC = torch.randn(group.num_tokens, num_heads, _LATENT).bfloat16()
    q_THP = torch.randn(group.num_tokens, num_heads, 2 * _PE).bfloat16()[..., _PE:]
    for head in range(num_heads):
        q_THC[:, head] *= query_sizes[head % len(query_sizes)]
        q_THP[:, head] *= query_sizes[head % len(query_sizes)]
    q_THC[num_real:], q_THP[num_real:] = float("nan"), float("nan")

    rows_per_piece = group.max_length * num_heads
    num_row_tiles = -(-rows_per_piece // tile_rows)
    num_pieces = target_pieces + group.num_segments
    partial_o = torch.full((num_pieces, rows_per_piece, _LATENT), float("nan"))
    partial_top = torch.full((num_pieces, rows_per_piece), float("nan"))
    pieces_S2 = torch.zeros(group.num_segments, 2, dtype=torch.int32)
    o_THC = torch.full_like(q_THC, 7.0)
    arguments = WindowArguments(
        **rows,
        q=q_THC.data_ptr(),
        q_pe=q_THP.data_ptr(),
        out=o_THC.data_ptr(),
        partial_o=partial_o.data_ptr(),
        partial_top=partial_top.data_ptr(),
        pieces=pieces_S2.data_ptr(),
        offsets=group.offsets_S.data_ptr(),
        starts=group.starts_B.data_ptr(),
        first_pages=group.first_pages_B.data_ptr(),
        page_ids=group.pages_P.data_ptr(),
        q_token_stride=q_THC.stride(0),
        q_head_stride=q_THC.stride(1),
        q_pe_token_stride=q_THP.stride(0),
        q_pe_head_stride=q_THP.stride(1),
        scale=_SCALE * 1.4426950408889634,
        num_segments=group.num_segments,
        num_heads=num_heads,
        num_row_tiles=num_row_tiles,
        rows_per_piece=rows_per_piece,
        target_pieces=target_pieces,
        page_size=page_size,
    )
    assert library.size_of_arguments() == ctypes.sizeof(arguments)
    library.launch_windows(ctypes.byref(arguments), num_pieces * num_row_tiles)

    assert (o_THC[num_real:] == 7).all(), "written for tokens that are nobody's"
    found_THC = torch.empty(num_real, num_heads, _LATENT)
    for length, first, (piece, count) in zip(
        lengths, group.offsets_S.tolist(), pieces_S2.tolist(), strict=False
    ):
        own = slice(first, first + length)
        if count == 1:
            found_THC[own] = o_THC[own].float()
            continue
        assert (o_THC[own] == 7).all(), "the sum of several pieces writes these"
        part = slice(piece, piece + count), slice(length * num_heads)
        shares = torch.exp2(partial_top[part] - partial_top[part].amax(0))
        # A weight of 0: nothing was seen there.
        o = torch.where(shares[..., None] == 0, 0, partial_o[part] * shares[..., None])
        found_THC[own] = (o.sum(0) / shares.sum(0)[:, None]).unflatten(0, (length, num_heads))
    real = slice(num_real)
    expected_THC = reference.mla_decode(
        q_THC[real].double(), q_THP[real].double(), cache_RD.double(), pair.segments, _SCALE
    )
    return found_THC, expected_THC


def _assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() < 4e-3 * expected.norm()


def test_ragged_windows(on_host: OnHost) -> None:
    """Contexts of one row, of one piece, of several; rows that fill no tile, and several."""
    _assert_close(*_attend(on_host, 24, [1, 2, 1], [0, 64, 500], 4))


def test_queries_of_any_size(on_host: OnHost) -> None:
    """Larger than float16 has, smaller than its least, and zeros."""
    sizes = (2.0**60, 2.0**-60, 0.0, 1.0, 2.0**9)
    found_THC, expected_THC = _attend(on_host, 5, [2, 1], [70, 20], 2, query_sizes=sizes)
    for head in range(5):
        _assert_close(found_THC[:, head], expected_THC[:, head])


def test_pages_of_several_tiles(on_host: OnHost) -> None:
    _assert_close(*_attend(on_host, 32, [1, 1], [200, 63], 3, page_size=128))


def test_a_draft_that_is_not_finite_reaches_no_token_before_it(
    on_host: OnHost,
) -> None:
    found_THC, expected_THC = _attend(on_host, 5, [8, 3], [63, 130], 3, spoilt=(0, 66))
    sees = torch.tensor([position >= 66 for position in range(63, 71)] + [False] * 3)
    _assert_close(found_THC[~sees], expected_THC[~sees])
    assert found_THC[sees].isnan().all()


def test_query_rows_of_a_block_are_as_few_as_can_be() -> None:
    tiles = {12: 32, 32: 32, 33: 48, 64: 64, 96: 48, 128: 64, 256: 64}
    assert {rows: query_tile(rows) for rows in tiles} == tiles


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
@pytest.mark.parametrize(
    ("rows", "is_fp8"), [(32, False), (48, False), (64, False), (32, True), (64, True)]
)
def test_compiles_for_hopper(rows: int, tmp_path: Path, *, is_fp8: bool) -> None:
    """Products by warpgroups, none waiting for the one before; no register in local memory."""
    cubin = tmp_path / "window.cubin"
    definitions = window_definitions(rows, is_fp8=is_fp8)
    cubin.write_bytes(nvrtc.compile_cubin(_SOURCE, "sm_90a", definitions))
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("needs nvdisasm")
    listing = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    # Of the scores each warpgroup makes half: of the columns, or of 64 rows all columns.
    num_products = 9 * 4 // (2 if rows < 64 else 1) + 4 * 4
    assert len(re.findall(r"\bHGMMA\b", listing)) == num_products
    assert len(re.findall(r"\bWARPGROUP\.DEPBAR\b", listing)) == 2
    assert not re.search(r"\b(LDL|STL)\b", listing)


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs cuda.bindings")
def test_too_little_shared_memory_is_an_error() -> None:
    definitions = window_definitions(32, is_fp8=False)
    definitions["SHARED_BYTES"] -= 64
    with pytest.raises(nvrtc.CudaCompileError, match="the host reserves less"):
        nvrtc.compile_cubin(_SOURCE, "sm_90a", definitions)
