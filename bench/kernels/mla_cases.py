"""Cases of latent attention and of the drafter's block attention, GPU against reference.

Each is called with a report that it adds lines to. Pools are NaN wherever nothing may be read.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.kernels.timing import Report, relative_error
from stagecoach.kernels.block_attention import cuda as block_cuda
from stagecoach.kernels.block_attention import reference as block_reference
from stagecoach.kernels.cache_rows import store_rows
from stagecoach.kernels.mla import cuda, reference
from stagecoach.kernels.mla.split_cuda import split_tile
from stagecoach.kernels.quantization import FP8_DTYPE
from stagecoach.kernels.ragged import BlockInputs, BlockRun, PackedBlocks, PackedGroup, RowLayout
from tests.packed_group import GroupPair, make_packed_group

_TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 2e-5}
_PAGE_SIZE = 64


class Sizes(NamedTuple):
    """Widths of an attention layer."""

    heads: int
    latent: int = 512
    pe: int = 64
    nope: int = 128
    value: int = 128


class CacheRows(NamedTuple):
    """How rows are cached."""

    page_size: int = _PAGE_SIZE
    dtype: torch.dtype | None = None  # that of the queries


def _pair(lengths: list[int], starts: list[int], page_size: int, **more: int) -> GroupPair:
    """Segments over shuffled pages; every window token but the first is a draft."""
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    counts = [-(-end // page_size) for end in ends]
    pages = list(range(1, sum(counts) + 9))
    random.Random(0).shuffle(pages)
    tables = [[pages.pop() for _ in range(count)] for count in counts]
    return make_packed_group(
        lengths,
        starts,
        num_drafts=[length - 1 for length in lengths],
        page_tables=tables,
        capacity_segments=len(lengths) + 3,
        capacity_tokens=sum(lengths) + 5,
        device="cuda",
        block_size=page_size,
        **more,  # type: ignore[arg-type]
    )


def _cache(pair: GroupPair, width: int, dtype: torch.dtype) -> Tensor:
    """A pool on the CPU: random rows of the contexts, zeros on page 0, NaN elsewhere."""
    if dtype == FP8_DTYPE:
        return _cache(pair, width, torch.float32).to(dtype)
    page_size = pair.packed.block_size
    num_rows = (int(pair.packed.pages_P.max()) + 9) * page_size
    cache_RD = torch.full((num_rows, width), float("nan"), dtype=dtype)
    cache_RD[:page_size] = 0
    rows_BL = pair.segments.context_rows_BL
    for rows_L, end in zip(rows_BL, pair.segments.context_lengths_B.tolist(), strict=True):
        cache_RD[rows_L[:end]] = torch.randn(end, width).to(dtype)
    return cache_RD


def _device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def check_decode(
    report: Report,
    *,
    sizes: Sizes,
    dtype: torch.dtype,
    window: int,
    spoils: bool,
    cached: CacheRows = CacheRows(),  # noqa: B008 (immutable)
    window_rows: int | None = None,
    num_repeats: int = 1,
) -> None:
    """Unless `window_rows` is given, in Triton; `num_repeats` times the segments."""
    lengths = [min(length, window) for length in (1, 8, 3, 5, 1, 2)] * num_repeats
    starts = [0, 63, 700, 5, 1800, 126] * num_repeats
    pair = _pair(lengths, starts, cached.page_size)
    num_real, num_tokens = pair.num_real_tokens, pair.packed.num_tokens
    cache_RD = _cache(pair, sizes.latent + sizes.pe, cached.dtype or dtype)
    q_THC = torch.randn(num_tokens, sizes.heads, sizes.latent).to(dtype)
    q_THP = torch.randn(num_tokens, sizes.heads, sizes.pe).to(dtype)
    q_THC[num_real:] = float("nan")
    scale = 1.5 / sizes.latent**0.5
    is_intact = torch.ones(num_real, dtype=torch.bool)
    if spoils:
        spoilt_D = torch.full((sizes.latent,), float("nan")).to(cache_RD.dtype)
        cache_RD[pair.segments.context_rows_BL[1, 66], : sizes.latent] = spoilt_D
        is_intact[1 + 3 : 1 + 8] = False
    expected = reference.mla_decode(
        q_THC[:num_real].double(),
        q_THP[:num_real].double(),
        cache_RD.double(),
        pair.segments,
        scale,
    )
    q_dev, pe_dev, cache_dev = _device(q_THC, q_THP, cache_RD)
    rows = sizes.heads * pair.packed.max_length
    o_dev = cuda.mla_decode(
        q_dev,
        pe_dev,
        cache_dev,
        pair.packed,
        scale,
        split_tile(rows, dtype) if window_rows is None else None,
        window_rows,
    )
    o_THC = o_dev[:num_real].cpu()
    form = "Triton" if window_rows is None else f"CUDA {window_rows}"
    name = f"decode {form} {dtype} H={sizes.heads} C={sizes.latent} W={window} spoilt={spoils}"
    name += f" x{num_repeats}" if num_repeats > 1 else ""
    name += f" {cached.dtype}" if cached.dtype else ""
    report.check(name, relative_error(o_THC[is_intact], expected[is_intact]), _TOLERANCE[dtype])
    if spoils:
        shown = o_THC[~is_intact].isnan().flatten(1).any(1).float().mean()
        report.check(f"{name}: shows what it saw", 1.0 - float(shown), 0.0)


def check_capture(report: Report, *, window_rows: int | None = None) -> None:
    """A graph captured with one step's values, replayed with another's in the same tensors."""
    dtype = torch.bfloat16
    bounds = {"max_length": 8, "max_context": 4096, "num_context": 0}
    first, second = (
        make_packed_group(
            lengths,
            starts,
            num_drafts=[length - 1 for length in lengths],
            capacity_segments=8,
            capacity_tokens=64,
            device="cuda",
            block_size=_PAGE_SIZE,
            bounds=bounds,
        )
        for lengths, starts in (([1, 1], [9, 70]), ([8, 1, 4, 2, 8], [3000, 1, 64, 511, 900]))
    )
    num_pages = second.packed.pages_P.numel()
    fixed = PackedGroup(*first.packed)._replace(
        pages_P=torch.zeros(num_pages, dtype=torch.int32, device="cuda")
    )
    fixed.pages_P[: first.packed.pages_P.numel()] = first.packed.pages_P
    cache_RD = _cache(second, 576, dtype)
    q_THC, q_THP = torch.randn(64, 32, 512).to(dtype), torch.randn(64, 32, 64).to(dtype)
    q_dev, pe_dev, cache_dev = _device(q_THC, q_THP, cache_RD)

    def run() -> Tensor:
        tile = split_tile(8 * 32, dtype) if window_rows is None else None
        return cuda.mla_decode(q_dev, pe_dev, cache_dev, fixed, 0.05, tile, window_rows)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_THC = run()
    for old, new in zip(fixed, second.packed, strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    num_real = second.num_real_tokens
    expected = reference.mla_decode(
        q_THC[:num_real].double(),
        q_THP[:num_real].double(),
        cache_RD.double(),
        second.segments,
        0.05,
    )
    error = relative_error(o_THC[:num_real].cpu(), expected)
    form = "Triton" if window_rows is None else f"CUDA {window_rows}"
    report.check(f"decode {form} captured, replayed with another step", error, _TOLERANCE[dtype])


def check_prefill(
    report: Report,
    *,
    sizes: Sizes,
    dtype: torch.dtype,
    page_size: int,
    cache_dtype: torch.dtype | None = None,
) -> None:
    lengths, starts = [300, 1, 129, 64], [0, 777, 64, 1000]
    pair = _pair(lengths, starts, page_size)
    num_real, num_tokens = pair.num_real_tokens, pair.packed.num_tokens
    cache_RD = _cache(pair, sizes.latent + sizes.pe, cache_dtype or dtype)
    q_THD = torch.randn(num_tokens, sizes.heads, sizes.nope + sizes.pe).to(dtype)
    q_THD[num_real:] = float("nan")
    head_width = sizes.nope + sizes.value
    kv_up_OC = (torch.randn(sizes.heads * head_width, sizes.latent) / sizes.latent**0.5).to(dtype)
    gate_THV = torch.randn(num_tokens, sizes.heads, sizes.value).to(dtype)
    scale = 1.5 / (sizes.nope + sizes.pe) ** 0.5
    expected = reference.mla_prefill(
        q_THD[:num_real].float(),
        cache_RD.float(),
        kv_up_OC.float(),
        pair.segments,
        scale,
        gate_THV[:num_real].float(),
    )
    q_dev, cache_dev, up_dev, gate_dev = _device(q_THD, cache_RD, kv_up_OC, gate_THV)
    for name, room in (("at once", 2**30), ("a head at a time", 1)):
        o_THV = cuda.mla_prefill(
            q_dev, cache_dev, up_dev, pair.packed, scale, gate_dev, max_expanded_bytes=room
        )
        report.check(
            f"prefill {dtype} H={sizes.heads} C={sizes.latent} page={page_size} "
            f"{cache_RD.dtype} {name}",
            relative_error(o_THV[:num_real].cpu(), expected),
            _TOLERANCE[dtype],
        )


def check_rest(report: Report, *, sizes: Sizes, dtype: torch.dtype) -> None:
    for num_tokens in (1, 19, 64, 100):
        x_THN = torch.randn(num_tokens, sizes.heads, sizes.nope + sizes.pe).to(dtype)
        x_THN = x_THN[..., : sizes.nope]
        weight_HCN = torch.randn(sizes.heads, sizes.latent, sizes.nope).to(dtype)
        gate_THC = torch.randn(num_tokens, sizes.heads, sizes.latent).to(dtype)
        for name, weight in (
            ("columns", weight_HCN.mT),
            ("rows", weight_HCN.mT.contiguous()),
        ):
            wide = x_THN.double(), weight.double(), gate_THC.double()
            y_THC = cuda.head_product(*_device(x_THN, weight, gate_THC))
            report.check(
                f"head product {dtype} T={num_tokens} {name}",
                relative_error(y_THC.cpu(), reference.head_product(*wide)),
                _TOLERANCE[dtype],
            )
    both_TD = torch.randn(7, 3 + sizes.latent + sizes.pe).to(dtype)[:, 3:]
    latent_TC, k_pe_TP = both_TD.tensor_split((sizes.latent,), dim=1)
    weight_C = torch.rand(sizes.latent).to(dtype)
    rows_T = torch.tensor([5, 40, 2, 99, 0, 0, 0])
    cache_RD = torch.full((128, sizes.latent + sizes.pe), 3.0, dtype=dtype)
    expected = cache_RD.double()
    reference.write_rows(
        expected, latent_TC[:4].double(), k_pe_TP[:4].double(), weight_C.double(), 1e-5, rows_T[:4]
    )
    rows_T[4:] = -1
    cache_dev, norm_dev, rows_dev = _device(cache_RD, weight_C, rows_T.int())
    latent_dev, pe_dev = both_TD.cuda().tensor_split((sizes.latent,), dim=1)
    cuda.write_rows(cache_dev, latent_dev, pe_dev, norm_dev, 1e-5, rows_dev)
    report.check(
        f"rows {dtype} C={sizes.latent}",
        relative_error(cache_dev.cpu(), expected),
        _TOLERANCE[dtype],
    )


def check_fp8_rows(report: Report) -> None:
    """E4M3 rows written by both writers: those of the reference, bit by bit but for a norm's."""
    latent_TC, k_pe_TP = (torch.randn(9, width).bfloat16() * 300 for width in (512, 64))
    weight_C = torch.rand(512).bfloat16() + 0.5
    rows_T = torch.tensor([5, 40, 2, 99, 7, 0, 0, 0, 0])
    rows_T[5:] = -1
    cache_RD = torch.full((128, 576), 3.0).to(FP8_DTYPE)
    expected = cache_RD.clone()
    real = slice(5)
    reference.write_rows(expected, latent_TC[real], k_pe_TP[real], weight_C, 1e-5, rows_T[real])
    cache_dev = cache_RD.cuda()
    cuda.write_rows(cache_dev, *_device(latent_TC, k_pe_TP, weight_C), 1e-5, rows_T.int().cuda())
    is_other = cache_dev.cpu().float() != expected.float()
    report.check("E4M3 rows: latents", is_other[:, :512].sum().item() / 2560, 2e-3)
    report.check("E4M3 rows: second part and the rest", is_other[:, 512:].sum().item(), 0.0)
    rows_TYD = torch.randn(9, 3, 80).bfloat16() * 300
    cache_YRD = torch.full((3, 128, 80), 3.0).to(FP8_DTYPE)
    stored_YRD = cache_YRD.cuda()
    store_rows(rows_TYD.cuda(), stored_YRD, rows_T.int().cuda())
    store_rows(rows_TYD, cache_YRD, rows_T)
    num_other = (stored_YRD.cpu().float() != cache_YRD.float()).sum().item()
    report.check("E4M3 rows of several layers", num_other, 0.0)


