"""Tokens and drafts on a GPU: the kernels behind their choice against reference and limit.

    python -m bench.kernels.sampling check|time

Dimensions: T rows, V vocabulary, B segments, N rows of the sampling table.
"""

# mypy: disable-error-code="no-untyped-def"

import sys
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.kernels.timing import (
    Report,
    graph_time_us,
    limit_us,
    num_rotations,
    relative_error,
    run_command,
)
from stagecoach.kernels.cache_rows import cuda as cache_rows_cuda
from stagecoach.kernels.cache_rows import reference as cache_rows_reference
from stagecoach.kernels.markov_bias import cuda as markov_cuda
from stagecoach.kernels.markov_bias import reference as markov_reference
from stagecoach.kernels.rope import cuda as rope_cuda
from stagecoach.kernels.rope import reference as rope_reference
from stagecoach.kernels.sampling import SamplingRows, cuda, reference
from stagecoach.kernels.sampling.noise import gumbel_noise
from stagecoach.kernels.sampling.reference import Choices
from stagecoach.kernels.sampling.sampling_kernel import gumbel_noise as kernel_noise
from tests.packed_group import make_packed_group

VOCAB_SIZE = 163_840
_TEMPERATURES = [0.0, 1.0, 0.7, 1e-300, 1.3, 0.0, 5.0]


def check(report: Report) -> None:
    """Every kernel against its reference: nothing may differ."""
    _check_noise(report)
    for vocab_size, num_rows in ((1003, 9), (4, 3), (VOCAB_SIZE, 1), (VOCAB_SIZE, 65)):
        for dtype in (torch.float32, torch.bfloat16):
            for has_addend in (False, True):
                _check_choice(report, num_rows, vocab_size, dtype, has_addend=has_addend)
    _check_not_finite(report)
    _check_replay(report)
    _check_accepted(report)
    _check_store(report)
    _check_markov(report)
    _check_rope(report)


