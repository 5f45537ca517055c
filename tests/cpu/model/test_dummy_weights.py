"""Random weights: a function of seed and name, with the scales of an initialised model."""

import math

import pytest
import torch

from stagecoach.model.dummy_weights import draw_tensor, fill_matrix, fill_slot
from stagecoach.model.weight_slots import WeightKind, WeightScope, WeightSlot

pytestmark = pytest.mark.cpu


def slot(kind: WeightKind, *shape: int, name: str = "model.x.weight") -> WeightSlot:
    scope = WeightScope(torch.float32, device="meta")
    scope.bind(name, scope.parameter(*shape), kind)
    return scope.slots[0]


def test_a_tensor_depends_on_its_name_and_the_seed_only() -> None:
    first = draw_tensor(slot(WeightKind.MATRIX, 8, 8), 1)
    assert torch.equal(first, draw_tensor(slot(WeightKind.MATRIX, 8, 8), 1))
    assert not torch.equal(first, draw_tensor(slot(WeightKind.MATRIX, 8, 8), 2))
    assert not torch.equal(first, draw_tensor(slot(WeightKind.MATRIX, 8, 8, name="other"), 1))


def test_scales() -> None:
    assert draw_tensor(slot(WeightKind.NORM, 5), 0).tolist() == [1.0] * 5
    assert draw_tensor(slot(WeightKind.HEAD_NORM, 5), 0).tolist() == [1.0] * 5
    assert draw_tensor(slot(WeightKind.ROUTER_BIAS, 5), 0).tolist() == [0.0] * 5
    for kind in (WeightKind.MATRIX, WeightKind.EXPERT, WeightKind.ROUTER):
        matrix = draw_tensor(slot(kind, 200, 200), 0)
        assert 0.0195 < float(matrix.std()) < 0.0205 and abs(float(matrix.mean())) < 0.001
    rate = draw_tensor(slot(WeightKind.DECAY, 1000), 0).exp()
    assert 1.0 <= float(rate.min()) < 1.5 and 15.5 < float(rate.max()) <= 16.0
    step = torch.nn.functional.softplus(draw_tensor(slot(WeightKind.DECAY_BIAS, 1000), 0))
    assert 0.00099 < float(step.min()) < 0.0012 and 0.09 < float(step.max()) < 0.1001
    # Log-uniform: the median is the geometric mean of the bounds.
    assert math.isclose(float(step.median()), 0.01, rel_tol=0.2)


def filled(tp_size: int, tp_rank: int, split_dim: int | None) -> torch.Tensor:
    """A rank's part of a [12, 10] matrix, drawn in pieces of three rows."""
    scope = WeightScope(torch.float32, tp_rank=tp_rank, tp_size=tp_size)
    sizes = [12, 10]
    if split_dim is not None:
        sizes[split_dim] //= tp_size
    parameter = scope.parameter(*sizes)
    scope.bind("model.x.weight", parameter, WeightKind.MATRIX, split_dim=split_dim)
    fill_matrix(scope.slots[0], 3, piece_values=35)
    return parameter


def test_a_matrix_in_pieces_is_the_same_for_every_split() -> None:
    whole = filled(1, 0, None)
    assert not whole.isnan().any() and len(whole.unique()) > 100
    for split_dim in (0, 1):
        parts = [filled(2, rank, split_dim) for rank in range(2)]
        assert torch.equal(torch.cat(parts, split_dim), whole)
    # Ranks whose rows end within a piece.
    assert torch.equal(torch.cat([filled(4, rank, 0) for rank in range(4)]), whole)
    assert 0.015 < float(whole.std()) < 0.025


def test_on_a_cpu_a_slot_holds_its_part_of_the_whole_tensor() -> None:
    scope = WeightScope(torch.float32, tp_rank=1, tp_size=2)
    parameter = scope.parameter(4, 6)
    scope.bind("model.x.weight", parameter, split_dim=0)
    fill_slot(scope.slots[0], 5)
    assert torch.equal(parameter, draw_tensor(scope.slots[0], 5)[4:])
