"""Context rows made late are those made at once, in whatever order cache rows are reused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.config.draft import load_draft_config
from stagecoach.draft.context_rows import MOST_WAITING, ContextRows
from stagecoach.draft.model import DraftModel
from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.model.parallel_linear import SingleRank
from tests.cpu.draft.draft_runs import fill_draft

NUM_TAPS = 3
NUM_CACHE_ROWS = 12

# Cache rows that one step writes: a later step may write some of them anew.
STEPS = st.lists(
    st.lists(st.integers(0, NUM_CACHE_ROWS - 1), min_size=1, max_size=6, unique=True),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DraftModel:
    folder: Path = tmp_path_factory.mktemp("draft")
    write_tiny_draft(folder, mla_draft_config(TinyDraftShape(taps=(0, 1, 2))), seed=4)
    model = DraftModel(load_draft_config(folder), SingleRank(), torch.float64)
    fill_draft(model, folder)
    return model


def empty_cache(model: DraftModel) -> Tensor:
    width = model.config.cache_row_width(1)
    return torch.full((model.config.num_layers, NUM_CACHE_ROWS, width), torch.nan).double()


def draw_taps(model: DraftModel, num_tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, NUM_TAPS, model.config.hidden_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, writes_after=st.sets(st.integers(0, 11)))
def test_late_rows_are_those_made_at_once(
    model: DraftModel, steps: list[list[int]], writes_after: set[int]
) -> None:
    late, at_once = empty_cache(model), empty_cache(model)
    context = ContextRows(model)
    for number, cache_rows in enumerate(steps):
        taps = draw_taps(model, len(cache_rows), number)
        positions = torch.arange(len(cache_rows)) + 7 * number
        rows_YTD = model.context_rows(taps, positions).transpose(0, 1)
        at_once.index_copy_(1, torch.tensor(cache_rows), rows_YTD)
        context.add(taps, positions, torch.tensor(cache_rows), late)
        if number in writes_after:
            context.write()
            torch.testing.assert_close(late, at_once, rtol=0, atol=1e-12, equal_nan=True)
    context.write()
    torch.testing.assert_close(late, at_once, rtol=0, atol=1e-12, equal_nan=True)


def test_few_tokens_wait_and_only_until_they_are_many(model: DraftModel) -> None:
    cache = empty_cache(model)
    context = ContextRows(model)
    one_row = torch.tensor([3])
    for number in range(MOST_WAITING):
        assert cache.isnan().all(), f"written after {number} tokens"
        context.add(draw_taps(model, 1, number), torch.tensor([number]), one_row, cache)
    newest = model.context_rows(draw_taps(model, 1, number), torch.tensor([number]))
    torch.testing.assert_close(cache[:, 3], newest[0], rtol=0, atol=1e-12)


def test_rows_go_to_the_memory_that_they_were_made_for(model: DraftModel) -> None:
    old, new = empty_cache(model), empty_cache(model)
    context = ContextRows(model)
    context.add(draw_taps(model, 1, 1), torch.tensor([0]), torch.tensor([2]), old)
    context.add(draw_taps(model, 1, 2), torch.tensor([0]), torch.tensor([4]), new)
    context.write()
    assert not old[:, 2].isnan().any() and old[:, 4].isnan().all()
    assert not new[:, 4].isnan().any() and new[:, 2].isnan().all()
