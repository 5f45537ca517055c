"""Newest tokens by sampling row, and plans told with them."""

import msgspec
import pytest
import torch

from stagecoach.runner.newest_tokens import NewestTokens
from stagecoach.runner.packed_inputs import PackedInputs
from stagecoach.schedule.step_plan import Segment, StepPlan, pack_page_table


def window(request_id: int, row: int, token_ids: tuple[int, ...] = ()) -> Segment:
    return Segment(
        request_id=request_id,
        epoch=0,
        start=4,
        token_ids=token_ids,
        read_slot=1 + request_id,
        write_slot=1 + request_id,
        page_table=pack_page_table([1 + 2 * request_id, 2 + 2 * request_id]),
        sampling_row=row,
        is_chained=not token_ids,
    )


def chunk(request_id: int) -> Segment:
    return msgspec.structs.replace(window(request_id, 0, (8, 9)), sampling_row=None)


@pytest.fixture
def newest() -> NewestTokens:
    newest = NewestTokens(6, torch.device("cpu"))
    rows_B = torch.tensor([5, -1, 2], dtype=torch.int32)
    newest.note(rows_B, torch.tensor([50, 99, 20], dtype=torch.int32))
    return newest


PLAN = StepPlan(step=0, segments=(window(0, 2), window(1, 3, (7,)), window(2, 5), chunk(3)))
TOKENS = [20, 7, 50, 8, 9]


def test_a_plan_is_told_with_the_tokens_that_it_computes(newest: NewestTokens) -> None:
    told = newest.told(PLAN)
    assert [token for item in told.segments for token in item.token_ids] == TOKENS
    assert not any(segment.is_chained for segment in told.segments)
    assert told.segments[1:2] == PLAN.segments[1:2] and newest.told(told) is told


def test_packed_inputs_get_them_in_place(newest: NewestTokens) -> None:
    inputs = PackedInputs(4, torch.device("cpu"), num_values=500, num_buffers=2)
    packed = inputs.pack(PLAN)
    assert packed.step.token_ids_T[:5].tolist() == [-1, 7, -1, 8, 9]
    newest.fill_in(packed)
    assert packed.step.token_ids_T[:5].tolist() == TOKENS
    known = inputs.pack(newest.told(PLAN))
    assert torch.equal(known.step.cache_rows_T, packed.step.cache_rows_T)
