"""The scheduler's promises, one by one, on simulated memory."""

import pytest

from stagecoach.errors import PlanDivergenceError, RequestError, StalledError
from stagecoach.request import FinishReason, Request, SamplingParams
from stagecoach.schedule.step_plan import StepPlan, StepResult
from tests.cpu.schedule.fake_executor import (
    EOS,
    LONG,
    Harness,
    Limits,
    decode_until_ready,
    make_scheduler,
    prompt,
    spans,
)
from tests.cpu.schedule.fake_stage import VOCAB_SIZE


def test_chunks_without_results_are_adjacent_and_cover_the_prompt() -> None:
    """I9: progress advances as the plan is made, and the plan keeps its own span."""
    harness = Harness(Limits(num_stages=4, max_num_batched_tokens=3))
    request = harness.add(prompt(10), LONG)
    plans = [harness.launch() for _ in range(4)]
    assert [spans(plan) for plan in plans] == [
        [(100, 0, 3)],
        [(100, 3, 6)],
        [(100, 6, 9)],
        [(100, 9, 10)],
    ]
    sampling = [plan.segments[0].sampling_row for plan in plans if plan]
    assert sampling[:3] == [None] * 3 and sampling[3] is not None
    assert [len(plan.admissions) for plan in plans if plan] == [0, 0, 0, 1]
    assert request.num_computed == 10
    harness.finish()
    harness.check_outcomes()


def test_the_first_chunk_reads_the_zero_slot_and_later_segments_their_own() -> None:
    harness = Harness(Limits(num_stages=3, max_num_batched_tokens=2))
    request = harness.add(prompt(5), LONG)
    plans = [harness.launch() for _ in range(3)]
    slots = [(p.segments[0].read_slot, p.segments[0].write_slot) for p in plans if p]
    assert slots == [(0, request.slot), (request.slot, request.slot), (request.slot, request.slot)]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_no_more_plans_in_flight_than_stages(num_stages: int) -> None:
    """I7."""
    harness = Harness(Limits(num_stages=num_stages, max_num_batched_tokens=1))
    harness.add(prompt(10), LONG)
    for _ in range(num_stages):
        assert harness.scheduler.can_launch and harness.launch()
    assert not harness.scheduler.can_launch and harness.launch() is None
    harness.commit()
    assert harness.scheduler.can_launch and harness.launch()


def test_a_request_with_a_sample_in_flight_is_not_planned() -> None:
    """I8: from its last chunk to that result; a middle chunk's result does not end it."""
    harness = Harness(Limits(num_stages=4, max_num_batched_tokens=3))
    request = harness.add(prompt(5), LONG)
    assert spans(harness.launch()) == [(100, 0, 3)]
    assert spans(harness.launch()) == [(100, 3, 5)]
    assert request.is_sample_in_flight and harness.launch() is None
    assert harness.commit() == []
    assert request.is_sample_in_flight and harness.launch() is None
    [item] = harness.commit()
    assert not request.is_sample_in_flight and len(item.token_ids) == 1
    assert spans(harness.launch()) == [(100, 5, 6)]
    assert request.is_sample_in_flight and harness.launch() is None


def test_a_middle_chunks_result_after_the_final_chunk_was_planned_changes_nothing() -> None:
    """I10, I11: what is due is frozen in the plan."""
    harness = Harness(Limits(num_stages=2, max_num_batched_tokens=4))
    request = harness.add(prompt(8), LONG)
    harness.launch()
    harness.launch()
    assert harness.commit() == []
    assert request.output_token_ids == [] and request.num_tokens == 8
    assert (request.num_computed, request.num_plans_in_flight) == (8, 1)


