"""Boundary fields: their widths at every cut of Kimi-K3, and when each one is final."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.config.model import ModelConfig, Taps, parse_model_config
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.tiny import TinyShape, kimi_k3_config, kimi_linear_config
from stagecoach.pipeline.boundary import boundary_fields, incoming_fields, outgoing_fields
from stagecoach.pipeline.stage import make_stages
from stagecoach.pipeline.tap_relay import taps_before

pytestmark = pytest.mark.cpu

# Blocks that a stage receives, by the first layer of each row's cuts (published Kimi-K3).
K3_BLOCKS = {1: 1, 13: 2, 25: 3, 37: 4, 49: 5, 61: 6, 73: 7, 85: 8}
K3_LAYERS, K3_BLOCK_SIZE = 93, 12


def k3_config(num_layers: int, block_size: int) -> ModelConfig:
    shape = TinyShape(
        num_layers=num_layers, block_size=block_size, mla_layers=(num_layers - 1,), hidden_size=48
    )
    return parse_model_config(kimi_k3_config(shape))


@pytest.mark.parametrize("layer", range(1, K3_LAYERS))
def test_kimi_k3_receives_the_published_widths(layer: int) -> None:
    bank, hidden = boundary_fields(k3_config(K3_LAYERS, K3_BLOCK_SIZE), layer)
    num_blocks = K3_BLOCKS[max(start for start in K3_BLOCKS if start <= layer)]
    assert (bank.name, bank.row_shape) == ("bank_TBH", (num_blocks, 48))
    assert (hidden.name, hidden.row_shape) == ("hidden_TH", (48,))


@pytest.mark.parametrize("layer", range(1, 9))
def test_kimi_linear_receives_the_hidden_state_alone(layer: int) -> None:
    [hidden] = boundary_fields(parse_model_config(kimi_linear_config(TinyShape())), layer)
    assert (hidden.name, hidden.row_shape, hidden.final_after) == ("hidden_TH", (64,), layer - 1)


class Sender:
    """A stage's residual stream, advanced layer by layer in the order of a decoder layer."""

    def __init__(self, start: int, end: int, block_size: int) -> None:
        self.end, self.block_size = end, block_size
        capacity = -(-end // block_size)
        if start == 0:
            self.stream = ResidualStream.from_embedding(torch.randn(3, 4), capacity)
        else:
            bank_TBH = torch.randn(3, -(-start // block_size), 4)
            self.stream = ResidualStream(torch.randn(3, 4), bank_TBH, capacity)

    def run_layer(self, layer: int) -> None:
        if layer % self.block_size == 0:
            self.stream.close_block()
        self.stream.add(torch.randn(3, 4))
        self.stream.add(torch.randn(3, 4))

    def read(self, name: str) -> Tensor:
        fields = {"hidden_TH": self.stream.partial_TH, "bank_TBH": self.stream.bank_TBH}
        return fields[name].clone()


@given(block_size=st.integers(1, 5), start=st.integers(0, 8), length=st.integers(1, 8))
def test_a_field_is_final_after_the_layer_that_writes_it_last(
    block_size: int, start: int, length: int
) -> None:
    """Sent earlier it would be wrong, and later it would be late."""
    end = start + length
    fields = boundary_fields(k3_config(end + 1, block_size), end)
    sender = Sender(start, end, block_size)
    # What a field holds after each layer; `start - 1` is before the stage's first.
    seen = {field.name: {start - 1: sender.read(field.name)} for field in fields}
    for layer in range(start, end):
        sender.run_layer(layer)
        for field in fields:
            seen[field.name][layer] = sender.read(field.name)
    for field in fields:
        values = seen[field.name]
        final = values[end - 1]
        assert final.shape[1:] == (*field.row_shape[:-1], 4)
        writes = [
            later
            for earlier, later in pairwise(values)
            if values[earlier].shape != values[later].shape
            or not torch.equal(values[earlier], values[later])
        ]
        assert max(writes, default=start - 1) == max(field.final_after, start - 1)


@pytest.mark.parametrize(
    ("cut", "bank_final_after"),
    [
        pytest.param(24, 12, id="before a closing layer"),
        pytest.param(25, 24, id="right after a closing layer"),
        pytest.param(26, 24, id="one layer later"),
        pytest.param(36, 24, id="before the next closing layer"),
        pytest.param(1, 0, id="after the first layer"),
    ],
)
def test_the_bank_is_final_after_the_layer_that_closed_its_newest_block(
    cut: int, bank_final_after: int
) -> None:
    bank, hidden = boundary_fields(k3_config(K3_LAYERS, K3_BLOCK_SIZE), cut)
    assert bank.final_after == bank_final_after
    assert hidden.final_after == cut - 1


@pytest.mark.parametrize("are_mixtures", [False, True], ids=["prefix", "mixture"])
@pytest.mark.parametrize("listed", [None, (2, 23, 47, 71, 89), (-1,), (-1, 12, 92)])
def test_fields_are_declared_in_the_order_in_which_they_become_final(
    listed: tuple[int, ...] | None, are_mixtures: bool
) -> None:
    config = k3_config(K3_LAYERS, K3_BLOCK_SIZE)
    taps = Taps(listed, are_mixtures) if listed else None
    for layer in range(1, K3_LAYERS):
        fields = boundary_fields(config, layer, taps)
        final_after = [field.final_after for field in fields]
        assert final_after == sorted(final_after)
        assert fields[-1].name == "hidden_TH"


@pytest.mark.parametrize("are_mixtures", [False, True], ids=["prefix", "mixture"])
@pytest.mark.parametrize("layer", range(1, K3_LAYERS))
def test_taps_cross_as_one_field_that_is_final_with_its_last_tap(
    layer: int, are_mixtures: bool
) -> None:
    config, taps = k3_config(K3_LAYERS, K3_BLOCK_SIZE), Taps((2, 23, 47, 71, 89), are_mixtures)
    without = boundary_fields(config, layer)
    known = taps_before(taps, layer)
    found = [field for field in boundary_fields(config, layer, taps) if field not in without]
    if not known:
        assert not found and layer <= 3
        return
    [field] = found
    assert (field.name, field.row_shape, field.columns) == ("taps_TNH", (len(known), 48), known)
    assert field.final_after == known[-1] + are_mixtures < layer


def test_the_embedding_alone_is_final_before_the_first_layer() -> None:
    config = parse_model_config(kimi_linear_config(TinyShape()))
    taps, hidden = boundary_fields(config, 5, Taps((-1,)))
    assert (taps.row_shape, taps.final_after, hidden.final_after) == ((1, 64), -1, 4)
    assert str(taps) == "taps_TNH [T, 1, 64] of taps -1"


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    block_size=st.integers(1, 5),
    listed=st.sets(st.integers(-1, 5), max_size=4),
    are_mixtures=st.booleans(),
)
def test_both_ends_of_a_boundary_declare_the_same_and_nothing_waits_for_other_stages(
    counts: list[int], block_size: int, listed: set[int], are_mixtures: bool
) -> None:
    config = k3_config(sum(counts) + 1, block_size)
    taps = Taps(tuple(sorted(listed)), are_mixtures) if listed else None
    stages = make_stages(counts)
    assert incoming_fields(config, stages[0], taps) == ()
    assert outgoing_fields(config, stages[-1], taps) == ()
    for sender, receiver in pairwise(stages):
        sent = outgoing_fields(config, sender, taps)
        received = incoming_fields(config, receiver, taps)
        assert [str(field) for field in sent] == [str(field) for field in received]
        final_after = [field.final_after for field in sent]
        assert final_after == sorted(final_after)
        assert all(sender.start - 1 <= layer < sender.end for layer in final_after)
