"""Published checkpoints at their full size and count, in files of holes."""

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from stagecoach.config.draft import parse_draft_config
from stagecoach.config.engine import EngineConfig
from stagecoach.config.model import load_model_config, parse_model_config
from stagecoach.costs.machine import H200
from stagecoach.draft.load import DRAFT_NAMING, draft_tensors
from stagecoach.model import shard_file
from stagecoach.model.checkpoint_reader import CheckpointReader, target_naming
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.ledger import check_checkpoint, model_tensors
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.sparse import (
    StoredLayout,
    published_layout,
    write_published_model,
    write_sparse_checkpoint,
)
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.model.weight_formats import WeightFormats
from stagecoach.model.weights import load_stage
from stagecoach.pipeline.stage import make_stages
from stagecoach.planning.footprint import Rank
from stagecoach.planning.planner import make_plan
from stagecoach.published import published_config, published_folder
from stagecoach.text.tokenizer import load_tokenizer
from tests.cpu.draft.published import (
    GQA_CONFIG,
    MLA_CONFIG,
    NUM_GQA_PARAMETERS,
    NUM_MLA_PARAMETERS,
    gqa_tensors,
    mla_tensors,
)

pytestmark = pytest.mark.cpu

NUM_TEXT_TENSORS, NUM_VISION_TENSORS, NUM_SHARDS = 497_052, 168, 96
EXPERT_BYTES = 17_547_264