def test_results_out_of_launch_order_are_fatal() -> None:
    """I6."""
    harness = Harness(Limits(num_stages=2, max_num_batched_tokens=4))
    harness.add(prompt(8), LONG)
    harness.launch()
    harness.launch()
    harness.executor.drain()
    first, second = harness.executor.results
    with pytest.raises(AssertionError, match="step 1 came, 0 is the oldest"):
        harness.scheduler.commit(second)
    harness.scheduler.commit(first)
    with pytest.raises(AssertionError, match="step 0 came, 1 is the oldest"):
        harness.scheduler.commit(first)
    harness.scheduler.commit(second)
    with pytest.raises(AssertionError, match="a result without a plan"):
        harness.scheduler.commit(second)


def test_rows_that_answer_other_segments_are_fatal() -> None:
    """I6: id lists must match."""
    harness = Harness(Limits())
    harness.add(prompt(3), LONG)
    harness.add(prompt(4), LONG)
    harness.launch()
    harness.executor.drain()
    [result] = harness.executor.results
    swapped = StepResult(step=0, digest=result.digest, rows=result.rows[::-1])
    with pytest.raises(AssertionError, match="answers another segment"):
        harness.scheduler.commit(swapped)


def test_a_missing_row_is_fatal() -> None:
    harness = Harness(Limits())
    harness.add(prompt(3), LONG)
    harness.launch()
    harness.executor.drain()
    [result] = harness.executor.results
    with pytest.raises(AssertionError, match="a row a segment"):
        harness.scheduler.commit(StepResult(step=0, digest=result.digest, rows=()))


def test_another_digest_is_a_divergence_that_names_the_step() -> None:
    harness = Harness(Limits())
    harness.add(prompt(3), LONG)
    harness.launch()
    harness.executor.drain()
    [result] = harness.executor.results
    other = StepResult(step=0, digest=b"otherwise", rows=result.rows)
    with pytest.raises(PlanDivergenceError, match=r"step 0: the worker ran plan 6f7468"):
        harness.scheduler.commit(other)


def test_windows_go_first_then_running_chunks_then_new_requests() -> None:
    """In the choice; in the plan, windows and then chunks stand in order of context."""
    harness = Harness(Limits(max_num_batched_tokens=6))
    decoding = harness.add(prompt(3), LONG)
    decode_until_ready(harness, [decoding])
    harness.add(prompt(7), LONG)
    harness.add(prompt(3), LONG)
    assert spans(harness.launch()) == [(100, 3, 4), (101, 0, 5)]
    harness.commit()
    assert spans(harness.launch()) == [(100, 4, 5), (102, 0, 3), (101, 5, 7)]


def test_a_chunk_of_one_token_is_listed_with_the_windows() -> None:
    harness = Harness(Limits(max_num_batched_tokens=16))
    harness.add(prompt(5), LONG)
    harness.add(prompt(1), LONG)
    plan = harness.launch()
    assert spans(plan) == [(101, 0, 1), (100, 0, 5)]
    harness.finish()
    harness.check_outcomes()


@pytest.mark.parametrize(
    ("num_stages", "num_requests", "cohorts"),
    [(1, 4, [4]), (2, 4, [2, 2]), (2, 3, [2, 1]), (4, 4, [1, 1, 1, 1]), (4, 2, [1, 1])],
)
def test_decoding_requests_are_spread_over_the_plans_in_flight(
    num_stages: int, num_requests: int, cohorts: list[int]
) -> None:
    harness = Harness(Limits(num_stages=num_stages))
    requests = [harness.add(prompt(2, first), LONG) for first in range(num_requests)]
    decode_until_ready(harness, requests)
    for _ in range(3):
        plans = []
        while (plan := harness.launch()) is not None:
            plans.append(plan)
        assert [len(plan.segments) for plan in plans] == cohorts
        for _ in plans:
            harness.commit()


def test_cohorts_keep_every_stage_busy() -> None:
    """With each result a plan of the same size can be launched: no stage waits."""
    harness = Harness(Limits(num_stages=2))
    requests = [harness.add(prompt(2, first), LONG) for first in range(4)]
    decode_until_ready(harness, requests)
    harness.launch()
    harness.launch()
    for _ in range(10):
        harness.commit()
        plan = harness.launch()
        assert plan is not None and len(plan.segments) == 2
        assert harness.scheduler.num_in_flight == 2


