"""Block attention over scattered rows: plain sums, what is hidden, and grouped heads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.kernels.block_attention import block_attention, block_places, block_rows
from stagecoach.kernels.ragged import BlockInputs, BlockRun
from tests.cpu.kernels.group_builder import scattered_rows


class Blocks:
    """Contexts in a pool whose free rows are NaN, and the rows of the blocks behind them.

    Args:
        num_first: blocks of a first run; the others are a second one.
    """

    def __init__(
        self,
        starts: list[int],
        num_tokens: int,
        width: int,
        seed: int = 0,
        *,
        num_first: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.contexts = [
            torch.randn(start, width, generator=generator, dtype=torch.float64) for start in starts
        ]
        self.own_NKX = torch.randn(
            len(starts), num_tokens, width, generator=generator, dtype=torch.float64
        )
        places, num_rows = scattered_rows(starts, page_size=4, seed=seed)
        self.cache_RX = torch.full((num_rows, width), float("nan"), dtype=torch.float64)
        self.cache_RX[:4] = 0  # the null page
        for rows, context in zip(places, self.contexts, strict=True):
            self.cache_RX[rows] = context
        (free, *_) = self.cache_RX.isnan().any(1).nonzero().flatten().tolist()
        longest = max(starts)
        self.inputs = BlockInputs(
            anchor_ids_N=torch.zeros(len(starts), dtype=torch.int64),
            starts_N=torch.tensor(starts),
            # Past a context any row may stand, also one that holds nothing.
            context_rows_NL=torch.tensor(
                [rows + [free] * (longest - len(rows)) for rows in places]
            ),
            runs=tuple(
                BlockRun(len(part), max(part))
                for part in (starts[:num_first], starts[num_first:] if num_first else [])
                if part
            ),
        )


def plain(q_HD: Tensor, k_SGD: Tensor, v_SGV: Tensor, scale: float) -> Tensor:
    """One token, head by head."""
    num_heads, num_groups = len(q_HD), k_SGD.shape[1]
    outputs = []
    for head in range(num_heads):
        group = head * num_groups // num_heads
        shares_S = ((k_SGD[:, group] * q_HD[head]).sum(-1) * scale).softmax(0)
        outputs.append((shares_S[:, None] * v_SGV[:, group]).sum(0))
    return torch.stack(outputs)


@settings(max_examples=30, deadline=None)
@given(
    starts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    num_tokens=st.integers(1, 5),
    is_causal=st.booleans(),
    num_first=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (3, 3)]),
)
def test_equals_plain_sums(
    starts: list[int],
    num_tokens: int,
    is_causal: bool,
    num_first: int,
    heads: tuple[int, int],
) -> None:
    num_heads, num_groups = heads
    key_width, value_width = 6, 4
    width = num_groups * (key_width + value_width)
    blocks = Blocks(starts, num_tokens, width, num_first=num_first)

    def keys_and_values(rows: Tensor) -> tuple[Tensor, Tensor]:
        both = rows.unflatten(-1, (num_groups, -1))
        return both[..., :key_width], both[..., key_width:]

    q_NKHD = torch.randn(len(starts), num_tokens, num_heads, key_width, dtype=torch.float64)
    outputs = []
    for run in block_places(blocks.inputs, num_tokens, is_causal=is_causal):
        rows_NSX = block_rows(blocks.cache_RX, blocks.own_NKX, run)
        # Padded to the longest context of its own run.
        assert rows_NSX.shape[1] == max(starts[run.blocks]) + num_tokens
        assert not rows_NSX.isnan().any()
        keys_values = keys_and_values(rows_NSX)
        outputs.append(block_attention(q_NKHD[run.blocks], *keys_values, run.is_hidden_NKS, 0.3))
    o_NKHV = torch.cat(outputs)
    for index, context in enumerate(blocks.contexts):
        for token in range(num_tokens):
            own = blocks.own_NKX[index, : token + 1 if is_causal else num_tokens]
            keys, values = keys_and_values(torch.cat([context, own]))
            expected = plain(q_NKHD[index, token], keys, values, 0.3)
            torch.testing.assert_close(o_NKHV[index, token], expected, rtol=1e-12, atol=1e-12)


def test_latent_rows_are_keys_whose_beginnings_are_the_values() -> None:
    """One group of heads, values a view of the keys, as latent attention calls it."""
    blocks = Blocks([5, 2], num_tokens=3, width=10)
    [places] = block_places(blocks.inputs, 3, is_causal=False)
    keys_NS1X = block_rows(blocks.cache_RX, blocks.own_NKX, places).unsqueeze(2)
    q_NKHX = torch.randn(2, 3, 4, 10, dtype=torch.float64)
    o_NKHC = block_attention(q_NKHX, keys_NS1X, keys_NS1X[..., :7], places.is_hidden_NKS, 0.5)
    rows_SX = torch.cat([blocks.contexts[1], blocks.own_NKX[1]]).unsqueeze(1)
    expected = plain(q_NKHX[1, 2], rows_SX, rows_SX[..., :7], 0.5)
    torch.testing.assert_close(o_NKHC[1, 2], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_types_are_summed_wide(dtype: torch.dtype) -> None:
    blocks = Blocks([40, 11], num_tokens=7, width=32)
    [places] = block_places(blocks.inputs, 7, is_causal=True)
    rows_NSX = block_rows(blocks.cache_RX.to(dtype), blocks.own_NKX.to(dtype), places)
    keys_NS1X = rows_NSX.unsqueeze(2)
    q_NKHX = torch.randn(2, 7, 4, 32).to(dtype)
    hidden = places.is_hidden_NKS
    o_NKHX = block_attention(q_NKHX, keys_NS1X, keys_NS1X, hidden, 0.2)
    wide = block_attention(q_NKHX.double(), keys_NS1X.double(), keys_NS1X.double(), hidden, 0.2)
    assert o_NKHX.dtype == dtype
    # One rounding at the end.
    torch.testing.assert_close(o_NKHX, wide.to(dtype), rtol=1e-2, atol=2e-6)
