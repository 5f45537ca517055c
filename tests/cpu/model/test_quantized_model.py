"""Models whose weights or rows are quantised: what is loaded, and how far the logits are."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stagecoach.config.model import load_model_config, parse_model_config
from stagecoach.config.quantization import NamePatterns, QuantizationChoice
from stagecoach.errors import ConfigError
from stagecoach.kernels.quantization import (
    FP8_DTYPE,
    Fp8Weight,
    Mxfp4Weight,
    quantize_fp8,
    unpack_mxfp4,
)
from stagecoach.model import quantization
from stagecoach.model.checkpoint_reader import published_name
from stagecoach.model.dummy_weights import fill_matrix, fill_slot
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.quantization import store_fp8
from stagecoach.model.tiny import TinyShape, kimi_k3_config, kimi_linear_config
from stagecoach.model.weight_formats import expected_formats
from stagecoach.model.weight_slots import WeightKind, WeightScope
from stagecoach.model.weights import load_stage
from stagecoach.pipeline.stage import whole_model
from tests.cpu.model.model_runs import Grid, relative_error, thread_ranks

pytestmark = pytest.mark.cpu

SHAPE = TinyShape(num_layers=4, mla_layers=(3,), block_size=2, expert_size=64)
PACKED = QuantizationChoice(keeps_packed=True)
FP8 = QuantizationChoice(fp8=NamePatterns())
TOKENS = [3, 250, 17, 99, 4, 4, 180, 61, 7, 33, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from stagecoach.model.tiny import write_tiny_model

    path = tmp_path_factory.mktemp("quantized")
    write_tiny_model(path, kimi_k3_config(SHAPE), seed=3)
    return path


def load(
    folder: Path, choice: QuantizationChoice, rank: int = 0, tp_size: int = 1, **options: Any
) -> StageModel:
    config = load_model_config(folder)
    tp = thread_ranks(tp_size)[rank]
    stage = whole_model(config.num_layers)
    return load_stage(folder, config, stage, tp, torch.float64, quantization=choice, **options)


def logits(folder: Path, **options: Any) -> Tensor:
    """Of a prompt in two chunks, then of single tokens, in float64."""
    grid = Grid(folder, torch.float64, **options)
    row = grid.row(len(TOKENS))
    start = grid.prefill(row, TOKENS[:7], chunk=4)
    return torch.cat([start, grid.decode(row, TOKENS[7:])])


@pytest.fixture(scope="module")
def plain(folder: Path) -> Tensor:
    return logits(folder)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_packed_experts_give_the_same_logits(folder: Path, plain: Tensor, tp_size: int) -> None:
    packed = logits(folder, quantization=PACKED, tp_size=tp_size, partition=(3, 1))
    assert relative_error(packed, plain) < 1e-12
    assert torch.equal(packed.argmax(1), plain.argmax(1))


def test_packed_experts_lie_as_they_are_stored(folder: Path) -> None:
    """Each of two ranks has its rows of w1 and w3, and whole groups of the columns of w2."""
    stored = {
        published_name(name): tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    num_bytes = 0
    for rank in range(2):
        for slot in load(folder, PACKED, rank, 2).slots:
            if slot.kind is not WeightKind.EXPERT:
                assert isinstance(slot.target, Tensor)
                continue
            target = slot.target
            assert isinstance(target, Mxfp4Weight)
            rows, columns = slot.region
            stem = slot.name.removesuffix("weight")
            for part, tensor, per_value in (
                ("weight_packed", target.packed, 2),
                ("weight_scale", target.scale, 32),
            ):
                span = slice(columns.start // per_value, columns.stop // per_value)
                assert torch.equal(tensor, stored[stem + part][rows, span]), slot.name
                num_bytes += tensor.nbytes
    packed = [tensor for name, tensor in stored.items() if ".experts." in name]
    assert num_bytes == sum(tensor.nbytes for tensor in packed)


def test_a_layer_that_mixes_formats_is_decoded_and_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, plain: Tensor
) -> None:
    name = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight"
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = next(
        path for path in tmp_path.glob("*.safetensors") if name + "_packed" in load_file(path)
    )
    tensors = load_file(path)
    weight = Mxfp4Weight(tensors.pop(name + "_packed"), tensors.pop(name + "_scale"))
    save_file(tensors | {name: unpack_mxfp4(weight, torch.bfloat16)}, path)
    for index_path in tmp_path.glob("*.index.json"):
        index = json.loads(index_path.read_text())
        del index["weight_map"][name + "_scale"]
        index["weight_map"][name] = index["weight_map"].pop(name + "_packed")
        index_path.write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, PACKED)
    text = name.removeprefix("language_model.")
    assert f"layer 2: some experts are packed and some are not ({text})" in caplog.text
    are_packed = {
        layer: {
            isinstance(slot.target, Mxfp4Weight)
            for slot in model.slots
            if slot.name.startswith(f"model.layers.{layer}.block_sparse_moe.experts.")
        }
        for layer in (1, 2, 3)
    }
    assert are_packed == {1: {True}, 2: {False}, 3: {True}}
    assert relative_error(logits(tmp_path, quantization=PACKED), plain) < 1e-12


def test_without_a_checkpoint_the_config_says_what_is_packed() -> None:
    config = parse_model_config(kimi_k3_config(SHAPE))
    stage = whole_model(config.num_layers)
    formats = expected_formats(config, PACKED, stage)
    assert formats.packed_layers == {1, 2, 3}
    model, plain = (
        StageModel(config, stage, SingleRank(), torch.bfloat16, "meta", formats=each)
        for each in (formats, expected_formats(config, QuantizationChoice(), stage))
    )
    values = sum(
        torch.Size(slot.shape).numel() for slot in model.slots if slot.kind is WeightKind.EXPERT
    )
    saved = plain.num_parameter_bytes - model.num_parameter_bytes
    assert saved == values * 2 - values // 2 - values // 32
    other = parse_model_config(kimi_linear_config(SHAPE))
    assert not expected_formats(other, PACKED, stage).packed_layers


def test_random_packed_weights_are_the_same_for_every_split() -> None:
    config = parse_model_config(kimi_k3_config(SHAPE))
    stage = whole_model(config.num_layers)
    formats = expected_formats(config, PACKED, stage)

    def parts(rank: int, tp_size: int) -> list[Mxfp4Weight]:
        tp = thread_ranks(tp_size)[rank]
        model = StageModel(config, stage, tp, torch.float32, formats=formats)
        slots = [slot for slot in model.slots if slot.name.endswith("experts.1.w2.weight")]
        for slot in slots:
            fill_slot(slot, 7)
        return [slot.target for slot in slots if isinstance(slot.target, Mxfp4Weight)]

    whole, (first, second) = parts(0, 1), (parts(rank, 2) for rank in range(2))
    for one, left, right in zip(whole, first, second, strict=True):
        assert torch.equal(torch.cat([left.packed, right.packed], 1), one.packed)
        values = unpack_mxfp4(one, torch.float32)
        assert 0.015 < float(values.std()) < 0.03
    assert not torch.equal(whole[0].packed, whole[1].packed)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_matrices_become_fp8_of_what_is_stored(folder: Path, tp_size: int) -> None:
    """A row split takes the factors of the rank's own columns."""
    stored = {slot.name: slot for slot in load(folder, QuantizationChoice()).slots}
    for rank in range(tp_size):
        fp8_names = set()
        for slot in load(folder, FP8, rank, tp_size).slots:
            part = stored[slot.name].target
            assert isinstance(part, Tensor)
            if not isinstance(slot.target, Fp8Weight):
                assert isinstance(slot.target, Tensor)
                assert torch.equal(slot.target, part[slot.region]), slot.name
                continue
            fp8_names.add(slot.name)
            expected = quantize_fp8(part[slot.region].float())
            assert torch.equal(slot.target.weight.float(), expected.weight.float()), slot.name
            assert torch.equal(slot.target.scale, expected.scale), slot.name
        patterns, kinds = NamePatterns(), (WeightKind.MATRIX,)
        assert fp8_names == {
            name
            for name, slot in stored.items()
            if slot.kind in kinds and patterns.selects(name) and "kv_b_proj" not in name
        }


