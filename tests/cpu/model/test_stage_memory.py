"""Bytes of slots and cache rows, against the published model's and against real tensors."""

from pathlib import Path

import pytest
import torch

from stagecoach.config.draft import DraftGqaConfig, DraftMlaConfig
from stagecoach.config.model import ModelConfig, load_model_config, parse_model_config
from stagecoach.model.stage_memory import (
    KdaMemory,
    MemoryShapes,
    StageMemory,
    memory_shapes,
)
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.pipeline.stage import make_stages, whole_model
from tests.cpu.model.small_draft import small_draft

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "stagecoach/demo/checkpoint"
DOCS = ROOT / "docs/state-and-pages.md"


def published_sizes() -> ModelConfig:
    shape = TinyShape(
        num_layers=93,
        mla_layers=(*range(3, 92, 4), 92),
        num_heads=96,
        head_dim=128,
        kv_lora_rank=512,
        rope_dim=64,
    )
    return parse_model_config(kimi_k3_config(shape))


def test_the_published_model_takes_the_published_bytes() -> None:
    config = published_sizes()
    shapes = memory_shapes(config, whole_model(93), 1, torch.bfloat16)
    assert shapes.bytes_per_slot == 449_372_160
    assert shapes.bytes_per_row == 27_648
    assert shapes.bytes_per_page(64) == 64 * 27_648
    narrow = memory_shapes(
        config, whole_model(93), 1, torch.bfloat16, row_dtype=torch.float8_e4m3fn
    )
    assert narrow.bytes_per_row == 13_824 and narrow.bytes_per_slot == shapes.bytes_per_slot
    of_eight = memory_shapes(config, whole_model(93), 8, torch.bfloat16)
    assert of_eight.bytes_per_slot == 56_171_520
    assert of_eight.bytes_per_row == 27_648, "every rank keeps whole cache rows"


def test_a_record_takes_a_fraction_of_the_snapshots() -> None:
    """The table of `docs/state-and-pages.md`: bytes of a slot at tp 1, k = 7.

    The published model's snapshots are the 3.52 GB that ATOM takes for it.
    """

    def sizes(config: ModelConfig, dtype: torch.dtype) -> tuple[int, int, int]:
        stage = whole_model(config.num_layers)
        shapes = memory_shapes(config, stage, 1, dtype, num_draft_tokens=7)
        plain = memory_shapes(config, stage, 1, dtype)
        assert plain.bytes_per_slot_of_snapshots == plain.bytes_per_slot
        return plain.bytes_per_slot, shapes.bytes_per_slot, shapes.bytes_per_slot_of_snapshots

    published = sizes(published_sizes(), torch.bfloat16)
    assert published == (449_372_160, 556_204_032, 3_523_756_032)
    demo = sizes(load_model_config(DEMO), torch.float32)
    assert demo == (448_512, 706_560, 3_330_048)
    page = DOCS.read_text(encoding="utf-8")
    for name, row in (("Kimi-K3, bfloat16", published), ("demo, float32", demo)):
        cells = " | ".join(f"{size:,}" for size in row)
        assert f"| {name} | {cells} |" in page, f"the table lacks {name} with {cells}"


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_allocated_tensors_take_the_announced_bytes(
    k3_folder: Path, dtype: torch.dtype, num_draft_tokens: int
) -> None:
    config = load_model_config(k3_folder)
    for stage in make_stages((2, 4, 3)):
        shapes = memory_shapes(config, stage, 2, dtype, num_draft_tokens)
        memory = shapes.allocate(num_slots=5, num_rows=12)
        assert sorted(memory.layers) == list(stage.layers)
        assert memory.draft_rows_YRD is None
        assert bytes_of(shapes) == 5 * shapes.bytes_per_slot + 12 * shapes.bytes_per_row
        for layer, tensors in memory.layers.items():
            if isinstance(tensors, KdaMemory):
                assert layer in shapes.kda_layers
                assert tensors.recurrent_SHVK.dtype == (
                    torch.float64 if dtype == torch.float64 else torch.float32
                )
                assert tensors.record_SNHX.dtype == tensors.recurrent_SHVK.dtype
                assert tensors.record_SNHX.shape[1] == num_draft_tokens
                assert tensors.conv_rows_SNC.dtype == dtype
                assert tensors.conv_rows_SNC.shape[1] == 3 + num_draft_tokens
            else:
                assert layer in shapes.mla_layers
                assert tensors.cache_RD.dtype == dtype


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    "attention, row_widths",
    [
        (
            DraftMlaConfig(
                num_heads=4,
                q_lora_rank=8,
                kv_lora_rank=20,
                qk_nope_head_dim=8,
                qk_rope_head_dim=4,
                v_head_dim=8,
            ),
            {1: 24, 2: 24},
        ),
        (DraftGqaConfig(num_heads=4, num_kv_heads=2, head_dim=8), {1: 32, 2: 16}),
    ],
    ids=["mla", "gqa"],
)
def test_the_last_stage_keeps_the_drafters_context(
    k3_folder: Path,
    attention: DraftMlaConfig | DraftGqaConfig,
    row_widths: dict[int, int],
    tp_size: int,
) -> None:
    """Every page holds it beside the rows of the layers; other stages have none."""
    config = load_model_config(k3_folder)
    draft = small_draft(attention, num_layers=5)
    first, last = make_stages((4, 5))
    without = memory_shapes(config, last, tp_size, torch.bfloat16, 7)
    shapes = memory_shapes(config, last, tp_size, torch.bfloat16, 7, draft)
    memory = shapes.allocate(num_slots=5, num_rows=12)
    assert memory.draft_rows_YRD is not None
    assert memory.draft_rows_YRD.shape == (5, 12, row_widths[tp_size])
    assert memory.draft_rows_YRD.dtype == torch.bfloat16
    assert shapes.bytes_per_row == without.bytes_per_row + 5 * row_widths[tp_size] * 2
    assert shapes.bytes_per_slot == without.bytes_per_slot
    assert bytes_of(shapes) == 5 * shapes.bytes_per_slot + 12 * shapes.bytes_per_row
    assert memory_shapes(config, first, tp_size, torch.bfloat16, 7, draft) == memory_shapes(
        config, first, tp_size, torch.bfloat16, 7
    )


def bytes_of(shapes: MemoryShapes) -> int:
    """Of 5 slots and 12 rows as they are allocated, all zeros."""
    tensors = tensors_of(shapes.allocate(num_slots=5, num_rows=12))
    assert not any(tensor.any() for tensor in tensors)
    return sum(tensor.nbytes for tensor in tensors)


def tensors_of(memory: StageMemory) -> list[torch.Tensor]:
    tensors = [tensor for layer in memory.layers.values() for tensor in layer]
    if memory.draft_rows_YRD is not None:
        tensors.append(memory.draft_rows_YRD)
    return tensors


def test_heads_that_the_ranks_do_not_divide() -> None:
    with pytest.raises(AssertionError, match=r"linear_attn_config\.num_heads=96"):
        memory_shapes(published_sizes(), whole_model(93), 5, torch.float32)
