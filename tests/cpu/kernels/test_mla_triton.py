"""Latent and block attention's Triton kernels, interpreted in float32, against the references.

Pools are NaN wherever nothing may be read; tokens that are nobody's are NaN throughout.
"""

import random

import pytest
import torch
from torch import Tensor

from stagecoach.kernels.block_attention import reference as block_reference
from stagecoach.kernels.mla import reference
from stagecoach.kernels.quantization import FP8_DTYPE
from stagecoach.kernels.ragged import BlockInputs, BlockRun, PackedBlocks, RowLayout
from tests.packed_group import GroupPair, make_packed_group

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("interpreted only where there is no GPU", allow_module_level=True)

from stagecoach.kernels.block_attention import cuda as block_cuda
from stagecoach.kernels.cache_rows import cuda as cache_rows_cuda
from stagecoach.kernels.cache_rows import store_rows
from stagecoach.kernels.mla import cuda
from stagecoach.kernels.mla.split_cuda import (
    Segments,
    SplitTile,
    fits_descriptors,
    query_tile,
)

NUM_HEADS, LATENT, PE, NOPE, VALUE = 3, 20, 6, 10, 8
PAGE_SIZE, SCALE = 8, 0.3
_close = {"rtol": 1e-5, "atol": 2e-6}

TILE = SplitTile(16, 16, 4, 1)
LATENT_ROWS = RowLayout(1, LATENT, PE, LATENT, has_own_values=False)
GROUPED_ROWS = RowLayout(2, 12, 0, 12, has_own_values=True)


class Step:
    """Windows or chunks over shuffled pages, three places and four tokens more than are real."""

    def __init__(self, lengths: list[int], starts: list[int], width: int = LATENT + PE) -> None:
        torch.manual_seed(len(lengths))
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        counts = [-(-end // PAGE_SIZE) for end in ends]
        pages = list(range(1, sum(counts) + 3))
        random.Random(0).shuffle(pages)
        self.pair: GroupPair = make_packed_group(
            lengths,
            starts,
            num_drafts=[length - 1 for length in lengths],
            page_tables=[[pages.pop() for _ in range(count)] for count in counts],
            capacity_segments=len(lengths) + 3,
            capacity_tokens=sum(lengths) + 4,
            block_size=PAGE_SIZE,
        )
        self.num_real = sum(lengths)
        self.num_tokens = self.num_real + 4
        self.cache_RD = torch.full(((sum(counts) + 4) * PAGE_SIZE, width), float("nan"))
        self.cache_RD[:PAGE_SIZE] = 0
        self.rows_BL = self.pair.segments.context_rows_BL
        for rows_L, end in zip(self.rows_BL, ends, strict=True):
            self.cache_RD[rows_L[:end]] = torch.randn(end, width)

    def draw(self, *shape: int) -> Tensor:
        """[T, ...] of which only the real tokens are numbers."""
        x = torch.randn(self.num_tokens, *shape)
        x[self.num_real :] = float("nan")
        return x

    def decode(self, q_THC: Tensor, q_THP: Tensor, form: SplitTile) -> Tensor:
        return cuda.mla_decode(q_THC, q_THP, self.cache_RD, self.pair.packed, SCALE, form)[
            : self.num_real
        ]

    def expected(self, q_THC: Tensor, q_THP: Tensor) -> Tensor:
        real = slice(0, self.num_real)
        return reference.mla_decode(
            q_THC[real], q_THP[real], self.cache_RD, self.pair.segments, SCALE
        )


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([1, 4, 2], [40, 33, 0]),  # ragged windows, also at a prompt's beginning
        ([1, 1], [400, 7]),  # one context in several pieces
        ([7], [15]),  # rows of queries in two tiles, a window over a tile's border
    ],
)
def test_windows(lengths: list[int], starts: list[int]) -> None:
    step = Step(lengths, starts)
    queries = step.draw(NUM_HEADS, LATENT), step.draw(NUM_HEADS, PE)
    o_THC = step.decode(*queries, TILE)
    torch.testing.assert_close(o_THC, step.expected(*queries), **_close)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_of_e4m3() -> None:
    """Windows with a draft that is no number, and chunks."""
    step = Step([4, 1, 20], [14, 300, 3])
    queries = step.draw(NUM_HEADS, LATENT), step.draw(NUM_HEADS, PE)
    step.cache_RD = step.cache_RD.to(FP8_DTYPE)
    torch.testing.assert_close(step.decode(*queries, TILE), step.expected(*queries), **_close)
    q_THD = step.draw(NUM_HEADS, NOPE + PE)
    kv_up_OC = torch.randn(NUM_HEADS * (NOPE + VALUE), LATENT) / LATENT**0.5
    real = slice(0, step.num_real)
    o_THV = cuda.mla_prefill(
        q_THD,
        step.cache_RD,
        kv_up_OC,
        step.pair.packed,
        SCALE,
        None,
        tile=cuda.PrefillTile(16, 16, 4, 1),
    )
    expected = reference.mla_prefill(
        q_THD[real], step.cache_RD, kv_up_OC, step.pair.segments, SCALE
    )
    torch.testing.assert_close(o_THV[real], expected, **_close)


