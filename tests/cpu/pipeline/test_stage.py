"""Stages: ranges of layers that are never empty and together cover the model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.pipeline.stage import Stage, make_stages, whole_model

pytestmark = pytest.mark.cpu


@given(st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_stages_of_a_partition_hold_each_layer_once_and_in_order(partition: list[int]) -> None:
    stages = make_stages(partition)
    layers = [layer for stage in stages for layer in stage.layers]
    assert layers == list(range(sum(partition)))
    assert [stage.num_layers for stage in stages] == partition
    assert [stage.is_first for stage in stages] == [True] + [False] * (len(partition) - 1)
    assert [stage.is_last for stage in stages] == [False] * (len(partition) - 1) + [True]


def test_the_whole_model_is_first_and_last() -> None:
    stage = whole_model(5)
    assert stage.is_first and stage.is_last
    assert stage.layers == range(5)


@pytest.mark.parametrize(
    "fields",
    [
        {"index": 0, "num_stages": 1, "start": 0, "end": 0},
        {"index": 1, "num_stages": 2, "start": 3, "end": 2},
        {"index": 2, "num_stages": 2, "start": 3, "end": 5},
        {"index": 0, "num_stages": 2, "start": 1, "end": 5},
        {"index": 1, "num_stages": 2, "start": 0, "end": 5},
    ],
)
def test_an_impossible_stage_is_our_mistake(fields: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        Stage(**fields)


def test_an_empty_stage_in_a_partition_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="empty stage"):
        make_stages((2, 0, 1))