def test_fp8_weights_do_not_depend_on_the_activations_type(folder: Path) -> None:
    config = load_model_config(folder)
    stage = whole_model(config.num_layers)
    one, other = (
        [
            slot.target
            for slot in load_stage(
                folder, config, stage, SingleRank(), dtype, quantization=FP8
            ).slots
            if isinstance(slot.target, Fp8Weight)
        ]
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert len(one) > 20
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left.weight.view(torch.uint8), right.weight.view(torch.uint8))


# Errors of logits relative to their size, over a model of four layers with random weights.
@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"quantization": FP8}, 0.25),
        ({"row_dtype": FP8_DTYPE}, 0.05),
        ({"row_dtype": torch.bfloat16}, 0.005),
    ],
    ids=["fp8", "fp8 rows", "bfloat16 rows"],
)
def test_logits_stay_near_the_plain_ones(
    write_model: Callable[..., Path], options: dict[str, Any], largest: float
) -> None:
    """Without routed experts, whose choice flips where weights are random."""
    folder = write_model(kimi_k3_config(dataclasses.replace(SHAPE, num_dense_layers=4)))
    plain, quantized = logits(folder), logits(folder, **options)
    assert 0 < relative_error(quantized, plain) < largest
    split = logits(folder, **options, partition=(1, 3))
    assert relative_error(split, quantized) < 1e-12


