"""Requests that go on from what another left, on grids of stages and ranks: as if computed anew.

Plans are written by hand. All free memory, of the device and of the host, holds NaN, and every
slot that is read is checked against its tag.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from stagecoach.cache.memory_moves import MemoryMoves, PageCopy, Transfer
from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config.engine import SpeculativeConfig
from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.request import SamplingParams
from stagecoach.schedule.step_plan import Comparison, RowResult
from tests.cpu.runner.stage_runs import (
    SHAPE,
    VOCAB_SIZE,
    Script,
    Tenant,
    assert_same,
    config_of,
    run_grid,
    write_checkpoints,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu

MEMORY = MemoryPlan(num_pages=20, num_slots=8, num_host_pages=4, num_host_slots=2)
NUM_DRAFTS = 3
SHARED = tuple((53 * place + 7) % 500 for place in range(14))
GREEDY = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)


def writer() -> Tenant:
    tokens = (*SHARED, *range(100, 110))
    return Tenant(1, tokens, (3, 9, 1, 12, 6, 15), slot=1, row=0, params=GREEDY, proposes=True)


def reader(position: int, *, checkpoint: int | None, pages: tuple[int, ...], slot: int) -> Tenant:
    """Shares SHARED, and goes on from `position`; from nothing without a checkpoint."""
    return Tenant(
        request_id=10 + slot,
        token_ids=(*SHARED, *range(200 + slot, 210 + slot)),
        pages=pages,
        slot=slot,
        row=slot,
        params=GREEDY,
        proposes=True,
        num_computed=position if checkpoint else 0,
        checkpoint=checkpoint,
    )


class Hit(NamedTuple):
    """Plans up to where one reader has hit; `tenant` has computed nothing since."""

    script: Script
    tenant: Tenant
    position: int


def hit_of_a_save_in_a_chunk() -> Hit:
    """In the middle of a page, by the very next plan, beside the writer's next chunk."""
    script, first = Script(), writer()
    first.saves = {6: 5}
    script.add((first, 9, "chunk"))
    tenant = reader(6, checkpoint=5, pages=(3, 14, 2, 7, 10, 11), slot=2)
    moves = MemoryMoves(copies=(PageCopy(source=9, target=14, num_tokens=2),))
    script.add((first, 5, "chunk"), (tenant, 3, "chunk"), moves=moves)
    return Hit(script, tenant, 9)


def hit_of_a_save_among_replayed_drafts() -> Hit:
    """The window behind saves what two of the window before came to, and all it is sure of."""
    script, first = Script(), writer()
    script.add((first, 7, "sample"))
    script.add((first, 4, 3))
    first.saves = {10: 5, 12: 6}
    script.add((first, 3, 2))
    tenant = reader(10, checkpoint=5, pages=(3, 9, 14, 7, 10, 11), slot=2)
    moves = MemoryMoves(copies=(PageCopy(source=1, target=14, num_tokens=2),))
    script.add((first, 1, 0), (tenant, 3, "chunk"), moves=moves)
    return Hit(script, tenant, 13)


def hit_of_a_donated_slot_with_its_record() -> Hit:
    """The writer has ended; the state of its slot, two accepted drafts folded in."""
    script, first = Script(), writer()
    script.add((first, 8, "sample"))
    script.add((first, 4, 3))
    tenant = reader(11, checkpoint=first.slot, pages=(3, 9, 14, 7, 10, 11), slot=2)
    tenant.num_recorded = 2
    moves = MemoryMoves(copies=(PageCopy(source=1, target=14, num_tokens=3),))
    script.add((tenant, 2, "chunk"), moves=moves)
    return Hit(script, tenant, 13)


def hit_behind_full_pages() -> Hit:
    """No page to copy; and a second reader of the same checkpoint in the same plan."""
    script, first = Script(), writer()
    first.saves = {8: 5}
    script.add((first, 14, "chunk"))
    tenant = reader(8, checkpoint=5, pages=(3, 9, 14, 7, 10, 11), slot=2)
    other = reader(8, checkpoint=5, pages=(3, 9, 4, 5, 8, 13), slot=3)
    script.add((tenant, 2, "chunk"), (other, 4, "chunk"))
    return Hit(script, tenant, 10)


