"""The choice of tokens and the count of drafts, as a device's kernels make them, interpreted."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from stagecoach.kernels.cache_rows import cuda as cache_rows_cuda
from stagecoach.kernels.cache_rows import reference as cache_rows_reference
from stagecoach.kernels.sampling import Choices, SamplingRows, cuda, reference
from stagecoach.kernels.sampling.noise import gumbel_noise
from stagecoach.kernels.sampling.sampling_kernel import gumbel_noise as kernel_noise
from stagecoach.kernels.sampling.sampling_kernel import rough_gumbel_noise
from stagecoach.request import SamplingParams
from stagecoach.runner.sampler import choose_tokens
from stagecoach.runner.sampling_table import SamplingTable
from stagecoach.schedule.step_plan import SamplingEntry
from stagecoach.schedule.verify_window import VerifyWindow
from tests.compiling_process import run_compiling
from tests.cpu.kernels.sampling_cases import (
    TEMPERATURES,
    assert_same,
    make_logits,
    make_rows,
)
from tests.packed_group import make_packed_group

torch.set_num_threads(1)
# The interpreter's numpy warns of what a kernel may do: overflow to infinity, NaN from it.
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

SMALL = cuda.ColumnTile(64, 64, 1)


@triton.jit
def _noise_kernel(out, seeds, positions, width, NUM_TOKENS: tl.constexpr):
    row = tl.program_id(0)
    tokens = tl.arange(0, NUM_TOKENS)
    noise = kernel_noise(tl.load(seeds + row), tl.load(positions + row), 12 + tokens)
    tl.store(out + row * width + tokens, noise)


def test_the_noise_is_that_of_the_specification() -> None:
    """Bit for bit, where the logarithms are the same: from token 12 on."""
    seeds_R = torch.tensor([0, 1, -5, 2**62 + 17, -(2**63)])
    positions_R = torch.tensor([0, 1, 2**31 - 1, 2**33 + 5, 2**40])
    out_RV = torch.full((5, 128), torch.nan, dtype=torch.float64)
    _noise_kernel[(5,)](out_RV, seeds_R, positions_R, 128, NUM_TOKENS=128)
    expected_RV = gumbel_noise(seeds_R, positions_R, 140, "cpu")[:, 12:]
    assert torch.equal(out_RV, expected_RV)


@triton.jit
def _rough_noise_kernel(out, words, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, rough_gumbel_noise(tl.load(words + places).to(tl.uint32)))


def test_the_rough_noise_is_as_close_as_it_says() -> None:
    """At both ends, around the middle, and evenly between."""
    near = torch.arange(2**16)
    words = torch.cat((near, 2**31 - 2**15 + near, 2**32 - 2**16 + near, near * (2**16 + 1)))
    rough = torch.full((len(words),), torch.nan)
    _rough_noise_kernel[(16,)](rough, words, BLOCK=2**14)
    exact = -torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))
    assert exact.max() > 22 and exact.min() < -3
    assert (rough - exact).abs().max() < 2.5e-4


@pytest.mark.parametrize("gap", [0.0, 1e-6, 1e-3])
def test_choices_that_float32_cannot_tell_apart_are_made_in_float64(gap: float) -> None:
    """Logits that take the noise away again, so that many columns are nearly as good."""
    torch.manual_seed(0)
    rows = make_rows(9, "cpu", has_segments=False)
    temperatures_T = rows.temperatures_N[rows.sampling_rows_B.clamp_min(0)].clamp_min(1e-3)
    seeds_T = rows.seeds_N[rows.sampling_rows_B.clamp_min(0)]
    positions_T = rows.positions_T + rows.position_offset
    noise_TV = gumbel_noise(seeds_T, positions_T.to(torch.int64), 131, "cpu")
    wanted_TV = gap * torch.rand(9, 131, dtype=torch.float64)
    logits_TV = ((wanted_TV - noise_TV) * temperatures_T.unsqueeze(1)).to(torch.float32)
    expected = reference.choose_tokens(logits_TV, rows)
    assert_same(cuda.choose_tokens(logits_TV, rows, tile=SMALL), expected)


@pytest.mark.parametrize("vocab_size", [3, 128, 131])
@pytest.mark.parametrize("has_addend", [False, True])
def test_choices_are_those_of_the_reference(vocab_size: int, has_addend: bool) -> None:
    torch.manual_seed(vocab_size)
    logits_TV = make_logits(9, vocab_size, torch.float32, "cpu")
    addend_TV = torch.randn(9, vocab_size) if has_addend else None
    rows = make_rows(9, "cpu", has_segments=not has_addend)
    expected = reference.choose_tokens(logits_TV, rows, addend_TV)
    assert_same(cuda.choose_tokens(logits_TV, rows, addend_TV, tile=SMALL), expected)


def test_the_reference_says_what_the_sampler_says() -> None:
    """Of rows with a temperature and nothing else, for float32 and float64 logits."""
    torch.manual_seed(0)
    table = SamplingTable(len(TEMPERATURES), 500, "cpu")
    table.admit(
        SamplingEntry(
            row=row,
            request_id=row,
            params=SamplingParams(temperature=temperature),
            seed=2**40 * row - 3,
            stop_token_ids=(),
            num_prompt_tokens=1,
        )
        for row, temperature in enumerate(TEMPERATURES)
    )
    num_rows = 40
    table_rows = [row % len(TEMPERATURES) for row in range(num_rows)]
    positions_T = torch.arange(num_rows) + 2**32 - 20
    for dtype in (torch.float32, torch.float64):
        logits_TV = (3 * torch.randn(num_rows, 500, dtype=dtype)).round(decimals=1)
        rows = SamplingRows(
            torch.tensor(table_rows, dtype=torch.int32),
            None,
            positions_T - 1,
            1,
            table.temperatures_N,
            table.seeds_N,
        )
        expected_T = choose_tokens(logits_TV, table_rows, positions_T, table)
        assert reference.choose_tokens(logits_TV, rows).token_ids_T.tolist() == expected_T.tolist()


def test_a_row_that_is_not_finite_is_known_and_disturbs_no_other() -> None:
    torch.manual_seed(1)
    logits_TV = make_logits(12, 101, torch.float32, "cpu")
    rows = make_rows(12, "cpu", has_segments=False)
    clean = cuda.choose_tokens(logits_TV, rows, tile=SMALL)
    logits_TV[0, 100] = torch.nan
    logits_TV[1, 0] = torch.inf
    logits_TV[2, 70] = -torch.inf
    logits_TV[5] = torch.nan  # nobody's
    logits_TV[4] = torch.nan
    choices = cuda.choose_tokens(logits_TV, rows, tile=SMALL)
    assert choices.is_finite_T.tolist() == [0, 0, 0, 1, 0] + [1] * 7
    assert all(0 <= token_id < 101 for token_id in choices.token_ids_T.tolist())
    assert choices.token_ids_T[5:].tolist() == clean.token_ids_T[5:].tolist()


def test_choices_go_where_they_are_asked_to() -> None:
    """Ids with gaps between them, as the columns of a block."""
    logits_TV = make_logits(6, 70, torch.float32, "cpu")
    rows = make_rows(6, "cpu", has_segments=False)
    ids_TK = torch.full((6, 3), -7, dtype=torch.int32)
    out = Choices(ids_TK[:, 1], torch.empty(6, dtype=torch.int32))
    cuda.choose_tokens(logits_TV, rows, out=out, tile=SMALL)
    expected = reference.choose_tokens(logits_TV, rows)
    assert ids_TK[:, 1].tolist() == expected.token_ids_T.tolist()
    assert (ids_TK[:, ::2] == -7).all()


NUM_DRAFTS = [7, 0, 3, 5, 1, 7, 2]


@pytest.mark.parametrize("seed", range(4))
def test_accepted_drafts_are_those_of_the_window_rule(seed: int) -> None:
    """Judged, forced and idle segments side by side, behind them room for two more."""
    torch.manual_seed(seed)
    lengths = [1 + count for count in NUM_DRAFTS]
    starts = [40 + index for index in range(len(lengths))]
    group = make_packed_group(
        lengths, starts, num_drafts=NUM_DRAFTS, capacity_segments=9, capacity_tokens=40
    ).packed
    sampling_rows_B = torch.tensor([3, 1, 0, -1, 2, 5, 4, -1, -1], dtype=torch.int32)
    forced_B = torch.tensor([-1, -1, 9, 2, 0, 4, -1, 3, -1], dtype=torch.int32)
    token_ids_T = torch.randint(3, (40,), dtype=torch.int32)
    chosen_T = token_ids_T.roll(-1) - (torch.rand(40) < 0.2).int()
    is_finite_T = (torch.rand(40) > 0.2).int()
    answers = []
    for count in (reference.count_accepted, cuda.count_accepted):
        choices = Choices(chosen_T.clone(), is_finite_T.clone())
        answers.append((choices, count(choices, token_ids_T, group, sampling_rows_B, forced_B)))
    (choices, answer), (kernel_choices, kernel_answer) = answers
    for one, other in zip((*choices, *answer), (*kernel_choices, *kernel_answer), strict=True):
        assert one.tolist() == other.tolist()
    first = 0
    for index, length in enumerate(lengths):
        ids = token_ids_T[first : first + length].tolist()
        if sampling_rows_B[index] < 0:
            assert answer.newest_2B[:, index].tolist() == [0, 0]
            first += length
            continue
        window = VerifyWindow(starts[index], tuple(ids[1:]))
        sampled = chosen_T[first : first + length].tolist()
        forced = int(forced_B[index])
        if forced >= 0:
            num_accepted = min(forced, length - 1)
            row = (*ids[1 : 1 + num_accepted], sampled[num_accepted])
        else:
            row = window.row(sampled)
        assert int(answer.num_accepted_B[index]) == len(row) - 1
        assert tuple(choices.token_ids_T[first : first + len(row)].tolist()) == row
        newest = [row[-1], starts[index] + len(row)]
        assert answer.newest_2B[:, index].tolist() == newest
        is_finite = is_finite_T[first : first + len(row)].min()
        assert int(answer.is_finite_B[index]) == int(is_finite)
        first += length


def test_rows_are_stored_where_the_step_says() -> None:
    """In every layer, and nowhere for tokens that are nobody's."""
    for dtype in (torch.float32, torch.bfloat16):
        rows_TYD = torch.randn(9, 3, 50).to(dtype)[:, :, :40]
        cache_YRD = torch.full((3, 32, 40), torch.nan, dtype=dtype)
        cache_rows_T = (torch.randperm(31)[:9] + 1).to(torch.int32)
        cache_rows_T[4] = cache_rows_T[8] = -1
        expected_YRD = cache_YRD.clone()
        cache_rows_reference.store_rows(rows_TYD, expected_YRD, cache_rows_T)
        cache_rows_cuda.store_rows(rows_TYD, cache_YRD, cache_rows_T)
        assert _bits(cache_YRD) == _bits(expected_YRD)
        assert cache_YRD.isnan().all(-1).sum() == 3 * (32 - 7)


