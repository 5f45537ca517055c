"""Requests outlive the memory of the workers: another scheduler gives the same tokens."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.request import SamplingParams
from tests.cpu.schedule.fake_executor import LONG, Harness, Limits, prompt
from tests.cpu.schedule.test_schedules import limits, make_harness, play

SIZES = Limits(
    num_stages=2,
    num_draft_tokens=3,
    has_prefix_cache=True,
    num_checkpoint_slots=4,
    max_num_batched_tokens=8,
)


@settings(max_examples=120, deadline=None)
@given(
    sizes=limits(),
    seed=st.integers(0, 2**32 - 1),
    num_requests=st.sampled_from([5, 8, 3, 1]),
    abort_rate=st.sampled_from([0.0, 0.0, 0.1]),
    loss_rate=st.sampled_from([0.01, 0.05, 0.2]),
)
def test_whatever_is_lost_the_tokens_are_those_of_the_request_alone(
    sizes: Limits, seed: int, num_requests: int, abort_rate: float, loss_rate: float
) -> None:
    """None is told twice and none is missing; every promise of a plan holds; nothing is kept."""
    harness = make_harness(sizes, seed)
    play(harness, Random(seed), num_requests, abort_rate, loss_rate)
    harness.check_outcomes()


def test_what_is_left_says_who_was_computed() -> None:
    harness = Harness(SIZES._replace(max_num_seqs=2))
    running = [harness.add(prompt(3 + number), LONG, seed=number) for number in range(2)]
    waiting = harness.add(prompt(5), LONG, seed=2)
    while not all(request.output_token_ids for request in running):
        if harness.launch() is None:
            harness.commit()
    while harness.scheduler.num_in_flight:
        harness.commit()
    plan = harness.launch()
    assert plan is not None
    ends = {request.request_id: request.num_tokens for request in running}
    epochs = [request.epoch for request in (*running, waiting)]
    left = harness.lose_workers()
    assert left.requests == [*running, waiting]
    assert [item.request_id for item in left.in_flight] == [s.request_id for s in plan.segments]
    assert left.next_step == plan.step + 1
    assert [request.num_preemptions for request in (*running, waiting)] == [1, 1, 0]
    assert [request.epoch for request in (*running, waiting)] == [epoch + 1 for epoch in epochs]
    for request in running:
        assert request.num_tokens == ends[request.request_id], "the token log stays"
        assert not request.draft_token_ids and request.num_computed == 0
    replayed = harness.launch()
    assert replayed is not None and replayed.step == left.next_step
    assert replayed.segments[0].start == 0, "nothing is cached"
    harness.finish()
    harness.check_outcomes()


def test_a_limit_of_seats_holds_until_it_is_lifted() -> None:
    harness = Harness(SIZES)
    requests = [
        harness.add(prompt(4), SamplingParams(max_tokens=4, ignore_eos=True), seed=number)
        for number in range(3)
    ]
    harness.scheduler.limit_seats(1)
    while not requests[0].finish_reason:
        assert harness.scheduler.num_running <= 1
        if harness.launch() is None:
            harness.commit()
    assert not requests[2].output_token_ids
    harness.scheduler.limit_seats(SIZES.max_num_seqs)
    harness.launch()
    assert harness.scheduler.num_running == 2
    harness.finish()
    harness.check_outcomes()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_may_end_between_loss_and_replay(*, is_aborted: bool) -> None:
    harness = Harness(SIZES)
    first, second = (harness.add(prompt(6), LONG, seed=number) for number in range(2))
    for _ in range(6):
        if harness.launch() is None:
            harness.commit()
    harness.lose_workers()
    if is_aborted:
        harness.abort(first)
    harness.finish()
    harness.check_outcomes()
    assert (first.finish_reason is second.finish_reason) is not is_aborted
