"""One KDA layer's slots and the tokens that go through them: what the tests of state share.

Both operators with state are run side by side: the recurrence and the short convolution.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.kernels.kda import kda_chunked, kda_recurrent, normalize_qk
from stagecoach.kernels.ragged import SegmentGroup
from stagecoach.kernels.short_conv import short_convolution
from tests.cpu.kernels import group_builder

NUM_HEADS, NUM_KEYS, NUM_VALUES, NUM_CHANNELS, NUM_HISTORY = 2, 12, 10, 6, 3
NUM_DRAFTS = 4  # the most of a window

KdaOperator = Callable[..., Tensor]

# Short chunks, so that segments of a group differ in their numbers of chunks.
make_group = partial(group_builder.make_group, chunk_size=4)


class Tokens(NamedTuple):
    """What the operators get of each token: rows for the convolution, and for KDA."""

    x_TC: Tensor
    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    g_THK: Tensor
    beta_TH: Tensor

    def span(self, start: int, end: int) -> "Tokens":
        return Tokens(*(x[start:end] for x in self))


def draw(num_tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=dtype)

    keys = (NUM_HEADS, NUM_KEYS)
    q_THK, k_THK = normalize_qk(normal(*keys), normal(*keys))
    return Tokens(
        x_TC=normal(NUM_CHANNELS),
        q_THK=q_THK,
        k_THK=k_THK,
        v_THV=normal(NUM_HEADS, NUM_VALUES),
        g_THK=-5 * (2 * normal(*keys)).sigmoid(),
        beta_TH=normal(NUM_HEADS).sigmoid(),
    )


def join(*parts: Tokens) -> Tokens:
    return Tokens(*(torch.cat(x) for x in zip(*parts, strict=True)))


class Outputs(NamedTuple):
    o_THV: Tensor
    y_TC: Tensor

    def span(self, start: int, end: int) -> "Outputs":
        return Outputs(*(x[start:end] for x in self))


class Slots:
    """Slots of one layer: NaN in all of them but the zero slot."""

    def __init__(self, num_slots: int, num_drafts: int, dtype: torch.dtype) -> None:
        def pool(*shape: int) -> Tensor:
            filled = torch.full((num_slots, *shape), torch.nan, dtype=dtype)
            filled[0] = 0
            return filled

        self.weight_CW = draw(NUM_CHANNELS, 99, dtype).x_TC[:, : NUM_HISTORY + 1].clone()
        self.state_SHVK = pool(NUM_HEADS, NUM_VALUES, NUM_KEYS)
        self.record_SNHX = pool(num_drafts, NUM_HEADS, 2 * NUM_KEYS + NUM_VALUES)
        self.conv_rows_SNC = pool(NUM_HISTORY + num_drafts, NUM_CHANNELS)

    def run(self, operator: KdaOperator, tokens: Tokens, group: SegmentGroup) -> Outputs:
        y_TC = short_convolution(tokens.x_TC, self.weight_CW, self.conv_rows_SNC, group)
        return Outputs(operator(*tokens[1:], self.state_SHVK, self.record_SNHX, group), y_TC)

    def poison(self, slot: int, num_rows: int = 0) -> None:
        """NaN in all recorded rows of a slot but the first `num_rows`."""
        self.record_SNHX[slot, num_rows:] = torch.nan
        self.conv_rows_SNC[slot, NUM_HISTORY + num_rows :] = torch.nan

    def of(self, slot: int) -> list[Tensor]:
        pools = (self.state_SHVK, self.record_SNHX, self.conv_rows_SNC)
        return [pool[slot].clone() for pool in pools]

    def poison_all(self, slot: int) -> None:
        for pool in (self.state_SHVK, self.record_SNHX, self.conv_rows_SNC):
            pool[slot] = torch.nan


class Stepper(Slots):
    """The same layer without records: every token alone, in its own call."""

    def __init__(self, num_slots: int, dtype: torch.dtype) -> None:
        super().__init__(num_slots, 0, dtype)

    def step(self, tokens: Tokens, slot: int) -> Outputs:
        group = make_group([1], [1], [slot], [slot])
        steps = [
            self.run(kda_recurrent, tokens.span(token, token + 1), group)
            for token in range(len(tokens.x_TC))
        ]
        return Outputs(*(torch.cat(x) for x in zip(*steps, strict=True)))


def prefill(slots: Slots, tokens: Tokens, slot: int) -> None:
    slots.run(kda_chunked, tokens, make_group([len(tokens.x_TC)], [0], [0], [slot]))


def assert_equal(ours: Outputs, reference: Outputs) -> None:
    """The recurrence bit for bit; sums of taps are made in another order for one token."""
    assert len(ours.o_THV) == len(reference.o_THV)
    assert torch.equal(ours.o_THV, reference.o_THV)
    tolerance = 1e-13 if ours.y_TC.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(ours.y_TC, reference.y_TC, rtol=tolerance, atol=tolerance)