def check_blocks(
    report: Report,
    *,
    layout: RowLayout,
    num_heads: int,
    dtype: torch.dtype,
    is_causal: bool,
    cache_dtype: torch.dtype | None = None,
) -> None:
    starts, num_tokens = [5, 0, 64, 1500, 193], 7
    num_blocks, longest = len(starts), max(starts)
    own_width = layout.value_width if layout.has_own_values else 0
    width = layout.num_groups * (layout.key_width + layout.second_width + own_width)
    counts = [-(-start // _PAGE_SIZE) for start in starts]
    pages = list(range(1, sum(counts) + 1))
    random.Random(1).shuffle(pages)
    firsts = [sum(counts[:index]) for index in range(num_blocks)]
    cache_RX = torch.full(((sum(counts) + 4) * _PAGE_SIZE, width), float("nan")).to(dtype)
    cache_RX[:_PAGE_SIZE] = 0
    rows_NL = torch.zeros(num_blocks, longest, dtype=torch.int64)
    for block, start in enumerate(starts):
        places = torch.arange(start)
        page_ids = torch.tensor(pages)[firsts[block] + places // _PAGE_SIZE]
        rows_NL[block, :start] = page_ids * _PAGE_SIZE + places % _PAGE_SIZE
        cache_RX[rows_NL[block, :start]] = torch.randn(start, width).to(dtype)
    cache_RX = cache_RX.to(cache_dtype or dtype)

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    blocks = PackedBlocks(
        num_blocks=num_blocks + 2,
        max_context=2048,
        anchor_ids_N=int32([0] * (num_blocks + 2)),
        starts_N=int32([*starts, 0, 0]),
        is_real_N=int32([1] * num_blocks + [0, 0]),
        first_pages_N=int32([*firsts, 0, 0]),
        pages_P=int32(pages),
        block_size=_PAGE_SIZE,
        is_causal=is_causal,
    )
    inputs = BlockInputs(
        anchor_ids_N=torch.zeros(num_blocks, dtype=torch.int64),
        starts_N=torch.tensor(starts),
        context_rows_NL=rows_NL,
        runs=(BlockRun(num_blocks, longest),),
    )
    q_NKHD = torch.randn(
        num_blocks + 2, num_tokens, num_heads, layout.key_width + layout.second_width
    ).to(dtype)
    own_NKX = torch.randn(num_blocks + 2, num_tokens, width).to(dtype)
    own_NKX[num_blocks:] = float("nan")
    scale = 1.5 / layout.key_width**0.5
    expected = block_reference.attend_blocks(
        q_NKHD[:num_blocks].double(),
        cache_RX.double(),
        own_NKX[:num_blocks].double(),
        block_reference.block_places(inputs, num_tokens, is_causal=is_causal),
        layout,
        scale,
    )
    o_NKHV = block_cuda.attend_blocks(*_device(q_NKHD, cache_RX, own_NKX), blocks, layout, scale)
    report.check(
        f"blocks {dtype} G={layout.num_groups} H={num_heads} causal={is_causal} {cache_RX.dtype}",
        relative_error(o_NKHV[:num_blocks].cpu(), expected),
        _TOLERANCE[dtype],
    )


LATENT_ROWS = RowLayout(1, 512, 64, 512, has_own_values=False)
_SMALL_ROWS = RowLayout(1, 64, 16, 64, has_own_values=False)
GROUPED_ROWS = RowLayout(4, 128, 0, 128, has_own_values=True)


_DEMO = Sizes(8, 64, 16, 32, 32)


def _window_cases() -> list[Callable[[Report], None]]:
    """Those of the CUDA form."""
    windows = partial(check_decode, dtype=torch.bfloat16)
    return [
        *(
            partial(windows, sizes=Sizes(heads), window=1, spoils=False, window_rows=rows)
            for heads, rows in ((32, 32), (96, 48), (64, 64), (24, 32))
        ),
        *(
            partial(windows, sizes=Sizes(heads), window=8, spoils=True, window_rows=rows)
            for heads, rows in ((32, 64), (12, 48), (5, 32))
        ),
        partial(
            windows, sizes=Sizes(32), window=8, spoils=False, window_rows=32, cached=CacheRows(128)
        ),
        partial(windows, sizes=Sizes(32), window=1, spoils=False, window_rows=32, num_repeats=50),
        partial(check_capture, window_rows=64),
    ]


def fp8_cases() -> list[Callable[[Report], None]]:
    """Those of a cache of E4M3."""
    cached = CacheRows(dtype=FP8_DTYPE)
    decode = partial(check_decode, dtype=torch.bfloat16, cached=cached)
    types = {"dtype": torch.bfloat16, "cache_dtype": FP8_DTYPE}
    return [
        check_fp8_rows,
        *(
            partial(decode, sizes=Sizes(heads), window=window, spoils=window > 1, window_rows=rows)
            for heads, window, rows in ((32, 1, 32), (96, 1, 48), (32, 8, 64), (5, 8, 32))
        ),
        partial(decode, sizes=Sizes(32), window=1, spoils=False, window_rows=32, num_repeats=50),
        partial(decode, sizes=Sizes(12), window=1, spoils=False),
        partial(decode, sizes=Sizes(32), window=8, spoils=True),
        partial(decode, sizes=_DEMO, window=8, spoils=True, cached=CacheRows(16, FP8_DTYPE)),
        partial(
            check_decode,
            sizes=Sizes(24),
            dtype=torch.float32,
            cached=cached,
            window=8,
            spoils=True,
        ),
        partial(check_prefill, sizes=Sizes(12), page_size=64, **types),
        partial(check_prefill, sizes=_DEMO, page_size=16, **types),
        *(
            partial(check_blocks, layout=layout, num_heads=heads, is_causal=False, **types)
            for layout, heads in ((LATENT_ROWS, 32), (_SMALL_ROWS, 8), (GROUPED_ROWS, 32))
        ),
    ]


def check_cases() -> list[Callable[[Report], None]]:
    cases: list[Callable[[Report], None]] = [check_capture, *_window_cases(), *fp8_cases()]
    for dtype in (torch.float32, torch.bfloat16):
        for heads in (24,) if dtype == torch.float32 else (32, 24, 12, 96):
            cases += [
                partial(check_decode, sizes=Sizes(heads), dtype=dtype, window=8, spoils=False),
                partial(check_decode, sizes=Sizes(heads), dtype=dtype, window=1, spoils=False),
            ]
        cases += [
            partial(check_decode, sizes=Sizes(32), dtype=dtype, window=8, spoils=True),
            partial(
                check_decode, sizes=_DEMO, dtype=dtype, window=8, spoils=True, cached=CacheRows(16)
            ),
            partial(
                check_decode, sizes=_DEMO, dtype=dtype, window=1, spoils=False, cached=CacheRows(16)
            ),
            partial(check_prefill, sizes=Sizes(12), dtype=dtype, page_size=64),
            partial(check_prefill, sizes=_DEMO, dtype=dtype, page_size=16),
            partial(check_rest, sizes=Sizes(12), dtype=dtype),
            partial(check_rest, sizes=_DEMO, dtype=dtype),
        ]
        for is_causal in (False, True):
            cases += [
                partial(
                    check_blocks, layout=layout, num_heads=heads, dtype=dtype, is_causal=is_causal
                )
                for layout, heads in ((LATENT_ROWS, 32), (_SMALL_ROWS, 8), (GROUPED_ROWS, 32))
            ]
    return cases
