"""What a segment returns: all that was asked for, or nothing where something is not finite."""

import pytest
import torch

from stagecoach.runner.row_results import (
    Unread,
    ValuesOnTheirWay,
    finite_chunks,
    finite_rows,
)
from stagecoach.schedule.step_plan import RowResult, Segment, StepPlan, pack_page_table

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu

VALUES = pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def segment(number: int, length: int, *, num_drafts: int = 0, samples: bool = False) -> Segment:
    return Segment(
        request_id=number,
        epoch=2,
        start=0,
        token_ids=tuple(range(length)),
        num_draft_tokens=num_drafts,
        read_slot=0,
        write_slot=number,
        page_table=pack_page_table([number]),
        sampling_row=number if samples else None,
    )


def test_numbers_of_all_kinds_come_over_exactly() -> None:
    ids = torch.tensor([2**40 + 1, 7])
    reals = torch.tensor([[0.1, 2**-30]], dtype=torch.float64)
    halves = torch.tensor([0.5], dtype=torch.bfloat16)
    flags = torch.tensor([True, False])
    assert ValuesOnTheirWay(ids, None, reals, halves, flags).read() == [
        [2**40 + 1, 7],
        [],
        [0.1, 2**-30],
        [0.5],
        [1, 0],
    ]
    assert ValuesOnTheirWay(ids, None, flags).read() == [[2**40 + 1, 7], [], [1, 0]]


@VALUES
@DTYPES
def test_one_value_spoils_its_row_and_no_other(dtype: torch.dtype, value: float) -> None:
    logits_RV = torch.full((4, 1000), 3e4, dtype=dtype)
    assert finite_rows(logits_RV).all()
    logits_RV[2, 77] = value
    assert finite_rows(logits_RV).tolist() == [True, True, False, True]


PLAN = StepPlan(
    step=0,
    segments=(
        segment(1, 3, num_drafts=2, samples=True),  # tokens 0 to 2
        segment(2, 1),  # 3, a chunk of one token
        segment(3, 4),  # 4 to 7
        segment(4, 2, samples=True),  # 8 and 9
    ),
)


@VALUES
@DTYPES
@pytest.mark.parametrize("token", range(10))
def test_every_token_of_a_chunk_counts_and_none_of_a_window_that_samples(
    token: int, dtype: torch.dtype, value: float
) -> None:
    hidden_TH = torch.full((10, 64), 1e3, dtype=dtype)
    hidden_TH[token, 5] = value
    found = finite_chunks(PLAN, hidden_TH)
    assert found.segments == [1, 2, 3]
    assert found.is_finite_C is not None
    assert found.is_finite_C.tolist() == [token != 3, token not in range(4, 8), token < 8]


def test_a_chunk_that_is_not_finite_returns_nothing() -> None:
    """Not even its log-probabilities."""
    plan = StepPlan(step=0, segments=PLAN.segments[1:3])
    hidden_TH = torch.ones(5, 8)
    hidden_TH[3] = torch.nan
    targets = {index: (object(),) * 2 for index in (0, 1)}
    rows = Unread(plan, None, finite_chunks(plan, hidden_TH), None, targets).read()  # type: ignore[arg-type]
    assert rows == (
        RowResult(request_id=2, epoch=2, token_ids=(), prompt_logprobs=targets[0]),  # type: ignore[arg-type]
        RowResult(request_id=3, epoch=2, token_ids=(), is_finite=False),
    )


def test_a_plan_of_windows_that_sample_looks_at_no_hidden_state() -> None:
    plan = StepPlan(step=0, segments=PLAN.segments[:1])
    found = finite_chunks(plan, torch.full((3, 8), torch.nan))
    assert found.segments == [] and found.is_finite_C is None