def test_admission_is_first_come_first_served_and_needs_a_slot() -> None:
    harness = Harness(Limits(max_num_seqs=4, num_live_slots=2, max_num_batched_tokens=64))
    for first in range(3):
        harness.add(prompt(2, first), SamplingParams(max_tokens=1, ignore_eos=True))
    assert [segment[0] for segment in spans(harness.launch())] == [100, 101]
    harness.commit()
    assert [segment[0] for segment in spans(harness.launch())] == [102]
    harness.finish()


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    harness = Harness(Limits(num_pages=1 + 6, max_model_len=24, max_num_batched_tokens=64))
    harness.add(prompt(16), SamplingParams(max_tokens=2, ignore_eos=True))
    large = harness.add(prompt(12), SamplingParams(max_tokens=2, ignore_eos=True))
    harness.add(prompt(2), SamplingParams(max_tokens=2, ignore_eos=True))
    assert spans(harness.launch()) == [(100, 0, 16)]
    assert harness.scheduler.num_waiting == 2
    harness.finish()
    harness.check_outcomes()
    first_step = {
        request_id: min(
            plan.step
            for plan in harness.plans
            for segment in plan.segments
            if segment.request_id == request_id
        )
        for request_id in (large.request_id, 102)
    }
    assert first_step[large.request_id] <= first_step[102]


def test_the_sampling_table_learns_each_request_with_its_first_sample() -> None:
    harness = Harness(Limits(max_num_batched_tokens=4))
    plain = SamplingParams(max_tokens=3, stop_token_ids=(9, 4))
    counted = SamplingParams(max_tokens=3, ignore_eos=True, repetition_penalty=1.5)
    first = harness.add(prompt(4), plain, seed=5)
    second = harness.add(prompt(6), counted, seed=6)
    harness.finish()
    entries = [entry for plan in harness.plans for entry in plan.admissions]
    assert [entry.request_id for entry in entries] == [first.request_id, second.request_id]
    assert entries[0].stop_token_ids == (EOS, 4, 9) and entries[1].stop_token_ids == ()
    assert entries[0].token_ids == () and entries[1].token_ids == tuple(prompt(6))
    assert [entry.seed for entry in entries] == [5, 6]
    assert [entry.num_prompt_tokens for entry in entries] == [4, 6]


def test_prompt_logprob_targets_follow_each_row_inside_the_prompt() -> None:
    harness = Harness(Limits(num_stages=2, max_num_batched_tokens=3))
    ids = prompt(6)
    harness.add(ids, SamplingParams(max_tokens=2, prompt_logprobs=5, ignore_eos=True))
    harness.finish()
    targets = [plan.segments[0].prompt_logprob_targets for plan in harness.plans]
    assert targets == [tuple(ids[1:4]), tuple(ids[4:6]), ()]
    assert [plan.segments[0].num_prompt_logprobs for plan in harness.plans][:2] == [5, 5]
    harness.check_outcomes()