@pytest.fixture(scope="module")
def kimi_k3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All of it: 1.56 TB of files that take 140 MB."""
    folder = tmp_path_factory.mktemp("published") / "kimi-k3"
    write_published_model("kimi-k3", folder)
    yield folder
    for path in folder.iterdir():
        path.unlink()


@pytest.fixture(scope="module")
def reader(kimi_k3: Path) -> CheckpointReader:
    return CheckpointReader(kimi_k3, target_naming(has_tied_head=False))


def test_kimi_k3_has_the_published_counts(kimi_k3: Path, reader: CheckpointReader) -> None:
    shards = sorted(kimi_k3.glob("*.safetensors"))
    assert len(shards) == NUM_SHARDS
    assert len(reader.stored) == NUM_TEXT_TENSORS
    assert reader.skipped == {"vision": NUM_VISION_TENSORS}
    sizes = [path.stat().st_size for path in shards]
    assert sum(sizes) == pytest.approx(1.56e12, rel=0.005)
    assert max(sizes) < 1.2 * min(sizes)
    assert sum(512 * path.stat().st_blocks for path in shards) < 1 << 30


def test_the_ledger_agrees_with_every_name(kimi_k3: Path, reader: CheckpointReader) -> None:
    needed = model_tensors(load_model_config(kimi_k3))
    check_checkpoint(kimi_k3, reader.stored, needed)
    assert sum(prod(slot.shape) for slot in needed.values()) == 2_779_484_478_208 - 69 * 32


def test_shapes_and_types_are_the_published_ones(reader: CheckpointReader) -> None:
    expert = "model.layers.92.block_sparse_moe.experts.895"
    for name, shape, dtype in (
        ("model.embed_tokens.weight", (163840, 7168), "BF16"),
        ("model.layers.0.mlp.down_proj.weight", (7168, 33792), "BF16"),
        ("model.layers.0.self_attn.A_log", (128,), "F32"),
        ("model.layers.4.self_attn.q_conv1d.weight", (12288, 1, 4), "F32"),
        ("model.layers.91.self_attn.kv_b_proj.weight", (24576, 512), "BF16"),
        (f"{expert}.w1.weight_packed", (3072, 1792), "U8"),
        (f"{expert}.w2.weight_scale", (3584, 96), "U8"),
    ):
        assert reader.shape_and_dtype(name) == (shape, dtype)
    parts = [f"{expert}.w{part}.weight_{kind}" for part in "123" for kind in ("packed", "scale")]
    assert sum(prod(reader.shape_and_dtype(name)[0]) for name in parts) == EXPERT_BYTES


def test_a_plan_from_the_folder_is_that_of_the_config(kimi_k3: Path) -> None:
    options: dict[str, Any] = {
        "pipeline_parallel_size": 8,
        "tensor_parallel_size": 8,
        "max_model_len": 131072,
    }
    of_folder = make_plan(EngineConfig(model=str(kimi_k3), **options), H200)
    of_config = make_plan(EngineConfig(model=str(published_folder("kimi-k3")), **options), H200)
    assert of_folder.stages == of_config.stages
    assert of_folder.fits


def test_a_stage_needs_few_shards(kimi_k3: Path, reader: CheckpointReader) -> None:
    config = load_model_config(kimi_k3)
    formats = WeightFormats(frozenset(range(1, 93)))
    for stage in (make_stages([12] * 7 + [9])[index] for index in (3, 7)):
        model = StageModel(config, stage, Rank(5, 8), torch.bfloat16, "meta", formats=formats)
        names = {slot.name for slot in model.slots}
        paths = {
            stored.path
            for name, stored in reader.stored.items()
            if name in names or name.rsplit("_", 1)[0] in names
        }
        assert 1 <= len(paths) <= NUM_SHARDS * (stage.num_layers + 2) / 93


def test_a_rank_reads_its_part_of_a_packed_expert(
    reader: CheckpointReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.40.block_sparse_moe.experts.3.w1.weight_packed"
    reader.shape_and_dtype(name)  # the header is read once
    counts = count_reads(monkeypatch)
    part = reader.read(name, (slice(384, 768), slice(0, 1792)))
    assert not part.any() and part.shape == (384, 1792)
    assert sum(counts) == 384 * 1792


def test_the_vocabulary_has_its_full_size(kimi_k3: Path) -> None:
    tokenizer = load_tokenizer(kimi_k3, model_vocab_size=163840)
    text = "A stage of 12 layers; ein Satz."
    assert tokenizer.decode_bytes(tokenizer.encode(text)).decode() == text


@pytest.mark.parametrize(
    ("root", "tensors", "count", "num_parameters"),
    [
        (MLA_CONFIG, mla_tensors(), 68, NUM_MLA_PARAMETERS),
        (GQA_CONFIG, gqa_tensors(), 62, NUM_GQA_PARAMETERS),
    ],
    ids=["mla", "gqa"],
)
def test_published_drafts_are_read_whole(
    root: dict[str, Any],
    tensors: dict[str, tuple[int, ...]],
    count: int,
    num_parameters: int,
    tmp_path: Path,
) -> None:
    layouts = [StoredLayout(name, "BF16", shape) for name, shape in tensors.items()]
    write_sparse_checkpoint(tmp_path, layouts, root)
    assert len(layouts) == count
    assert sum(prod(item.shape) for item in layouts) == num_parameters
    reader = CheckpointReader(tmp_path, DRAFT_NAMING)
    check_checkpoint(tmp_path, reader.stored, draft_tensors(parse_draft_config(root)))
    for name, slot in draft_tensors(parse_draft_config(root)).items():
        assert reader.shape_and_dtype(name) == (slot.shape, "BF16")


def test_kimi_linear_has_its_parameters() -> None:
    root = published_config("kimi-linear-48b")
    layouts = list(published_layout(root))
    decays = [item for item in layouts if item.name.endswith("A_log")]
    assert {item.shape for item in decays} == {(1, 1, 32, 1)}
    assert sum(prod(item.shape) for item in layouts) == pytest.approx(49.1e9, rel=0.01)
    assert parse_model_config(root).num_layers == 27


def test_workers_read_their_own_bytes_and_hardly_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = kimi_k3_config(TinyShape(num_experts=4, hidden_size=256, expert_size=128))
    write_sparse_checkpoint(tmp_path, published_layout(root), root, num_shards=5)
    config = load_model_config(tmp_path)
    counts = count_reads(monkeypatch)
    stage = make_stages([3, 3, 3])[1]
    sizes = []
    for tp in (SingleRank(), Rank(1, 2)):
        counts.clear()
        model = load_stage(tmp_path, config, stage, tp, torch.bfloat16)
        needed = sum(_stored_bytes(slot, tmp_path) for slot in model.slots)
        assert needed <= sum(counts) <= 1.3 * needed
        sizes.append(sum(counts))
    assert sizes[1] < 0.75 * sizes[0]
    whole = sum(item.num_bytes for item in published_layout(root))
    assert sizes[0] < 0.6 * whole


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read of tensors from now on."""
    counts: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, *place: int) -> int:
        count = preadv(descriptor, buffers, *place)
        counts.append(count)
        return count

    monkeypatch.setattr(shard_file.os, "preadv", counted)
    return counts


def _stored_bytes(slot: Any, folder: Path) -> float:
    """Of a slot's part in the files: packed experts take about half a byte a value."""
    num_values = prod(span.stop - span.start for span in slot.region)
    is_expert = ".experts." in slot.name
    return num_values * (0.53125 if is_expert else 4 if slot.kind.is_stored_as_float32 else 2)