def _bits(tensor: Tensor) -> bytes:
    return tensor.nan_to_num(1e9).view(torch.uint8).numpy().tobytes()


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stagecoach.kernels.sampling import sampling_kernel

POINTERS = {
    "logits": "*bf16", "addends": "*fp32", "block_best": "*fp32", "block_drawn": "*fp32",
    "temperatures": "*fp64", "seeds": "*i64",
}
SIZES = {"num_columns", "num_blocks", "position_offset"}
CONSTANTS = {
    "HAS_ADDEND": True, "HAS_SEGMENTS": True, "BLOCK_V": 2048, "PART_V": 512, "MOST_BLOCKS": 128,
    "MOST_TOKENS": 8,
}
for name in ("scan_kernel", "draw_kernel", "reduce_kernel", "count_accepted_kernel"):
    kernel = getattr(sampling_kernel, name)
    signature, constants = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in CONSTANTS:
            signature[argument] = "constexpr"
            constants[place,] = CONSTANTS[argument]
        elif argument in SIZES or argument.endswith("_stride"):
            signature[argument] = "i32"
        else:
            signature[argument] = POINTERS.get(argument, "*i32")
    compiled = triton.compile(
        ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32)
    )
    print(name, len(compiled.asm["cubin"]))
"""


def test_kernels_compile_for_hopper() -> None:
    assert len(run_compiling("-c", _COMPILE).stdout.splitlines()) == 4
