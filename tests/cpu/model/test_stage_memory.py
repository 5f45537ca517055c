"""Bytes of slots and cache rows, against the published model's and against real tensors."""

from pathlib import Path

import pytest
import torch

from stagecoach.model.stage_memory import KdaMemory, MemoryShapes, MlaMemory, memory_shapes
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.model_config import ModelConfig, load_model_config, parse_model_config
from stagecoach.pipeline.stage import make_stages, whole_model

pytestmark = pytest.mark.cpu


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
    of_eight = memory_shapes(config, whole_model(93), 8, torch.bfloat16)
    assert of_eight.bytes_per_slot == 56_171_520
    assert of_eight.bytes_per_row == 27_648, "every rank keeps whole cache rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_allocated_tensors_take_the_announced_bytes(k3_folder: Path, dtype: torch.dtype) -> None:
    config = load_model_config(k3_folder)
    for stage in make_stages((2, 4, 3)):
        shapes = memory_shapes(config, stage, 2, dtype)
        memory = shapes.allocate(num_slots=5, num_rows=12)
        assert sorted(memory.layers) == list(stage.layers)
        assert bytes_of(shapes) == 5 * shapes.bytes_per_slot + 12 * shapes.bytes_per_row
        for layer, tensors in memory.layers.items():
            if isinstance(tensors, KdaMemory):
                assert layer in shapes.kda_layers
                assert tensors.recurrent_SHVK.dtype == (
                    torch.float64 if dtype == torch.float64 else torch.float32
                )
                assert tensors.conv_rows_SRC.dtype == dtype
            else:
                assert layer in shapes.mla_layers
                assert tensors.cache_RD.dtype == dtype


def bytes_of(shapes: MemoryShapes) -> int:
    total = 0
    for tensors in shapes.allocate(num_slots=5, num_rows=12).layers.values():
        assert isinstance(tensors, KdaMemory | MlaMemory)
        assert not any(tensor.any() for tensor in tensors)
        total += sum(tensor.nbytes for tensor in tensors)
    return total


def test_heads_that_the_ranks_do_not_divide() -> None:
    with pytest.raises(AssertionError, match=r"linear_attn_config\.num_heads=96"):
        memory_shapes(published_sizes(), whole_model(93), 5, torch.float32)