@pytest.mark.parametrize("family", [kimi_k3_config, kimi_linear_config])
def test_any_choice_of_names_runs(
    family: Callable[[TinyShape], dict[str, Any]], write_model: Callable[..., Path]
) -> None:
    """Some projections of a fused matrix, all low-rank gates, the shared expert in part."""
    folder = write_model(family(SHAPE))
    expected = logits(folder)
    for patterns in (
        NamePatterns(("*.k_proj.*", "*.kv_a_proj_with_mqa.*"), ("*.layers.0.*",)),
        NamePatterns(("*.f_*", "*.g_*", "*.b_proj.*"), ("lm_head.*",)),
        NamePatterns(("*.shared_experts.up_proj.*", "*.o_proj.*"), ("lm_head.*",)),
        NamePatterns(("*.shared_experts.*", "*.mlp.*"), ("lm_head.*",)),
        NamePatterns(("*",), ("lm_head.*",)),
    ):
        choice = QuantizationChoice(fp8=patterns)
        quantized = logits(folder, quantization=choice, tp_size=2)
        assert 0 < relative_error(quantized, expected) < 1, patterns


def test_a_misspelt_pattern_is_refused(folder: Path) -> None:
    choice = QuantizationChoice(fp8=NamePatterns(("*.q_porj.*",)))
    with pytest.raises(ConfigError, match="q_porj"):
        load(folder, choice)
    config = load_model_config(folder)
    stage = whole_model(config.num_layers)
    with pytest.raises(ConfigError, match="q_porj"):
        load_stage(
            folder, config, stage, SingleRank(), torch.float32, dummy_seed=1, quantization=choice
        )


def test_rows_are_quantised_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held beside the result is a few rows, whatever the matrix has."""
    weight = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    sizes: list[int] = []

    def watched(piece: Tensor) -> Fp8Weight:
        sizes.append(piece.numel())
        return quantize_fp8(piece)

    monkeypatch.setattr(quantization, "quantize_fp8", watched)
    monkeypatch.setattr(quantization, "_PIECE_VALUES", 100)
    target = WeightScope(torch.float32).fp8_matrix(50, 16)
    store_fp8(target, weight)
    expected = quantize_fp8(weight)
    assert torch.equal(target.weight.float(), expected.weight.float())
    assert torch.equal(target.scale, expected.scale)
    assert max(sizes) <= 100 and sum(sizes) == weight.numel()


def test_a_random_fp8_matrix_is_the_same_for_every_column_split() -> None:
    def drawn(tp_size: int, tp_rank: int) -> Fp8Weight:
        scope = WeightScope(torch.float32, tp_rank=tp_rank, tp_size=tp_size)
        target = scope.fp8_matrix(12 // tp_size, 10)
        scope.bind("x.weight", target, split_dim=0)
        fill_matrix(scope.slots[0], 3, piece_values=35)
        return target

    whole, parts = drawn(1, 0), [drawn(2, rank) for rank in range(2)]
    assert torch.equal(torch.cat([part.scale for part in parts]), whole.scale)
    assert torch.equal(torch.cat([part.weight.float() for part in parts]), whole.weight.float())
    assert whole.scale.isfinite().all() and len(whole.scale.unique()) == 12


def test_what_no_slot_fills_shows() -> None:
    scope = WeightScope(torch.float32)
    assert scope.fp8_matrix(2, 3).scale.isnan().all()
    assert unpack_mxfp4(scope.mxfp4_matrix(2, 32), torch.float32).isnan().all()
    with pytest.raises(AssertionError, match="slots hold 0 of"):
        scope.check_covered()
    with pytest.raises(AssertionError, match="no whole groups"):
        scope.mxfp4_matrix(2, 48)
