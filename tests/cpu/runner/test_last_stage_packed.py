"""The last stage as a device runs it: the same tokens by either of its two ways."""

from typing import Any

import pytest
import torch

from stagecoach.request import SamplingParams
from stagecoach.runner.last_stage import LastStage
from stagecoach.runner.packed_inputs import PackedInputs
from stagecoach.schedule.step_plan import StepPlan
from tests.cpu.runner.window_runs import (
    NOT_SIMPLE,
    NUM_DRAFTS,
    SIMPLE,
    Decoder,
    FakeDrafter,
    FakeModel,
    FakeStream,
    PackedRun,
    Prefix,
    Schedule,
    all_drafts,
    assert_same,
    decode,
    decoders,
    make_last_stage,
    outcome,
    plain,
    ragged,
    speculation,
    target_logits,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("error", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("schedule", [all_drafts, ragged])
def test_simple_windows_are_the_same_either_way(schedule: Schedule, error: float | None) -> None:
    run = PackedRun()
    theirs = outcome(SIMPLE, schedule, error=error, run=None)
    assert_same(outcome(SIMPLE, schedule, error=error, run=run), theirs)
    # Prompts are chunks, which a graph cannot end; all else it can.
    assert run.num_captured > 4 and run.num_general >= 1


@pytest.mark.parametrize("acceptance", ["shared", "rejection"])
def test_a_plan_with_any_other_row_goes_the_general_way(acceptance: str) -> None:
    """And leaves the noise and the table as they should be for the steps after it."""
    run = PackedRun()
    params = [*SIMPLE, *NOT_SIMPLE]
    theirs = outcome(params, ragged, error=0.3, run=None, acceptance=acceptance)
    assert_same(outcome(params, ragged, error=0.3, run=run, acceptance=acceptance), theirs)
    assert run.num_general > 4


@pytest.mark.parametrize("length", [1.0, 1.75, 3.84, 5.0])
def test_forced_rows_have_the_lengths_of_the_synthetic_rule(length: float) -> None:
    run = PackedRun()
    theirs = outcome(SIMPLE, all_drafts, error=0.5, run=None, synthetic=length)
    assert_same(outcome(SIMPLE, all_drafts, error=0.5, run=run, synthetic=length), theirs)
    assert run.num_captured > 4
    full = [tokens for request in theirs for drafts, tokens in request.rows if drafts == NUM_DRAFTS]
    assert sum(full) / len(full) == pytest.approx(length, abs=0.3)


def first_window(params: dict[str, Any]) -> tuple[Decoder, StepPlan]:
    """A request that stands at its anchor, and the plan that runs it."""
    request = Decoder(number=0, prompt=(1, 2, 3), params=SamplingParams(max_tokens=9, **params))
    request.num_computed, request.token_ids = 3, [5]
    segment = request.segment(1, 0, proposes=False)
    return request, StepPlan(step=0, segments=(segment,), admissions=(request.entry(),))


def admitted(params: dict[str, Any], acceptance: str = "shared") -> tuple[LastStage, StepPlan]:
    _, plan = first_window(params)
    last_stage = make_last_stage(speculation(acceptance), FakeDrafter(0.0))
    last_stage.admit(plan)
    return last_stage, plan


@pytest.mark.parametrize("params", SIMPLE)
def test_a_graph_can_end_simple_windows(params: dict[str, Any]) -> None:
    last_stage, plan = admitted(params)
    assert last_stage.can_capture(plan)


@pytest.mark.parametrize("params", NOT_SIMPLE)
def test_a_graph_cannot_end_a_window_with_other_parameters(params: dict[str, Any]) -> None:
    last_stage, plan = admitted(params)
    assert not last_stage.can_capture(plan)


def test_a_graph_cannot_end_what_the_rejection_rule_draws() -> None:
    last_stage, plan = admitted({"temperature": 1.0}, "rejection")
    assert not last_stage.can_capture(plan)
    last_stage, plan = admitted({"temperature": 0.0}, "rejection")
    assert last_stage.can_capture(plan)


@pytest.mark.parametrize(
    "wish",
    [
        {"is_constrained": True},
        {"reports_logits": True},
        {"prompt_logprob_targets": (4,)},
        {"sampling_row": None},
    ],
)
def test_a_graph_cannot_end_a_segment_that_wants_more(wish: dict[str, Any]) -> None:
    last_stage, plan = admitted({"temperature": 0.0})
    (segment,) = plan.segments
    fields = {name: getattr(segment, name) for name in segment.__struct_fields__}
    changed = type(segment)(**{**fields, **wish})
    assert not last_stage.can_capture(StepPlan(step=1, segments=(changed,)))


def test_all_ranks_go_the_same_way() -> None:
    """A rank that does not sample knows as much of the rows."""
    for params in (*SIMPLE, *NOT_SIMPLE):
        _, plan = first_window(params)
        stages = [
            make_last_stage(None, None, is_sampler=is_sampler) for is_sampler in (True, False)
        ]
        for stage in stages:
            stage.admit(plan)
        assert stages[0].can_capture(plan) == stages[1].can_capture(plan)
        assert stages[1].forced_accepts(plan) is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_tokens(bad: float) -> None:
    """Neither is anything said of the request beside it."""

    def spoilt(prefix: Prefix) -> torch.Tensor:
        logits_V = target_logits(prefix)
        if prefix[:1] == (1,) and len(prefix) > 4:
            logits_V = logits_V.clone()
            logits_V[7] = bad
        return logits_V

    requests = decoders([{"temperature": 0.0}, {"temperature": 0.9}])
    requests[0].prompt = (1, 2, 3)
    run = PackedRun()
    decode(make_last_stage(None, None, model=FakeModel(spoilt)), requests, 8, all_drafts, run)
    clean = decoders([{"temperature": 0.0}, {"temperature": 0.9}])
    decode(make_last_stage(None, None), clean, 8, plain)
    assert requests[0].is_spoilt and not requests[1].is_spoilt
    assert requests[1].token_ids == clean[1].token_ids
    assert run.num_captured


def test_ranks_that_do_not_sample_leave_rows_that_nobody_reads() -> None:
    _, plan = first_window({"temperature": 0.0})
    last_stage = make_last_stage(None, None, is_sampler=False)
    last_stage.admit(plan)
    stream = FakeStream([(1, 2, 3, 5)])
    packed = PackedInputs(4, torch.device("cpu"), num_values=4096, num_buffers=1).pack(plan)
    rows = last_stage.enqueue(packed, stream)  # type: ignore[arg-type]
    assert rows.packed[:2].tolist() == [1, 1]
