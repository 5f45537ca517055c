"""Loading a draft: the published names and sizes, and every way in which a file can be wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stagecoach.config.draft import load_draft_config, parse_draft_config
from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.draft.load import DRAFT_NAMING, draft_tensors, fill_draft, load_drafter
from stagecoach.draft.model import DraftModel
from stagecoach.draft.tiny import (
    TinyDraftShape,
    gqa_draft_config,
    mla_draft_config,
    write_tiny_draft,
)
from stagecoach.errors import CheckpointError
from stagecoach.model.checkpoint_reader import published_name
from stagecoach.model.kimi_k3 import EMBEDDING, HEAD, StageModel
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.tiny import TinyShape, kimi_k3_config, write_tiny_model
from stagecoach.model.weight_slots import WeightKind
from stagecoach.model.weights import LoadProgress, load_stage
from stagecoach.pipeline.stage import whole_model
from stagecoach.resolve import resolve
from tests.cpu.draft.draft_runs import Stage, make_requests
from tests.cpu.draft.oracle import Oracle
from tests.cpu.draft.published import (
    GQA_CONFIG,
    MLA_CONFIG,
    NUM_GQA_PARAMETERS,
    NUM_MLA_PARAMETERS,
    gqa_tensors,
    mla_tensors,
)
from tests.cpu.model.model_runs import thread_ranks
from tests.cpu.model.test_weights import OneOfMany

pytestmark = pytest.mark.cpu

DOCS = Path(__file__).parents[3] / "docs" / "drafts.md"
SHAPE = TinyDraftShape()
TINY = {"mla": mla_draft_config(SHAPE), "gqa": gqa_draft_config(SHAPE)}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: slot.shape for name, slot in draft_tensors(parse_draft_config(config)).items()}


def stored_shapes(published: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """What of a published list is read, under our names."""
    skipped = tuple(part for parts in DRAFT_NAMING.skip_rules.values() for part in parts)
    return {
        DRAFT_NAMING.rename(name): shape
        for name, shape in published.items()
        if not name.startswith(skipped)
    }


def test_the_68_tensors_of_the_published_latent_draft() -> None:
    published = mla_tensors()
    assert len(published) == 68
    assert sum(map(math.prod, published.values())) == NUM_MLA_PARAMETERS
    assert shapes(MLA_CONFIG) == stored_shapes(published)


def test_the_62_tensors_of_the_published_grouped_draft() -> None:
    published = gqa_tensors()
    assert len(published) == 62
    assert sum(map(math.prod, published.values())) == NUM_GQA_PARAMETERS
    assert shapes(GQA_CONFIG) == stored_shapes(published)


def test_the_larger_latent_draft_has_the_published_size() -> None:
    """Inferact/Kimi-K3.1-Pro-DSpark-preview: 96 heads, Markov rank 512, no embedding."""
    config = MLA_CONFIG | {
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "markov_rank": 512,
    }
    assert sum(map(math.prod, shapes(config).values())) == 2_686_752_257


def test_what_a_published_draft_takes() -> None:
    """The table of `docs/drafts.md`: bytes of weights, and of a token's context rows."""
    ranks = {1: (SingleRank(),), 8: (OneOfMany(0, 8), OneOfMany(7, 8))}
    sizes: dict[int, list[str]] = {1: [], 8: []}
    rows = []
    for config in map(parse_draft_config, (MLA_CONFIG, GQA_CONFIG)):
        for tp_size, some in ranks.items():
            models = [DraftModel(config, tp, torch.bfloat16, device="meta") for tp in some]
            sizes[tp_size].append(", ".join(f"{model.num_parameter_bytes:,}" for model in models))
        widths = [config.num_layers * config.cache_row_width(tp_size) for tp_size in ranks]
        rows.append(", ".join(f"{2 * width:,}" for width in widths))
    page = DOCS.read_text(encoding="utf-8")
    for name, cells in (
        ("weights, tp 1", sizes[1]),
        ("weights, tp 8: rank 0, each other", sizes[8]),
        ("context rows a token, tp 1 and tp 8", rows),
    ):
        line = f"| {name} | {' | '.join(cells)} |"
        assert line in page, f"the table lacks: {line}"


