"""The steps by which a device's memory is measured: as large as any that will be served."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stagecoach.config.engine import EngineConfig, ResolvedConfig, SpeculativeConfig
from stagecoach.model.tiny import TinyShape, kimi_linear_config, write_tiny_model
from stagecoach.resolve import resolve
from stagecoach.runner.device_budget import chunk_plan, windows_plan
from stagecoach.runner.packed_inputs import PackedInputs, exact_bounds

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, kimi_linear_config(TinyShape()), seed=1)
    return folder


def resolved(folder: Path, num_drafts: int, **options: Any) -> ResolvedConfig:
    if num_drafts:
        options["speculative_config"] = SpeculativeConfig(
            model="tiny-draft", num_speculative_tokens=num_drafts
        )
    return resolve(EngineConfig(model=str(folder), device="cpu", **options))


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(
    ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size"),
    [(2, 1, 1, 1), (2, 64, 8, 64), (100, 30, 6, 8), (500, 64, 100, 16), (64, 500, 3, 5)],
)
def test_the_largest_steps_can_be_packed(
    folder: Path,
    num_drafts: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int,
) -> None:
    config = resolved(
        folder,
        num_drafts,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
    )
    [chunk] = chunk_plan(config).segments
    assert chunk.num_tokens == min(max_num_batched_tokens, max_model_len - 1)
    assert max_model_len - block_size - 1 < chunk.end < max_model_len
    # What the chunk writes lies on pages that are all different, apart from its context's.
    own = chunk.page_ids[chunk.start // block_size :]
    assert len({*own}) == len(own) and not {*own} & {*chunk.page_ids[: chunk.start // block_size]}

    [shorter] = chunk_plan(config, 16).segments
    assert shorter.num_tokens == min(16, chunk.num_tokens)
    assert max(shorter.page_ids) <= max(chunk.page_ids)

    plan = windows_plan(config)
    assert 1 <= len(plan.segments) <= max_num_seqs
    assert 1 <= plan.num_tokens <= max_num_batched_tokens
    assert len(plan.admissions) == len(plan.segments)
    # What acceptance rules count by request goes on for no client's.
    assert all(entry.request_id < 0 for entry in plan.admissions)
    pages = [page for segment in plan.segments for page in segment.page_ids]
    assert len({*pages}) == len(pages)

    inputs = PackedInputs(block_size, torch.device("cpu"), num_values=1, num_buffers=1)
    for largest in (chunk_plan(config), plan):
        packed = inputs.pack(largest)
        assert packed.step.num_tokens == exact_bounds(largest).num_tokens == largest.num_tokens


def test_windows_are_as_wide_as_drafts_allow(folder: Path) -> None:
    config = resolved(folder, 3, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    plan = windows_plan(config)
    assert [segment.num_tokens for segment in plan.segments] == [4] * 4
    assert all(segment.proposes and segment.is_window for segment in plan.segments)
