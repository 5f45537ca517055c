"""The table of docs/prefix-caching.md: what a checkpoint and a page take on one rank."""

from pathlib import Path

import pytest
import torch

from stagecoach.cache.memory_plan import MemoryNeeds, plan_memory
from stagecoach.config.model import ModelConfig, load_model_config, parse_model_config
from stagecoach.model.stage_memory import memory_shapes
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.pipeline.partition import estimate_layer_costs, partition
from stagecoach.pipeline.stage import make_stages, whole_model

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/prefix-caching.md").read_text(encoding="utf-8")


def published() -> ModelConfig:
    shape = TinyShape(
        num_layers=93,
        mla_layers=(*range(3, 92, 4), 92),
        num_heads=96,
        head_dim=128,
        kv_lora_rank=512,
        rope_dim=64,
    )
    return parse_model_config(kimi_k3_config(shape))


@pytest.mark.parametrize(
    ("name", "tp_size", "dtype"),
    [
        ("Kimi-K3, bfloat16, tp 8", 8, torch.bfloat16),
        ("Kimi-K3, bfloat16, tp 1", 1, torch.bfloat16),
        ("demo, float32, tp 1", 1, torch.float32),
    ],
)
def test_bytes_of_a_checkpoint(name: str, tp_size: int, dtype: torch.dtype) -> None:
    is_demo = name.startswith("demo")
    config = load_model_config(ROOT / "stagecoach/demo/checkpoint") if is_demo else published()
    stage = whole_model(config.num_layers)
    plain = memory_shapes(config, stage, tp_size, dtype)
    recorded = memory_shapes(config, stage, tp_size, dtype, num_draft_tokens=7)
    sizes = (plain.bytes_per_slot, recorded.bytes_per_slot, plain.bytes_per_page(64))
    tokens = round(plain.bytes_per_slot / plain.bytes_per_row)
    row = f"| {name} | {' | '.join(f'{size:,}' for size in (*sizes, tokens))} |"
    assert row in PAGE, f"the table lacks {row}"


def test_the_example_of_two_stages_of_eight_ranks() -> None:
    config = published()
    shapes = [
        memory_shapes(config, stage, 8, torch.bfloat16, num_draft_tokens=7)
        for stage in make_stages(partition(estimate_layer_costs(config), 2))
    ]
    needs = [
        MemoryNeeds(
            bytes_per_page=shape.bytes_per_page(64),
            bytes_per_slot=shape.bytes_per_slot,
            available_bytes=16 * 10**9,
        )
        for shape in shapes
    ]
    plan = plan_memory(
        needs, max_num_seqs=64, max_model_len=131_072, block_size=64, max_state_checkpoints=None
    )
    heavy = max(shapes, key=lambda shape: shape.bytes_per_slot)
    text = " ".join(PAGE.split())
    for said in (
        f"a checkpoint takes {heavy.bytes_per_slot:,} bytes of a worker",
        f"the pages of {round(heavy.bytes_per_slot / heavy.bytes_per_row):,} tokens",
        f"{plan.num_slots - 1 - 64} checkpoints beside the 64 slots",
        f"pages for {(plan.num_pages - 1) * 64:,} tokens",
    ):
        assert said in text
