"""Rows of a step as a block of numbers, written for more segments than the plan has."""

import pytest
import torch

from stagecoach.runner.device_rows import DeviceRows, read_rows
from stagecoach.schedule.step_plan import RowResult, Segment, StepPlan, pack_page_table

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu

NUM_DRAFTS = 3


def plan_of(*num_drafts: int) -> StepPlan:
    """A window of each length; every second one proposes."""
    return StepPlan(
        step=5,
        segments=tuple(
            Segment(
                request_id=70 + index,
                epoch=index,
                start=9,
                token_ids=tuple(range(1 + count)),
                num_draft_tokens=count,
                read_slot=1 + index,
                write_slot=1 + index,
                page_table=pack_page_table([1]),
                sampling_row=index,
                proposes=index % 2 == 0,
            )
            for index, count in enumerate(num_drafts)
        ),
    )


def written(num_tokens: int, num_segments: int, *, num_drafts: int, confident: bool) -> DeviceRows:
    """A block whose every number tells where it stands."""
    rows = DeviceRows.empty(
        num_tokens,
        num_segments,
        torch.device("cpu"),
        num_drafts=num_drafts,
        has_confidences=confident,
    )
    rows.token_ids_T.copy_(torch.arange(num_tokens))
    rows.num_accepted_B.copy_(torch.tensor([2, 0, 1, 0, 9, 9])[:num_segments])
    rows.is_finite_B.copy_(torch.tensor([1, 1, 1, 0, 0, 0])[:num_segments])
    if num_drafts:
        ids_BK = 100 + torch.arange(num_segments * num_drafts).view(-1, num_drafts)
        confidences_BK = ids_BK / 1024
        confidences_BK[2, 1] = torch.nan
        rows.store(ids_BK, confidences_BK if confident else None)
    return rows


def test_each_segment_gets_its_own_numbers() -> None:
    plan = plan_of(2, 0, 3, 1)
    rows = written(12, 6, num_drafts=NUM_DRAFTS, confident=True)
    results = read_rows(plan, rows.packed.numpy(), NUM_DRAFTS, has_confidences=True)
    assert results == (
        RowResult(
            request_id=70,
            epoch=0,
            token_ids=(0, 1, 2),
            draft_token_ids=(100, 101, 102),
            confidences=(100 / 1024, 101 / 1024, 102 / 1024),
        ),
        RowResult(request_id=71, epoch=1, token_ids=(3,)),
        # A confidence that is not a number is none at all.
        RowResult(
            request_id=72,
            epoch=2,
            token_ids=(4, 5),
            draft_token_ids=(106, 107, 108),
            confidences=(106 / 1024, 0.0, 108 / 1024),
        ),
        RowResult(request_id=73, epoch=3, token_ids=(), is_finite=False),
    )


def test_without_a_confidence_head_there_are_drafts_only() -> None:
    rows = written(12, 6, num_drafts=NUM_DRAFTS, confident=False)
    first, *_ = read_rows(plan_of(2), rows.packed.numpy(), NUM_DRAFTS, has_confidences=False)
    assert first.draft_token_ids == (100, 101, 102) and first.confidences == ()


def test_without_a_drafter_there_are_tokens_only() -> None:
    rows = written(4, 4, num_drafts=0, confident=False)
    results = read_rows(plan_of(2, 0), rows.packed.numpy(), 0, has_confidences=False)
    assert [row.token_ids for row in results] == [(0, 1, 2), (3,)]
    assert all(row.draft_token_ids == () for row in results)


def test_a_block_of_another_layout_is_noticed() -> None:
    rows = written(12, 6, num_drafts=NUM_DRAFTS, confident=True)
    with pytest.raises(AssertionError, match="expected"):
        read_rows(plan_of(0), rows.packed.numpy(), NUM_DRAFTS, has_confidences=False)
    with pytest.raises(AssertionError, match="another plan"):
        read_rows(plan_of(*[0] * 7), rows.packed.numpy(), NUM_DRAFTS, has_confidences=True)