def test_tap_norms_have_a_tensor_each() -> None:
    plain, normed = shapes(MLA_CONFIG), shapes(MLA_CONFIG | {"fc_norm": True})
    assert {name: normed[name] for name in normed.keys() - plain.keys()} == {
        f"fc_norm.{tap}.weight": (7168,) for tap in range(5)
    }


@pytest.fixture(params=TINY)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_tiny_draft(tmp_path, TINY[request.param], seed=5)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DraftModel:
    model = DraftModel(load_draft_config(folder), SingleRank(), dtype)
    fill_draft(model, folder)
    return model


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_every_slot_holds_the_files_values(folder: Path) -> None:
    tensors = {
        DRAFT_NAMING.rename(name): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    model = load(folder)
    assert {slot.name for slot in model.slots} == set(tensors)
    for slot in model.slots:
        assert torch.equal(slot.target, tensors[slot.name].float()), slot.name


@pytest.mark.parametrize("tp_size", [2, 4])
def test_the_ranks_share_out_every_value(folder: Path, tp_size: int) -> None:
    """Each value lies on one rank, on every rank, or, of the last heads, on the first only."""
    config = load_draft_config(folder)
    whole = {slot.name: slot.target for slot in load(folder).slots}
    counts = {name: torch.zeros_like(target) for name, target in whole.items()}
    for rank in range(tp_size):
        model = DraftModel(config, OneOfMany(rank, tp_size), torch.float32)
        fill_draft(model, folder)
        for slot in model.slots:
            counts[slot.name][slot.region] += 1
            assert torch.equal(slot.target, whole[slot.name][slot.region]), slot.name
    for name, count in counts.items():
        is_head = name.startswith(("markov_head", "confidence_head"))
        allowed = [[1.0]] if is_head else [[1.0], [float(tp_size)]]
        assert count.unique().tolist() in allowed, name


def test_the_last_heads_stay_wide_in_a_narrow_draft(folder: Path) -> None:
    for slot in load(folder, torch.bfloat16).slots:
        is_wide = slot.kind is WeightKind.DRAFT_HEAD
        assert slot.target.dtype == (torch.float32 if is_wide else torch.bfloat16), slot.name


@pytest.mark.parametrize("name", TINY)
def test_copies_of_the_targets_embedding_and_head_are_passed_over(
    name: str, tmp_path: Path
) -> None:
    write_tiny_draft(tmp_path / "with", TINY[name], seed=5, has_target_copies=True)
    write_tiny_draft(tmp_path / "without", TINY[name], seed=5)
    stored = set(load_file(tmp_path / "with" / "model.safetensors"))
    assert {"embed_tokens.weight", "lm_head.weight"} <= stored
    copies, plain = load(tmp_path / "with"), load(tmp_path / "without")
    for ours, other in zip(copies.slots, plain.slots, strict=True):
        assert ours.name == other.name and torch.equal(ours.target, other.target)


@pytest.mark.parametrize("name", sorted(shapes(TINY["mla"])))
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    write_tiny_draft(tmp_path, TINY["mla"], seed=5)

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    rewrite(tmp_path, drop)
    with pytest.raises(CheckpointError, match="missing") as caught:
        load(tmp_path)
    assert name in str(caught.value)


def test_an_unused_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"d2t": torch.zeros(512)}))
    with pytest.raises(CheckpointError, match="does not use: d2t"):
        load(folder)


