"""What the threads that read do themselves where weights stay on a CPU."""

from pathlib import Path

import pytest
import torch

from stagecoach.config.model import load_model_config
from stagecoach.model.checkpoint_reader import CheckpointReader, target_naming
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.slot_reads import HostPlacement, check_slot, pieces
from stagecoach.model.tiny import TinyShape, kimi_k3_config, write_tiny_model
from stagecoach.model.weight_formats import WeightFormats
from stagecoach.pipeline.stage import whole_model

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shape = TinyShape(num_layers=2, mla_layers=(1,), block_size=2, num_experts=2)
    write_tiny_model(folder, kimi_k3_config(shape), seed=5)
    return folder


def homes(folder: Path, dtype: torch.dtype, *, is_packed: bool) -> dict[str, bool]:
    """Whether each slot's first piece is read to where it stays."""
    config = load_model_config(folder)
    formats = WeightFormats(packed_layers=frozenset({1}) if is_packed else frozenset())
    model = StageModel(config, whole_model(2), SingleRank(), dtype, formats=formats)
    reader = CheckpointReader(folder, target_naming(has_tied_head=False))
    placement = HostPlacement(reader)
    found = {}
    for slot in model.slots:
        piece, parts = next(pieces(reader, slot, check_slot(reader, slot), 1 << 20))
        memory = placement.homes(piece, parts)
        found[slot.name] = memory is not None
        if memory is not None:
            sizes = [reader.extent(part.name) for part in parts]
            assert [len(home) for home in memory] == [size.end - size.start for size in sizes]
    return found


EXPERT = "model.layers.1.block_sparse_moe.experts.0.w2.weight"
MATRIX = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
DECAY = "model.layers.0.self_attn.A_log"


@pytest.mark.parametrize(
    ("dtype", "is_packed", "expected"),
    [
        (torch.bfloat16, True, {EXPERT: True, MATRIX: False, NORM: True, DECAY: False}),
        (torch.float32, True, {EXPERT: True, MATRIX: False, NORM: False, DECAY: False}),
        (torch.float32, False, {EXPERT: False, MATRIX: False, NORM: False, DECAY: False}),
    ],
)
def test_what_lies_as_it_is_stored_is_read_to_where_it_stays(
    folder: Path, dtype: torch.dtype, *, is_packed: bool, expected: dict[str, bool]
) -> None:
    found = homes(folder, dtype, is_packed=is_packed)
    assert {name: found[name] for name in expected} == expected


def test_only_copies_are_placed_by_those_who_read(folder: Path) -> None:
    config = load_model_config(folder)
    model = StageModel(config, whole_model(2), SingleRank(), torch.float32)
    reader = CheckpointReader(folder, target_naming(has_tied_head=False))
    placement = HostPlacement(reader)
    placed = {}
    for slot in model.slots:
        piece, parts = next(pieces(reader, slot, check_slot(reader, slot), 1 << 20))
        tensors = [reader.read(part.name, part.region) for part in parts]
        placed[slot.name] = placement.place(piece, tensors)
        assert placed[slot.name] != bool(torch.as_tensor(slot.target).isnan().any())
    assert placed[MATRIX] and placed[NORM] and placed[DECAY] and not placed[EXPERT]
