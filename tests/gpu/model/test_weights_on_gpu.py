"""Parameters on the GPU: where they lie, how they are drawn, and how they are filled."""

from pathlib import Path

import pytest
import torch

from stagecoach.config.model import load_model_config
from stagecoach.config.quantization import NamePatterns, QuantizationChoice
from stagecoach.kernels.quantization import Fp8Weight, dequantize_fp8
from stagecoach.model.dummy_weights import draw_tensor, fill_slot
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.tiny import (
    TinyShape,
    kimi_k3_config,
    random_tensors,
    write_json,
    write_shards,
)
from stagecoach.model.weight_slots import Target, WeightKind, WeightScope
from stagecoach.model.weight_upload import WeightUpload
from stagecoach.model.weights import load_stage
from stagecoach.pipeline.stage import whole_model


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keeps_packed", [True, False])
@pytest.mark.parametrize("fp8", [None, NamePatterns()])
def test_a_checkpoint_is_loaded_as_on_the_cpu(
    tmp_path: Path, dtype: torch.dtype, *, keeps_packed: bool, fp8: NamePatterns | None
) -> None:
    """Pieces, types, packed ones and quantised ones.

    A GPU divides by a number as it multiplies by the inverse, so a factor of E4M3 may differ from
    the CPU's in its last bit, and a value by a step.
    """
    shape = TinyShape(hidden_size=1024, num_layers=4, mla_layers=(3,), vocab_size=9000)
    config = kimi_k3_config(shape)
    write_json(tmp_path / "config.json", config)
    write_shards(tmp_path, dict(random_tensors(config, seed=3)), 4 << 20)
    choice = QuantizationChoice(keeps_packed=keeps_packed, fp8=fp8)
    loaded = {
        device: load_stage(
            tmp_path,
            load_model_config(tmp_path),
            whole_model(4),
            SingleRank(),
            dtype,
            device=device,
            quantization=choice,
        )
        for device in ("cpu", "cuda")
    }
    others = {slot.name: slot for slot in loaded["cuda"].slots}
    assert others
    for slot in loaded["cpu"].slots:
        target = others[slot.name].target
        assert target.is_cuda, slot.name
        if isinstance(slot.target, Fp8Weight):
            assert isinstance(target, Fp8Weight)
            on_host = Fp8Weight(target.weight.cpu(), target.scale.cpu())
            values, expected = (dequantize_fp8(one, dtype) for one in (on_host, slot.target))
            torch.testing.assert_close(values, expected, rtol=0.13, atol=1e-6)
            torch.testing.assert_close(on_host.scale, slot.target.scale, rtol=1e-6, atol=0)
            continue
        for one, other in zip(parts_of(slot.target), parts_of(target), strict=True):
            assert torch.equal(one, other.cpu()), slot.name


def parts_of(target: Target) -> list[torch.Tensor]:
    return [target] if isinstance(target, torch.Tensor) else list(target)


def test_an_upload_takes_every_size_and_type_in_turn() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    upload = WeightUpload(device)
    upload.provide(2)
    sources = [
        torch.randn(5),
        torch.randn(2100, 2100),  # more than a buffer
        torch.randn(33, 8).bfloat16(),
        torch.tensor(2.5),
    ]
    targets = [torch.empty(source.shape, dtype=torch.bfloat16, device=device) for source in sources]
    strided = torch.zeros(33, 16, dtype=torch.bfloat16, device=device)
    targets[2] = strided[:, :8]
    for _ in range(3):
        for target, source in zip(targets, sources, strict=True):
            buffer = upload.take(source.nbytes)
            assert buffer.bytes.is_pinned()
            staged = buffer.bytes[: source.nbytes].view(source.dtype).view(source.shape)
            staged.copy_(source)
            buffer.num_filled = source.nbytes
            with upload.bring((staged,), buffer) as (brought,):
                target.copy_(brought)
    upload.finish()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), source.bfloat16())
    assert (strided[:, 8:] == 0).all()