def test_weights_of_a_head_that_is_switched_off_are_named(tmp_path: Path) -> None:
    write_tiny_draft(tmp_path, TINY["mla"], seed=5)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json")
        .read_text()
        .replace('"enable_confidence_head": true', '"enable_confidence_head": false')
    )
    with pytest.raises(CheckpointError, match=r"does not use: confidence_head\.proj\.bias"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    name = "confidence_head.proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(1, 7)}))
    with pytest.raises(CheckpointError, match=r"confidence_head\.proj\.weight has shape \[1, 7\]"):
        load(folder)


def test_a_tensor_under_both_names_is_refused(folder: Path) -> None:
    extra = {"context_norm.weight": torch.ones(64), "hidden_norm.weight": torch.ones(64)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=r"same tensor context_norm\.weight"):
        load(folder)


def test_a_tiny_draft_depends_on_its_seed_alone(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny_draft(tmp_path / folder, TINY["mla"], seed=seed)
    first, same, other = (
        (tmp_path / folder / "model.safetensors").read_bytes() for folder in "abc"
    )
    assert first == same != other


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_drafter_shares_the_targets_embedding_and_head(tp_size: int, tmp_path: Path) -> None:
    """Blocks of a drafter loaded beside its target are those of the formulas on its tables."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_tiny_model(target, kimi_k3_config(TinyShape()), seed=1)
    write_tiny_draft(draft, TINY["mla"], seed=2)
    config = resolve(
        EngineConfig(
            model=str(target),
            dtype="float64",
            tensor_parallel_size=tp_size,
            speculative_config=SpeculativeConfig(model=str(draft), num_speculative_tokens=3),
        )
    )
    assert config.speculation is not None
    seen: list[LoadProgress] = []
    ranks = thread_ranks(tp_size)
    models = [
        load_stage(
            target,
            config.model,
            whole_model(9),
            tp,
            torch.float64,
            taps=config.speculation.draft.taps,
        )
        for tp in ranks
    ]
    drafters = [
        load_drafter(config, model, tp, torch.float64, seen.append)
        for model, tp in zip(models, ranks, strict=True)
    ]
    for drafter, model in zip(drafters, models, strict=True):
        assert drafter._embedding is model.embedding and drafter._head is model.head
    assert seen[-1].num_loaded == seen[-1].num_tensors
    assert seen[-1].num_bytes == seen[-1].total_bytes == drafters[-1].num_parameter_bytes
    stage = Stage(config.speculation.draft, drafters, torch.float64)
    request = make_requests([6], len(SHAPE.taps))[0]
    stage.write_all([request])
    proposal = stage.propose([request], [7])
    tables = {}
    for path in target.glob("*.safetensors"):
        tables |= {published_name(name): tensor for name, tensor in load_file(path).items()}
    embedding, head = (tables[f"{name}.weight"].double() for name in (EMBEDDING, HEAD))
    oracle = Oracle.read(draft)
    block = oracle.block(request.taps, embedding[[7] + [SHAPE.mask_token_id] * 2], head)
    before = 7
    for place in range(3):
        before = int((block.logits[place] + oracle.markov_bias(before)).argmax())
        assert int(proposal.token_ids_NK[0, place]) == before


def test_a_dummy_draft_reads_no_weights(tmp_path: Path) -> None:
    configs = {"target": kimi_k3_config(TinyShape()), "draft": TINY["gqa"]}
    for name, values in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    config = resolve(
        EngineConfig(
            model=str(tmp_path / "target"),
            load_format="dummy",
            speculative_config=SpeculativeConfig(model=str(tmp_path / "draft")),
        )
    )
    assert config.speculation is not None
    tp = SingleRank()
    model = StageModel(
        config.model, whole_model(9), tp, torch.float32, taps=config.speculation.draft.taps
    )
    drafters = [load_drafter(config, model, tp, torch.float32) for _ in range(2)]
    blocks = []
    for drafter in drafters:
        stage = Stage(config.speculation.draft, [drafter], torch.float32)
        request = make_requests([3], len(SHAPE.taps))[0]
        stage.write_all([request])
        blocks.append(stage.caches[0])
    torch.testing.assert_close(*blocks, rtol=0, atol=0, equal_nan=True)
    assert not blocks[0].isnan().all()