@pytest.mark.parametrize(
    ("length", "params", "field"),
    [
        (0, {}, "prompt"),
        (24, {}, "prompt"),
        (17, {}, "prompt"),  # longer than the pool
        (14, {"max_tokens": 4}, "max_tokens"),  # fits the model, not the pool
        (3, {"max_tokens": 0}, "max_tokens"),
        (3, {"max_tokens": 10**9}, "max_tokens"),
        (14, {"min_tokens": 11, "max_tokens": None}, "min_tokens"),  # room for 10
        (3, {"temperature": float("nan")}, "temperature"),
        (3, {"stop_token_ids": (VOCAB_SIZE + 1,)}, "stop_token_ids"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_leaves_no_trace(
    length: int, params: dict[str, object], field: str
) -> None:
    harness = Harness(Limits(num_pages=1 + 4, max_model_len=24))
    with pytest.raises(RequestError) as error:
        harness.add(prompt(length), SamplingParams(**params))
    assert error.value.field == field
    harness.scheduler.check_idle()


def test_max_tokens_is_capped_by_the_models_length() -> None:
    harness = Harness(Limits(max_model_len=8))
    request = harness.add(prompt(5), SamplingParams(max_tokens=None, ignore_eos=True))
    assert request.max_tokens == 3
    harness.finish()
    assert request.num_tokens == 8 and request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("budget", [1, 3, 4, 5])
def test_a_budget_below_a_page_makes_progress(budget: int) -> None:
    """Nothing is rounded down to zero."""
    harness = Harness(Limits(max_num_batched_tokens=budget, num_pages=1 + 4, max_model_len=16))
    for first in range(3):
        harness.add(prompt(9, first), SamplingParams(max_tokens=5, ignore_eos=True))
    harness.finish()
    harness.check_outcomes()


def test_a_silent_stall_is_an_error_that_names_what_is_wanted() -> None:
    harness = Harness(Limits(num_pages=1 + 4, max_model_len=16))
    harness.add(prompt(6), SamplingParams(max_tokens=4))
    harness.scheduler._cache.take_pages(4)  # lost memory: nobody will ever free it
    with pytest.raises(StalledError, match=r"1 waiting.*0 of 4 pages") as caught:
        harness.scheduler.plan()
    assert "request 100.0 (waiting) at 0 of 6 tokens wants 2 pages, a state slot" in str(
        caught.value
    )


def test_check_integrity_finds_a_page_that_nobody_owns() -> None:
    harness = Harness(Limits())
    request = harness.add(prompt(6), LONG)
    harness.launch()
    request.page_ids.pop()
    with pytest.raises(AssertionError, match="holders of page 2"):
        harness.scheduler.check_integrity()


def test_check_idle_refuses_while_a_result_is_to_come() -> None:
    harness = Harness(Limits())
    harness.add(prompt(6), LONG)
    harness.launch()
    with pytest.raises(AssertionError, match="not idle"):
        harness.scheduler.check_idle()


def test_a_plan_in_flight_is_kept_with_what_was_sent() -> None:
    harness = Harness(Limits(num_stages=2, max_num_batched_tokens=2))
    harness.add(prompt(6), LONG)
    harness.launch()
    plan = harness.launch()
    assert plan is not None
    kept = harness.scheduler.plan_in_flight(1)
    assert kept.plan is plan and StepPlan.decode(kept.encoded) == plan


def test_plans_are_numbered_on_from_those_that_ran_before() -> None:
    scheduler = make_scheduler(Limits(), first_step=7)
    request = Request(request_id=1, prompt_token_ids=(5, 6), params=LONG, seed=0, max_tokens=20)
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None and plan.step == 7
    assert scheduler.plan_in_flight(7).plan is plan


def test_a_request_notes_when_it_was_first_planned() -> None:
    scheduler = make_scheduler(Limits(num_stages=3, max_num_batched_tokens=2))
    requests = [
        Request(request_id=number, prompt_token_ids=(5, 6), params=LONG, seed=0, max_tokens=20)
        for number in (1, 2)
    ]
    for request in requests:
        scheduler.add(request)
    assert [request.first_planned for request in requests] == [None, None]
    for now in (3.0, 5.0, 8.0):
        scheduler.plan(now)
    assert [request.first_planned for request in requests] == [3.0, 5.0]
    aborted = scheduler.abort(1)
    assert aborted is not None and aborted.first_planned == 3.0


def test_requests_end_in_the_same_plans_on_every_run() -> None:
    """No order depends on a hash or a clock."""

    def run() -> list[str]:
        harness = Harness(Limits(num_stages=2, num_pages=1 + 8, max_model_len=24))
        for first in range(5):
            harness.add(prompt(5 + first, first), LONG, seed=first)
        harness.finish()
        return [str(plan) for plan in harness.plans]

    assert run() == run()
