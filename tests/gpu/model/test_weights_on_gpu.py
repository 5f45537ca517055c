"""Parameters on the GPU: where they lie, how they are drawn, and how they are filled."""

import pytest
import torch

from stagecoach.model.dummy_weights import draw_tensor, fill_slot
from stagecoach.model.weight_slots import WeightKind, WeightScope
from stagecoach.model.weight_upload import WeightUpload


def drawn(
    kind: WeightKind, split_dim: int | None, rank: int, sizes: tuple[int, ...] = (3000, 6000)
) -> torch.Tensor:
    """One of two ranks' part of a tensor of two pieces; whole without `split_dim`."""
    scope = WeightScope(torch.bfloat16, device="cuda", tp_rank=rank, tp_size=2)
    local = list(sizes)
    if split_dim is not None:
        local[split_dim] //= 2
    parameter = scope.parameter(*local, kind=kind)
    scope.bind("model.x.weight", parameter, kind, split_dim=split_dim)
    fill_slot(scope.slots[0], 1)
    return parameter


@pytest.mark.parametrize("kind", [WeightKind.MATRIX, WeightKind.EXPERT, WeightKind.ROUTER])
def test_a_matrix_is_the_same_for_every_split(kind: WeightKind) -> None:
    whole = drawn(kind, None, 0)
    assert 0.0199 < float(whole.float().std()) < 0.0201
    for split_dim in (0, 1):
        parts = [drawn(kind, split_dim, rank) for rank in range(2)]
        assert torch.equal(torch.cat(parts, split_dim), whole)


def test_small_tensors_are_those_of_the_cpu() -> None:
    scope = WeightScope(torch.bfloat16, device="cuda")
    parameter = scope.parameter(32, kind=WeightKind.DECAY_BIAS)
    scope.bind("dt_bias", parameter, WeightKind.DECAY_BIAS)
    fill_slot(scope.slots[0], 1)
    assert torch.equal(parameter.cpu(), draw_tensor(scope.slots[0], 1))


def test_rows_of_a_matrix_lie_in_one_piece() -> None:
    scope = WeightScope(torch.bfloat16, device="cuda")
    assert scope.matrix(4, 6, 8).is_contiguous()


def test_an_upload_takes_every_size_and_type_in_turn() -> None:
    upload = WeightUpload()
    sources = [
        torch.randn(5),
        torch.randn(7000, 9000),  # more than one buffer
        torch.randn(33, 8).bfloat16(),
        torch.tensor(2.5),
    ]
    targets = [torch.empty(source.shape, dtype=torch.bfloat16, device="cuda") for source in sources]
    strided = torch.zeros(33, 16, dtype=torch.bfloat16, device="cuda")
    targets[2] = strided[:, :8]
    for _ in range(3):
        for target, source in zip(targets, sources, strict=True):
            upload.copy(target, source)
    upload.finish()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), source.bfloat16())
    assert (strided[:, 8:] == 0).all()