def test_tiles_that_do_not_fit_a_page() -> None:
    """Tiles of 32 positions over pages of 8; of 4, several a page."""
    step = Step([3, 1], [70, 9])
    queries = step.draw(NUM_HEADS, LATENT), step.draw(NUM_HEADS, PE)
    for positions in (4, 32):
        o_THC = step.decode(*queries, TILE._replace(positions=positions))
        torch.testing.assert_close(o_THC, step.expected(*queries), **_close)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_draft_that_is_not_finite_reaches_no_token_before_it(value: float) -> None:
    step = Step([4, 1], [14, 9])
    queries = step.draw(NUM_HEADS, LATENT), step.draw(NUM_HEADS, PE)
    form = TILE
    clean_THC = step.decode(*queries, form)
    step.cache_RD[step.rows_BL[0, 14 + 2], :LATENT] = value
    o_THC = step.decode(*queries, form)
    assert torch.equal(o_THC[[0, 1, 4]], clean_THC[[0, 1, 4]])
    assert o_THC[2:4].isnan().flatten(1).any(1).all()


@pytest.mark.parametrize("max_expanded_bytes", [2**30, 1])
def test_chunks(max_expanded_bytes: int) -> None:
    """All heads at once, and a head at a time."""
    step = Step([20, 1, 17], [0, 33, 16])
    q_THD, gate_THV = step.draw(NUM_HEADS, NOPE + PE), step.draw(NUM_HEADS, VALUE)
    kv_up_OC = torch.randn(NUM_HEADS * (NOPE + VALUE), LATENT) / LATENT**0.5
    real = slice(0, step.num_real)
    for gate in (None, gate_THV):
        o_THV = cuda.mla_prefill(
            q_THD,
            step.cache_RD,
            kv_up_OC,
            step.pair.packed,
            SCALE,
            gate,
            tile=cuda.PrefillTile(16, 16, 4, 1),
            max_expanded_bytes=max_expanded_bytes,
        )
        expected = reference.mla_prefill(
            q_THD[real],
            step.cache_RD,
            kv_up_OC,
            step.pair.segments,
            SCALE,
            None if gate is None else gate[real],
        )
        torch.testing.assert_close(o_THV[real], expected, **_close)


def test_contexts_whose_sum_is_not_known_are_bounded_by_their_pages() -> None:
    step = Step([5, 2], [9, 30])
    group = step.pair.packed._replace(num_context=0)
    rows_LD = cuda.gather_rows(step.cache_RD, group)
    contexts = [step.rows_BL[0, :14], step.rows_BL[1, :32]]
    assert torch.equal(rows_LD[:46], step.cache_RD[torch.cat(contexts)])
    assert len(rows_LD) == 6 * PAGE_SIZE


@pytest.mark.parametrize("num_tokens", [1, 18])
@pytest.mark.parametrize("has_gate", [False, True])
def test_head_product(num_tokens: int, *, has_gate: bool) -> None:
    x_THK = torch.randn(num_tokens, NUM_HEADS, NOPE + 3)[..., :NOPE]
    weight_HKO = torch.randn(NUM_HEADS, LATENT, NOPE).mT
    gate_THO = torch.randn(num_tokens, NUM_HEADS, LATENT) if has_gate else None
    y_THO = cuda.head_product(x_THK, weight_HKO, gate_THO)
    torch.testing.assert_close(y_THO, reference.head_product(x_THK, weight_HKO, gate_THO), **_close)


def test_rows_of_nobody_are_not_written() -> None:
    both_TD = torch.randn(5, 2 + LATENT + PE)[:, 2:]
    parts = both_TD.tensor_split((LATENT,), dim=1)
    weight_C = torch.rand(LATENT)
    rows_T = torch.tensor([7, 2, 5, -1, -1], dtype=torch.int32)
    cache_RD = torch.full((9, LATENT + PE), 3.0)
    expected = cache_RD.clone()
    reference.write_rows(expected, *(part[:3] for part in parts), weight_C, 1e-5, rows_T[:3].long())
    cuda.write_rows(cache_RD, *parts, weight_C, 1e-5, rows_T)
    torch.testing.assert_close(cache_RD, expected, **_close)
    assert (cache_RD[[0, 1, 3, 4, 6, 8]] == 3).all()