def hit_that_was_on_the_host() -> Hit:
    """Evicted, overwritten by somebody else, and back in other pages and the reader's own slot."""
    script, first = Script(), writer()
    first.saves = {6: 5}
    script.add((first, 9, "sample"))
    intruder = reader(0, checkpoint=None, pages=(9, 3, 13), slot=5)
    stored = MemoryMoves(
        store_pages=(Transfer(3, 2), Transfer(9, 0)),
        store_slots=(Transfer(5, 1),),
        scrub_pages=(3, 9),
        scrub_slots=(5,),
    )
    script.add((intruder, 7, "chunk"), moves=stored)
    tenant = reader(6, checkpoint=2, pages=(16, 14, 2, 7, 10, 11), slot=2)
    loaded = MemoryMoves(
        load_pages=(Transfer(16, 2), Transfer(14, 0)), load_slots=(Transfer(2, 1),)
    )
    script.add((intruder, 1, "chunk"), (tenant, 3, "chunk"), moves=loaded)
    return Hit(script, tenant, 9)


HITS = (
    hit_of_a_save_in_a_chunk,
    hit_of_a_save_among_replayed_drafts,
    hit_of_a_donated_slot_with_its_record,
    hit_behind_full_pages,
    hit_that_was_on_the_host,
)


def finish(script: Script, tenant: Tenant) -> None:
    """The rest of the prompt with a sample, a window with drafts, and one that replays them."""
    script.add((tenant, 17 - tenant.num_computed, "sample"))
    script.add((tenant, 3, 2))
    script.add((tenant, 1, 0))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeConfig:
    folder = tmp_path_factory.mktemp("draft")
    config = mla_draft_config(TinyDraftShape(taps=(5, -1, 2), hidden_size=SHAPE.hidden_size))
    write_tiny_draft(folder, config, seed=6)
    return SpeculativeConfig(model=str(folder), num_speculative_tokens=NUM_DRAFTS)


LAYOUTS = [((6,), 1), ((6,), 2), ((3, 3), 1), ((2, 4), 2), ((2, 2, 2), 1), ((1, 3, 2), 2)]


def rows_of(rows: list[tuple[RowResult, ...]], tenant: Tenant) -> list[RowResult]:
    return [row for step in rows for row in step if row.request_id == tenant.request_id]


@pytest.fixture(scope="module")
def cold_rows(
    checkpoints: dict[str, Path], speculative: SpeculativeConfig
) -> Callable[[Callable[[], Hit]], list[RowResult]]:
    """What the reader of a hit returns alone on one stage, first all up to where it is read."""
    config = config_of(checkpoints["kimi_k3"], (6,), 1, speculative)

    @cache
    def run(make_hit: Callable[[], Hit]) -> list[RowResult]:
        _, hit, position = make_hit()
        script, cold = Script(), reader(0, checkpoint=None, pages=hit.pages, slot=hit.slot)
        script.add((cold, position, "chunk"))
        finish(script, cold)
        return rows_of(run_grid(config, script.plans, MEMORY).rows, cold)

    return run


