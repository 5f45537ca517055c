"""Two states, and how far they are apart: with their records, by the worst layer."""

import math

import pytest
import torch
from torch import Tensor

from stagecoach.model.stage_memory import KdaMemory, MlaMemory, StageMemory
from stagecoach.runner.state_differences import state_differences
from stagecoach.schedule.step_plan import Comparison

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu

NUM_SLOTS, NUM_HEADS, HEAD_DIM, NUM_DRAFTS, NUM_HISTORY_ROWS = 5, 2, 4, 3, 3


def make_memory(num_kda_layers: int = 2) -> StageMemory:
    generator = torch.Generator().manual_seed(8)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layers: dict[int, KdaMemory | MlaMemory] = {
        layer: KdaMemory(
            recurrent_SHVK=random(NUM_SLOTS, NUM_HEADS, HEAD_DIM, HEAD_DIM),
            conv_rows_SNC=random(NUM_SLOTS, NUM_HISTORY_ROWS + NUM_DRAFTS, 5),
            record_SNHX=random(NUM_SLOTS, NUM_DRAFTS, NUM_HEADS, 3 * HEAD_DIM),
        )
        for layer in range(num_kda_layers)
    }
    layers[num_kda_layers] = MlaMemory(random(8, 6))
    return StageMemory(layers, None)


def kda_layers(memory: StageMemory) -> list[KdaMemory]:
    return [layer for layer in memory.layers.values() if isinstance(layer, KdaMemory)]


def make_equal(memory: StageMemory, slot: int, replay: int, other_slot: int) -> None:
    """`other_slot` becomes what `slot` is with so many rows folded in, row by row."""
    for recurrent_SHVK, conv_rows_SNC, record_SNHX in kda_layers(memory):
        state_HVK = recurrent_SHVK[slot].clone()
        for row_HX in record_SNHX[slot, :replay]:
            decay_HK, k_HK, u_HV = row_HX.split(HEAD_DIM, dim=-1)
            state_HVK = state_HVK * decay_HK[:, None] + u_HV[:, :, None] * k_HK[:, None]
        recurrent_SHVK[other_slot] = state_HVK
        conv_rows_SNC[other_slot, :NUM_HISTORY_ROWS] = conv_rows_SNC[
            slot, replay : replay + NUM_HISTORY_ROWS
        ]


@pytest.mark.parametrize("replay", range(1 + NUM_DRAFTS))
def test_a_state_equals_itself_with_its_record_folded_in(replay: int) -> None:
    """And no other number of rows."""
    memory = make_memory()
    make_equal(memory, 1, replay, 3)
    # What neither reads may be anything.
    for layer in kda_layers(memory):
        layer.record_SNHX[3] = torch.nan
        layer.record_SNHX[1, replay:] = torch.nan
        layer.conv_rows_SNC[3, NUM_HISTORY_ROWS:] = torch.nan
    pairs = [Comparison(1, replay, 3), Comparison(3, 0, 1, replay), Comparison(2, 0, 2)]
    assert max(state_differences(memory, pairs)) < 1e-15
    for other in set(range(replay)):
        [difference] = state_differences(memory, [Comparison(1, other, 3)])
        assert difference > 0.1


def test_a_difference_is_that_of_the_worst_layer_over_its_largest_value() -> None:
    memory = make_memory()
    make_equal(memory, 1, 0, 3)
    first, second = kda_layers(memory)
    first.recurrent_SHVK[1, 0, 0, 0] = 50.0
    first.recurrent_SHVK[3, 0, 0, 0] = 50.0
    first.recurrent_SHVK[3, 1, 2, 3] = first.recurrent_SHVK[1, 1, 2, 3] + 1.0
    second.conv_rows_SNC[1, 2, 4] = -100.0
    second.conv_rows_SNC[3, 2, 4] = -99.0
    differences = state_differences(memory, [Comparison(1, 0, 3), Comparison(3, 0, 1)])
    assert differences == pytest.approx((0.02, 0.02), abs=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("is_in_both", [False, True])
@pytest.mark.parametrize("part", [0, 1])
def test_what_is_not_finite_equals_nothing(value: float, *, is_in_both: bool, part: int) -> None:
    memory = make_memory()
    make_equal(memory, 1, 0, 3)
    for slot in (1, 3) if is_in_both else (1,):
        kda_layers(memory)[1][part][slot, 0, 0] = value
    assert state_differences(memory, [Comparison(1, 0, 3), Comparison(2, 0, 2)]) == (math.inf, 0.0)


def test_states_of_zeros_are_equal() -> None:
    memory = make_memory()
    for layer in kda_layers(memory):
        for tensor in layer:
            tensor[1:3] = 0.0
    assert state_differences(memory, [Comparison(1, 0, 2)]) == (0.0,)


def test_a_stage_without_states_finds_none_different() -> None:
    pairs = [Comparison(1, 0, 2), Comparison(1, 1, 3)]
    assert state_differences(make_memory(num_kda_layers=0), pairs) == (0.0, 0.0)
    assert state_differences(make_memory(), []) == ()


def test_without_a_record_states_are_compared_as_they_are() -> None:
    memory = make_memory(1)
    [layer] = kda_layers(memory)
    bare = StageMemory(
        {
            0: layer._replace(
                record_SNHX=layer.record_SNHX[:, :0],
                conv_rows_SNC=layer.conv_rows_SNC[:, :NUM_HISTORY_ROWS],
            )
        },
        None,
    )
    make_equal(bare, 1, 0, 3)
    assert state_differences(bare, [Comparison(1, 0, 3)]) == (0.0,)
