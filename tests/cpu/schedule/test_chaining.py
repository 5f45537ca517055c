"""Windows chained to a sample in flight: who is, who waits, and that nothing else changes."""

from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from stagecoach.request import FinishReason, SamplingParams
from stagecoach.schedule.step_plan import StepPlan
from tests.cpu.schedule.fake_executor import (
    LONG,
    Harness,
    Limits,
    decode_until_ready,
    prompt,
    spans,
)
from tests.cpu.schedule.fake_stage import VOCAB_SIZE
from tests.cpu.schedule.test_schedules import MAX_MODEL_LEN, PAGES_OF_ONE, limits, play
from tests.cpu.table_constraint import TableConstraint, line

CHAINING = Limits(is_chaining=True)


def chained(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [segment.request_id for segment in plan.segments if segment.is_chained]


def test_a_window_is_chained_to_the_prompt_and_to_the_window_before() -> None:
    harness = Harness(CHAINING)
    request = harness.add(prompt(3), LONG)
    assert spans(harness.launch()) == [(100, 0, 3)]
    ahead = harness.launch()
    assert spans(ahead) == [(100, 3, 4)] and chained(ahead) == [100]
    assert not harness.scheduler.can_launch and harness.launch() is None
    for num_outputs in range(1, 10):
        harness.commit()
        assert request.num_tokens == 3 + num_outputs, "nothing stands for a token to come"
        assert chained(harness.launch()) == [100]
    harness.finish()
    harness.check_outcomes()


def test_nobody_is_without_the_option() -> None:
    harness = Harness(Limits())
    harness.add(prompt(3), LONG)
    assert harness.launch() and harness.launch() is None


def test_who_ends_leaves_a_window_that_counts_for_nothing() -> None:
    """Its pages, slot and row have the next owner before that window has run."""
    harness = Harness(CHAINING._replace(max_num_seqs=1, num_pages=3, max_model_len=8))
    stops = tuple(range(1, VOCAB_SIZE))
    first = harness.add(
        prompt(3), SamplingParams(max_tokens=5, ignore_eos=True, min_tokens=2, stop_token_ids=stops)
    )
    second = harness.add(prompt(3, first=5), SamplingParams(max_tokens=2, ignore_eos=True))
    while first.finish_reason is None:
        if harness.launch() is None:
            harness.commit()
    assert first.finish_reason is FinishReason.STOP
    harness.finish()
    assert len([segment for plan in harness.plans for segment in plan.segments]) == (
        first.num_steps + 1 + second.num_steps
    )
    assert len(second.output_token_ids) == 2
    harness.check_outcomes()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_no_window_is_planned_beyond_the_last_token(max_tokens: int) -> None:
    harness = Harness(CHAINING)
    request = harness.add(prompt(3), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    harness.finish()
    assert len(harness.plans) == max_tokens == request.num_steps
    harness.check_outcomes()


def test_a_state_that_is_filed_under_the_token_waits_for_it() -> None:
    """One window in so many; pages that fill up meanwhile get their names with the next one."""
    harness = Harness(
        CHAINING._replace(has_prefix_cache=True, num_checkpoint_slots=8, block_size=4)
    )
    harness.add(prompt(3), SamplingParams(max_tokens=30, ignore_eos=True))
    harness.finish()
    windows = [plan.segments[0] for plan in harness.plans[1:]]
    waited = [window.start for window in windows if not window.is_chained]
    assert waited == [start for start in (7, 15, 23, 31) if start < 32]
    assert all(save.position == window.end for window in windows for save in window.saves)
    again = harness.add(prompt(3), SamplingParams(max_tokens=30, ignore_eos=True))
    harness.add([*prompt(3), *again.output_token_ids], LONG)
    harness.finish()
    harness.check_outcomes()


def test_where_a_page_is_missing_nothing_is_planned_ahead() -> None:
    """So the younger request comes to rest and gives way to the older one."""
    harness = Harness(CHAINING._replace(num_pages=1 + 6, max_model_len=24, max_num_seqs=2))
    old = harness.add(prompt(8), SamplingParams(max_tokens=14, ignore_eos=True))
    young = harness.add(prompt(6, first=4), SamplingParams(max_tokens=14, ignore_eos=True))
    harness.finish()
    assert old.num_preemptions == 0 and young.num_preemptions > 0
    assert any(chained(plan) for plan in harness.plans)
    harness.check_outcomes()


def test_while_a_request_under_a_grammar_decodes_nothing_is_planned_ahead() -> None:
    """It would be in every other plan, and meet the others never again."""
    harness = Harness(CHAINING)
    free = harness.add(prompt(3), LONG)
    obedient = harness.add(prompt(4), LONG)
    obedient.constraint = TableConstraint(line(1, 2), vocab_size=VOCAB_SIZE)
    assert len(spans(harness.launch())) == 2 and harness.launch() is None
    harness.abort(obedient)
    assert chained(harness.launch()) == [free.request_id]
    harness.finish()


def test_who_waited_meets_the_others_in_the_next_plan() -> None:
    harness = Harness(
        CHAINING._replace(
            has_prefix_cache=True,
            state_checkpoint_interval=8,
            num_checkpoint_slots=8,
            max_num_seqs=3,
        )
    )
    for length in (2, 3, 5):
        harness.add(prompt(length, first=length), SamplingParams(max_tokens=24, ignore_eos=True))
    while all(not plan.segments[0].is_window for plan in harness.plans):
        harness.launch()
    sizes = []
    while not any(request.finish_reason for request in harness.requests.values()):
        if harness.launch() is None:
            harness.commit()
        else:
            sizes.append(len(harness.plans[-1].segments))
    assert min(sizes) >= 2 and sizes.count(3) > len(sizes) // 2, sizes
    harness.finish()
    harness.check_outcomes()


def test_an_abort_with_two_samples_in_flight_frees_all_and_files_no_state() -> None:
    harness = Harness(CHAINING._replace(has_prefix_cache=True, num_checkpoint_slots=2))
    request = harness.add(prompt(5), LONG)
    harness.launch()
    assert chained(harness.launch()) == [100]
    harness.abort(request)
    assert harness.scheduler.num_free_pages == harness.scheduler.num_pages
    follower = harness.add(prompt(5), LONG)
    harness.launch()
    harness.commit()
    harness.finish()
    assert follower.num_cached_tokens <= 4
    harness.check_outcomes()


@pytest.mark.parametrize("has_hit", [False, True])
def test_a_row_that_is_not_finite_takes_the_chained_one_with_it(has_hit: bool) -> None:
    harness = Harness(CHAINING._replace(has_prefix_cache=True, num_checkpoint_slots=4))
    if has_hit:
        decode_until_ready(harness, [harness.add(prompt(9), LONG)])
        harness.abort(harness.requests[100])
    request = harness.add(prompt(9), LONG)
    assert harness.launch() and harness.launch()
    harness.executor.break_rows = lambda segment: segment.epoch == 0
    harness.commit()
    assert (request.finish_reason is FinishReason.ERROR) == (request.num_cached_tokens == 0)
    harness.finish()
    harness.check_outcomes()


@settings(max_examples=80, deadline=None)
@given(
    sizes=limits(),
    seed=st.integers(0, 2**32 - 1),
    abort_rate=st.sampled_from([0.0, 0.0, 0.02, 0.1]),
    break_rate=st.sampled_from([0.0, 0.0, 0.02]),
    verify_rate=st.sampled_from([0.0, 0.0, 1.0]),
)
def test_every_chained_schedule_gives_the_tokens_of_the_request_alone(
    sizes: Limits, seed: int, abort_rate: float, break_rate: float, verify_rate: float
) -> None:
    sizes = sizes._replace(
        num_stages=1, num_draft_tokens=0, is_chaining=True, verify_rate=verify_rate
    )
    harness = Harness(sizes)
    random = Random(seed)
    harness.executor.break_rows = lambda segment: random.random() < break_rate
    play(harness, random, num_requests=8, abort_rate=abort_rate)
    harness.check_outcomes()
    event(f"chained: {any(chained(plan) for plan in harness.plans)}")
    event(f"preempted: {harness.scheduler.num_preemptions > 0}")


def test_the_chained_schedules_reach_what_they_are_for() -> None:
    num_chained = num_preemptions = num_late_rows = num_ended_behind = 0
    for seed in range(20):
        sizes = Limits(
            is_chaining=True,
            max_num_batched_tokens=(3, 9, 64)[seed % 3],
            max_model_len=MAX_MODEL_LEN,
            num_pages=1 + PAGES_OF_ONE + seed % 4,
            has_prefix_cache=seed % 2 == 0,
            num_checkpoint_slots=3,
        )
        harness = Harness(sizes)
        play(harness, Random(seed), num_requests=8, abort_rate=0.02)
        harness.check_outcomes()
        num_chained += sum(len(chained(plan)) for plan in harness.plans)
        num_preemptions += harness.scheduler.num_preemptions
        segments = [segment for plan in harness.plans for segment in plan.segments]
        num_late_rows += len(segments) - sum(r.num_steps for r in harness.requests.values())
        num_ended_behind += sum(
            request.finish_reason is FinishReason.STOP for request in harness.requests.values()
        )
    seen = (num_chained, num_preemptions, num_late_rows, num_ended_behind)
    assert num_chained > 100 and min(seen) > 10, seen