@pytest.mark.parametrize(("partition", "tp_size"), LAYOUTS)
@pytest.mark.parametrize("make_hit", HITS)
def test_after_a_hit_all_is_as_without_it(
    make_hit: Callable[[], Hit],
    partition: tuple[int, ...],
    tp_size: int,
    checkpoints: dict[str, Path],
    speculative: SpeculativeConfig,
    cold_rows: Callable[[Callable[[], Hit]], list[RowResult]],
) -> None:
    """Log-probabilities of every position, tokens, and what the drafter makes of its context."""
    script, tenant, position = make_hit()
    assert tenant.num_computed == position
    finish(script, tenant)
    config = config_of(checkpoints["kimi_k3"], partition, tp_size, speculative)
    ours = rows_of(run_grid(config, script.plans, MEMORY).rows, tenant)

    theirs = cold_rows(make_hit)

    assert [len(row.draft_token_ids) for row in ours] == [0, *[NUM_DRAFTS] * 3]
    num_shared = len(theirs[0].prompt_logprobs) - len(ours[0].prompt_logprobs)
    assert num_shared > 0
    start = theirs[0].prompt_logprobs[num_shared:]
    first = RowResult(request_id=theirs[0].request_id, epoch=0, token_ids=(), prompt_logprobs=start)
    assert_same([tuple(ours)], [(first, *theirs[1:])])
    for one, other in zip(ours, theirs, strict=True):
        assert one.is_finite
        assert one.draft_token_ids == other.draft_token_ids
        assert one.confidences == pytest.approx(other.confidences, abs=1e-9)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_hit_on_a_kimi_linear(tp_size: int, checkpoints: dict[str, Path]) -> None:
    script, tenant, position = hit_of_a_save_in_a_chunk()
    script.add((tenant, 15 - position, "sample"))
    config = config_of(checkpoints["kimi_linear"], (4, 2), tp_size)
    ours = rows_of(run_grid(config, script.plans, MEMORY).rows, tenant)
    cold_script, cold = Script(), reader(0, checkpoint=None, pages=tenant.pages, slot=tenant.slot)
    cold_script.add((cold, position, "chunk"))
    cold_script.add((cold, 15 - position, "sample"))
    one_stage = config_of(checkpoints["kimi_linear"])
    theirs = rows_of(run_grid(one_stage, cold_script.plans, MEMORY).rows, cold)
    assert_same([(ours[1],)], [(theirs[1],)])


@pytest.mark.parametrize(("partition", "tp_size"), [((6,), 1), ((2, 4), 2), ((1, 1, 3, 1), 1)])
def test_every_worker_tells_how_far_states_are_apart(
    partition: tuple[int, ...], tp_size: int, checkpoints: dict[str, Path]
) -> None:
    """A saved state against one computed from nothing; a stage of MLA layers has none."""
    script, first = Script(), writer()
    first.saves = {6: 5}
    script.add((first, 9, "chunk"))
    other = reader(0, checkpoint=None, pages=(16, 14, 2), slot=2)
    script.add((other, 6, "chunk"))
    script.add((first, 1, 0), comparisons=(Comparison(5, 0, 2), Comparison(2, 0, 2)))
    config = config_of(checkpoints["kimi_k3"], partition, tp_size)
    outcomes = run_grid(config, script.plans, MEMORY).outcomes
    assert len(outcomes) == len(partition) * tp_size
    for rank, steps in enumerate(outcomes):
        assert [len(step.differences) for step in steps] == [0, 0, 2]
        [saved, same] = steps[2].differences
        assert same == 0.0 and saved < 1e-9
        # Stage 1 of the last layout holds layer 1, an MLA layer, alone.
        assert len(partition) < 4 or rank != 1 or saved == 0.0


def test_a_page_copied_one_row_short_is_found(checkpoints: dict[str, Path]) -> None:
    """What the tests above rest on: the row that is missing is NaN."""
    script, first = Script(), writer()
    first.saves = {6: 5}
    script.add((first, 9, "chunk"))
    tenant = reader(6, checkpoint=5, pages=(3, 14, 2), slot=2)
    moves = MemoryMoves(copies=(PageCopy(source=9, target=14, num_tokens=1),))
    script.add((first, 5, "chunk"), (tenant, 3, "chunk"), moves=moves)
    [_, [ours, theirs]] = run_grid(config_of(checkpoints["kimi_k3"]), script.plans, MEMORY).rows
    assert ours.is_finite and not theirs.is_finite


@pytest.mark.parametrize("change", ["checkpoint", "num_recorded", "saves"])
def test_a_plan_that_reads_the_wrong_state_fails_on_every_rank(
    change: str, checkpoints: dict[str, Path]
) -> None:
    script, first = Script(), writer()
    first.saves = {7 if change == "saves" else 6: 5}
    script.add((first, 9, "chunk"))
    tenant = reader(6, checkpoint=5, pages=(3, 14, 2), slot=2)
    if change == "checkpoint":
        tenant.checkpoint = first.slot
    if change == "num_recorded":
        tenant.num_recorded = 1
    script.add((tenant, 3, "chunk"), moves=MemoryMoves(copies=(PageCopy(9, 14, 2),)))
    with pytest.raises(AssertionError, match=r"slot [15] holds the state after [679] tokens"):
        run_grid(config_of(checkpoints["kimi_k3"], (3, 3)), script.plans, MEMORY)