@triton.jit
def _noise_kernel(out, seeds, positions, num_tokens, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    noise = kernel_noise(tl.load(seeds + row), tl.load(positions + row), tokens)
    tl.store(out + row * num_tokens + tokens, noise, mask=tokens < num_tokens)


def _check_noise(report: Report) -> None:
    """The words are equal, so the noise is but for the last bits of two logarithms."""
    seeds = torch.tensor([0, 1, -5, 2**62 + 17, -(2**63)], device="cuda")
    positions = torch.tensor([0, 1, 2**31 - 1, 2**33 + 5, 2**40], device="cuda")
    num_tokens = 20_000
    out = torch.full((len(seeds), num_tokens), torch.nan, dtype=torch.float64, device="cuda")
    grid = (triton.cdiv(num_tokens, 512), len(seeds))
    _noise_kernel[grid](out, seeds, positions, num_tokens, BLOCK=512)
    expected = gumbel_noise(seeds.cpu(), positions.cpu(), num_tokens, "cpu")
    report.check("noise", float((out.cpu() - expected).abs().max()), 1e-14)


def _rows(num_rows: int, *, segmented: bool, device: str = "cuda") -> SamplingRows:
    """Every temperature in turn; some rows are nobody's."""
    num_table = len(_TEMPERATURES)
    parameters = torch.zeros(num_table, 6, dtype=torch.float64)
    parameters[:, 0] = torch.tensor(_TEMPERATURES, dtype=torch.float64)
    num_segments = (num_rows + 1) // 2 if segmented else num_rows
    sampling_rows = torch.arange(num_segments, dtype=torch.int32) % num_table
    sampling_rows[5::9] = -1
    segments = None
    if segmented:
        segments = torch.arange(num_rows, dtype=torch.int32) // 2
        segments[4::11] = -1
        segments = segments.to(device)
    return SamplingRows(
        sampling_rows.to(device),
        segments,
        torch.arange(100, 100 + num_rows, dtype=torch.int32, device=device),
        1,
        parameters.to(device)[:, 0],
        torch.arange(num_table, device=device) * 2**40 - 3,
    )


def _logits(num_rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Rows of a wider matrix, with ties at the top of some."""
    logits_TV = 3 * torch.randn(num_rows, vocab_size + 8, device="cuda")
    logits_TV[::3] = logits_TV[::3].round()
    return logits_TV.to(dtype)[:, :vocab_size]


def _num_different(choices: Choices, expected: Choices) -> float:
    return float(
        sum((one.cpu() != other.cpu()).sum() for one, other in zip(choices, expected, strict=True))
    )


def _check_choice(
    report: Report, num_rows: int, vocab_size: int, dtype: torch.dtype, *, has_addend: bool
) -> None:
    torch.manual_seed(num_rows)
    logits_TV = _logits(num_rows, vocab_size, dtype)
    addend_TV = torch.randn(num_rows, vocab_size, device="cuda") if has_addend else None
    rows = _rows(num_rows, segmented=not has_addend)
    choices = cuda.choose_tokens(logits_TV, rows, addend_TV)
    expected = reference.choose_tokens(logits_TV, rows, addend_TV)
    name = f"choose T {num_rows} V {vocab_size} {str(dtype)[6:]} addend {has_addend}"
    report.check(name, _num_different(choices, expected), 0)
    if num_rows < 10:
        at_cpu = rows._replace(
            sampling_rows_B=rows.sampling_rows_B.cpu(),
            segment_T=None if rows.segment_T is None else rows.segment_T.cpu(),
            positions_T=rows.positions_T.cpu(),
            temperatures_N=rows.temperatures_N.cpu(),
            seeds_N=rows.seeds_N.cpu(),
        )
        addend_cpu = None if addend_TV is None else addend_TV.cpu()
        expected = reference.choose_tokens(logits_TV.cpu(), at_cpu, addend_cpu)
        report.check(f"{name} (CPU)", _num_different(choices, expected), 0)


def _check_not_finite(report: Report) -> None:
    """Rows with NaN or infinity are known, disturb no other, and give an id of the vocabulary."""
    logits_TV = _logits(12, 5000, torch.float32).clone()
    clean = cuda.choose_tokens(logits_TV, _rows(12, segmented=False))
    logits_TV[0, 4999] = torch.nan
    logits_TV[1, 0] = torch.inf
    logits_TV[2, 2500] = -torch.inf
    logits_TV[5] = torch.nan  # nobody's
    logits_TV[4] = torch.nan
    choices = cuda.choose_tokens(logits_TV, _rows(12, segmented=False))
    flags = choices.is_finite_T.tolist()
    report.check("finite flags", float(flags != [0, 0, 0, 1, 0] + [1] * 7), 0)
    ids = choices.token_ids_T
    report.check("ids in the vocabulary", float(((ids < 0) | (ids >= 5000)).sum()), 0)
    report.check("other rows", float((ids[5:] != clean.token_ids_T[5:]).sum()), 0)


def _check_replay(report: Report) -> None:
    """A captured choice follows the values in its tensors."""
    logits_TV = _logits(8, VOCAB_SIZE, torch.bfloat16)
    rows = _rows(8, segmented=True)
    cuda.choose_tokens(logits_TV, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choices = cuda.choose_tokens(logits_TV, rows)
    for turn in range(3):
        logits_TV.copy_(_logits(8, VOCAB_SIZE, torch.bfloat16))
        rows.positions_T.add_(turn)
        rows.temperatures_N.copy_(rows.temperatures_N.roll(1))
        rows.sampling_rows_B.copy_(rows.sampling_rows_B.roll(1))
        graph.replay()
        expected = reference.choose_tokens(logits_TV, rows)
        report.check(f"choose, replay {turn}", _num_different(choices, expected), 0)


def _check_accepted(report: Report) -> None:
    num_drafts = [7, 0, 3, 5, 1, 7, 2]
    group = make_packed_group(
        [1 + drafts for drafts in num_drafts],
        [40 + index for index in range(7)],
        num_drafts=num_drafts,
        capacity_segments=9,
        capacity_tokens=40,
        device="cuda",
    ).packed
    sampling_rows_B = torch.tensor([3, 1, 0, -1, 2, 5, 4, -1, -1], dtype=torch.int32)
    forced = torch.tensor([-1, -1, 9, 2, 0, 4, -1, 3, -1], dtype=torch.int32)
    for seed in range(4):
        torch.manual_seed(seed)
        token_ids_T = torch.randint(3, (40,), dtype=torch.int32)
        choices = Choices(
            token_ids_T.roll(-1) - (torch.rand(40) < 0.2).int(),
            (torch.rand(40) > 0.2).int(),
        )
        at_cpu = group._replace(
            offsets_S=group.offsets_S.cpu(),
            starts_B=group.starts_B.cpu(),
            num_drafts_B=group.num_drafts_B.cpu(),
        )
        on_gpu = Choices(*(item.cuda() for item in choices))
        expected = reference.count_accepted(choices, token_ids_T, at_cpu, sampling_rows_B, forced)
        answer = cuda.count_accepted(
            on_gpu, token_ids_T.cuda(), group, sampling_rows_B.cuda(), forced.cuda()
        )
        num_different = sum(
            int((one.cpu() != other).sum()) for one, other in zip(answer, expected, strict=True)
        )
        num_different += int((on_gpu.token_ids_T.cpu() != choices.token_ids_T).sum())
        report.check(f"count accepted, seed {seed}", float(num_different), 0)


def _check_store(report: Report) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows_TYD = torch.randn(17, 5, 600, device="cuda", dtype=dtype)[:, :, :576]
        cache_YRD = torch.full((5, 64, 576), torch.nan, device="cuda", dtype=dtype)
        expected = cache_YRD.clone()
        cache_rows_T = (torch.randperm(63, device="cuda")[:17] + 1).to(torch.int32)
        cache_rows_T[5] = cache_rows_T[16] = -1
        cache_rows_cuda.store_rows(rows_TYD, cache_YRD, cache_rows_T)
        cache_rows_reference.store_rows(rows_TYD, expected, cache_rows_T)
        is_same = torch.equal(cache_YRD.nan_to_num(7.5), expected.nan_to_num(7.5))
        report.check(f"store rows {str(dtype)[6:]}", float(not is_same), 0)


def _check_markov(report: Report) -> None:
    """W2 as bfloat16 gives what it gives as float32: sums are float32 either way."""
    for num_rows in (1, 7, 64, 70):
        for vocab_size, rank in ((1003, 16), (20_000, 256)):
            logits_NKV = torch.randn(num_rows, 3, vocab_size, device="cuda")
            logits_NV = logits_NKV[:, 1]
            ids_NK = torch.randint(vocab_size, (num_rows, 4), dtype=torch.int32, device="cuda")
            first_VM, second_VM = torch.randn(2, vocab_size, rank, device="cuda").bfloat16()
            expected_NV = markov_reference.add_markov_bias(
                logits_NV.double(), ids_NK[:, 2], first_VM.double(), second_VM.double()
            )
            for dtype in (torch.bfloat16, torch.float32):
                out_NV = markov_cuda.add_markov_bias(
                    logits_NV, ids_NK[:, 2], first_VM.to(dtype), second_VM.to(dtype)
                )
                name = f"markov bias N {num_rows} V {vocab_size} M {rank} {str(dtype)[6:]}"
                report.check(name, relative_error(out_NV, expected_NV), 1e-6)


def _check_rope(report: Report) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        for num_heads, width, offset in ((1, 64, 512), (96, 64, 128), (3, 40, 8)):
            wide = torch.randn(5, 7, num_heads, offset + width, device="cuda").to(dtype)
            x = wide[..., offset:]
            angles = 100 * torch.rand(5, 7, width // 2, device="cuda")
            for has_neighbour_pairs in (False, True):
                out = rope_cuda.rotate_pairs(
                    x, angles.cos(), angles.sin(), has_neighbour_pairs=has_neighbour_pairs
                )
                expected = rope_reference.rotate_pairs(
                    x.double(),
                    angles.cos().double(),
                    angles.sin().double(),
                    has_neighbour_pairs=has_neighbour_pairs,
                )
                name = f"rope {num_heads} x {width} {str(dtype)[6:]} {has_neighbour_pairs}"
                report.check(name, relative_error(out, expected), tolerance)


def _time_markov(report: Report) -> None:
    rank = 256
    tiles = [
        markov_cuda.BiasTile(128, 64, 4, 4),
        markov_cuda.BiasTile(128, 128, 4, 3),
        markov_cuda.BiasTile(64, 128, 4, 3),
        markov_cuda.BiasTile(64, 256, 4, 2),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        weights = [torch.randn(VOCAB_SIZE, rank, device="cuda").to(dtype) for _ in range(2)]
        for num_rows in (1, 16, 64):
            logits_NV = torch.randn(num_rows, VOCAB_SIZE, device="cuda")
            ids_N = torch.randint(VOCAB_SIZE, (num_rows,), dtype=torch.int32, device="cuda")
            num_bytes = VOCAB_SIZE * (rank * dtype.itemsize + 8 * num_rows)
            for tile in tiles if dtype == torch.bfloat16 else tiles[:1]:
                call = partial(markov_cuda.add_markov_bias, logits_NV, ids_N, weights[0])
                microseconds = graph_time_us(
                    [partial(call, second, tile) for second in weights], iterations=8, repeats=3
                )
                name = f"markov N {num_rows} {str(dtype)[6:]} {tuple(tile)}"
                report.time(name, microseconds, limit_us(num_bytes))


def time(report: Report) -> None:
    _time_markov(report)
    tiles = {
        torch.float32: [
            cuda.ColumnTile(1024, 512, 4),
            cuda.ColumnTile(2048, 512, 4),
            cuda.ColumnTile(2048, 1024, 4),
            cuda.ColumnTile(4096, 1024, 4),
        ],
        torch.bfloat16: [cuda.ColumnTile(2048, 512, 4), cuda.ColumnTile(4096, 1024, 4)],
    }
    for num_rows in (1, 64, 512):
        for dtype in (torch.float32, torch.bfloat16):
            num_bytes = num_rows * VOCAB_SIZE * dtype.itemsize
            inputs = [
                torch.randn(num_rows, VOCAB_SIZE, device="cuda").to(dtype)
                for _ in range(num_rotations(num_bytes))
            ]
            for temperature in (0.0, 1.0):
                rows = SamplingRows(
                    torch.zeros(num_rows, dtype=torch.int32, device="cuda"),
                    None,
                    torch.arange(num_rows, dtype=torch.int32, device="cuda"),
                    1,
                    torch.full((1,), temperature, dtype=torch.float64, device="cuda"),
                    torch.ones(1, dtype=torch.int64, device="cuda"),
                )
                times = {
                    tile: graph_time_us(
                        [partial(cuda.choose_tokens, logits, rows, tile=tile) for logits in inputs],
                        iterations=8,
                        repeats=3,
                    )
                    for tile in tiles[dtype]
                }
                for tile, microseconds in times.items():
                    name = (
                        f"choose T {num_rows} {str(dtype)[6:]} temperature {temperature:g} "
                        f"{tile.columns}/{tile.part} warps {tile.num_warps}"
                    )
                    report.time(name, microseconds, limit_us(num_bytes))


if __name__ == "__main__":
    sys.exit(run_command("sampling", __doc__, {"check": check, "time": time}))