def test_rows_are_written_as_e4m3() -> None:
    """By both writers. The second part has values of E4M3: the interpreter rounds some wrongly."""
    parts = torch.randn(5, LATENT) * 0.3, torch.randn(5, PE).to(FP8_DTYPE).float()
    rows_T = torch.tensor([7, 2, 5, -1, -1], dtype=torch.int32)
    cache_RD = torch.full((9, LATENT + PE), 3.0).to(FP8_DTYPE)
    expected = cache_RD.clone()
    real = tuple(part[:3] for part in parts)
    reference.write_rows(expected, *real, torch.ones(LATENT), 1e-5, rows_T[:3].long())
    cuda.write_rows(cache_RD, *parts, torch.ones(LATENT), 1e-5, rows_T)
    is_same_RD = cache_RD.float() == expected.float()
    assert is_same_RD[:, LATENT:].all() and is_same_RD.float().mean() > 0.9
    assert (cache_RD[[0, 1, 3, 4, 6, 8]].float() == 3).all()
    rows_TYD = torch.randn(5, 2, 20).to(FP8_DTYPE).float()
    cache_YRD = torch.full((2, 9, 20), 3.0).to(FP8_DTYPE)
    stored_YRD = cache_YRD.clone()
    store_rows(rows_TYD, cache_YRD, rows_T)
    cache_rows_cuda.store_rows(rows_TYD, stored_YRD, rows_T)
    assert torch.equal(stored_YRD.float(), cache_YRD.float())


@pytest.mark.parametrize(
    ("widths", "value_bytes", "page_size", "fits"),
    [
        ((512, 64), 2, 64, True),
        ((512, 64), 1, 64, True),
        ((64, 16), 2, 128, True),
        ((64, 16), 1, 128, False),  # 16 bytes of a row
        ((32, 8), 4, 64, False),
        ((512, 64), 1, 32, False),  # a tile over two pages
        ((512, 48), 2, 64, False),
    ],
)
def test_which_tiles_the_copy_engine_brings(
    widths: tuple[int, int], value_bytes: int, page_size: int, *, fits: bool
) -> None:
    nothing = torch.empty(0)
    segments = Segments(1, 1, 1, page_size, *[nothing] * 5, page_size)
    layout = RowLayout(1, *widths, widths[0], has_own_values=False)
    assert fits_descriptors(segments, layout, SplitTile(16, 64, 8, 3), value_bytes) == fits


def test_query_rows_are_padded_to_the_tile() -> None:
    assert [query_tile(rows) for rows in (1, 12, 16, 24, 33, 96)] == [16, 16, 16, 32, 64, 64]


@pytest.mark.parametrize(
    ("layout", "is_causal", "dtype"),
    [
        (LATENT_ROWS, False, torch.float32),
        (LATENT_ROWS, True, FP8_DTYPE),
        (GROUPED_ROWS, False, FP8_DTYPE),
        (GROUPED_ROWS, True, torch.float32),
    ],
)
def test_blocks(layout: RowLayout, dtype: torch.dtype, *, is_causal: bool) -> None:
    """Contexts of none, one tile and several pieces; the block behind them is nobody's."""
    starts, num_tokens, num_heads = [5, 0, 150, 16], 7, 4
    own_width = layout.value_width if layout.has_own_values else 0
    width = layout.num_groups * (layout.key_width + layout.second_width + own_width)
    contexts = Step([1] * len(starts), [max(start - 1, 0) for start in starts], width)
    contexts.cache_RD = contexts.cache_RD.to(dtype)
    packed = contexts.pair.packed
    num_real = len(starts)
    blocks = PackedBlocks(
        num_blocks=num_real + 1,
        max_context=200,
        anchor_ids_N=torch.zeros(num_real + 1, dtype=torch.int32),
        starts_N=torch.tensor([*starts, 0], dtype=torch.int32),
        is_real_N=torch.tensor([1] * num_real + [0], dtype=torch.int32),
        first_pages_N=packed.first_pages_B[: num_real + 1],
        pages_P=packed.pages_P,
        block_size=PAGE_SIZE,
        is_causal=is_causal,
    )
    inputs = BlockInputs(
        anchor_ids_N=torch.zeros(num_real, dtype=torch.int64),
        starts_N=torch.tensor(starts),
        context_rows_NL=contexts.rows_BL,
        runs=(BlockRun(num_real, max(starts)),),
    )
    q_NKHD = torch.randn(
        num_real + 1, num_tokens, num_heads, layout.key_width + layout.second_width
    )
    own_NKX = torch.randn(num_real + 1, num_tokens, width)
    own_NKX[num_real:] = float("nan")
    o_NKHV = block_cuda.attend_blocks(
        q_NKHD,
        contexts.cache_RD,
        own_NKX,
        blocks,
        layout,
        SCALE,
        TILE,
    )
    expected = block_reference.attend_blocks(
        q_NKHD[:num_real],
        contexts.cache_RD,
        own_NKX[:num_real],
        block_reference.block_places(inputs, num_tokens, is_causal=is_causal),
        layout,
        SCALE,
    )
    torch.testing.assert_close(o_NKHV[:num_real], expected, **_close)
