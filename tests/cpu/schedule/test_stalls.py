"""What is wrong on purpose ends in an error that names it; nothing hangs, nobody waits for ever."""

from random import Random

import pytest

from stagecoach.errors import RequestError, StalledError
from stagecoach.request import SamplingParams
from stagecoach.schedule.plan_filling import PlanFilling
from tests.cpu.schedule.fake_executor import Harness, Limits, prompt
from tests.cpu.schedule.test_schedules import play

TINY = Limits(
    max_num_seqs=2,
    max_model_len=16,
    num_pages=1 + 4,
    has_prefix_cache=True,
    state_checkpoint_interval=4,
    num_checkpoint_slots=1,
)


def run_until_stalled(harness: Harness) -> str:
    """The report of the stall that must come."""
    with pytest.raises(StalledError) as caught:
        harness.scheduler.plan()
    return str(caught.value)


def test_lost_slots_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(TINY)
    harness.add(prompt(6), SamplingParams(max_tokens=4))
    monkeypatch.setattr(harness.scheduler._cache, "can_take_slot", lambda: False)
    text = run_until_stalled(harness)
    assert text.startswith("nothing can be planned and no result is to come: Scheduler(1 waiting")
    assert "request 100.0 (waiting) at 0 of 6 tokens wants 2 pages, a state slot" in text


def test_a_request_that_nobody_plans_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is always said to be missing: the request between two chunks waits for ever."""
    harness = Harness(TINY._replace(max_num_batched_tokens=4))
    harness.add(prompt(10), SamplingParams(max_tokens=4))
    harness.launch()
    harness.commit()
    monkeypatch.setattr(PlanFilling, "_make_room", lambda self, request, num_pages: False)
    text = run_until_stalled(harness)
    assert "0 waiting, 1 running" in text and "0 plans in flight" in text
    assert (
        "request 100.0 (between chunks) at 4 of 10 tokens wants 1 page; it holds 1 page, slot"
        in text
    )


def test_plans_that_bring_nobody_further_end_in_an_error() -> None:
    """A request is preempted after each chunk and starts from nothing again."""
    harness = Harness(Limits(max_num_batched_tokens=2, max_model_len=16, num_pages=1 + 4))
    request = harness.add(prompt(9), SamplingParams(max_tokens=4))
    num_plans = 0
    with pytest.raises(StalledError) as caught:
        while num_plans < 10_000:
            harness.launch()
            harness.commit()
            harness.scheduler._preempt(request)
            num_plans += 1
    limit = harness.scheduler._watch.limit
    assert num_plans == limit == 2 * (16 + 1)
    assert f"{limit + 1} plans brought no token" in str(caught.value)
    assert "request 100." in str(caught.value)


def test_a_result_that_is_lost_is_named() -> None:
    """A sample whose row never came: the request waits for a plan that is not in flight."""
    harness = Harness(TINY)
    harness.add(prompt(3), SamplingParams(max_tokens=9))
    harness.scheduler.plan()
    harness.scheduler._in_flight.clear()
    text = run_until_stalled(harness)
    assert "request 100.0 (sampling) at 3 of 3 tokens wants the results of 1 plan" in text


@pytest.mark.parametrize("host_pages", [0, 100])
@pytest.mark.parametrize("num_cached", [0, 12])
def test_what_can_never_fit_is_refused_whatever_is_cached(host_pages: int, num_cached: int) -> None:
    """Neither a cached prefix nor a large host tier makes room for what must be on the device."""
    harness = Harness(
        TINY._replace(max_model_len=40, num_host_pages=host_pages, num_host_slots=host_pages)
    )
    if num_cached:
        harness.add(prompt(num_cached), SamplingParams(max_tokens=1))
        harness.finish()
    with pytest.raises(RequestError, match=r"prompt: has 17 tokens; all 4 pages of 4 .* hold 16"):
        harness.add(prompt(17), SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match=r"max_tokens: 6 outputs .* leaves room for 5"):
        harness.add(prompt(12), SamplingParams(max_tokens=6))
    harness.add(prompt(12), SamplingParams(max_tokens=5, ignore_eos=True))
    harness.finish()
    harness.check_outcomes()


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("num_checkpoint_slots", [0, 1, 3])
@pytest.mark.parametrize("host", [0, 4])
def test_what_just_fits_is_served_from_a_pool_full_of_other_prefixes(
    num_stages: int, num_checkpoint_slots: int, host: int
) -> None:
    """The whole pool for one request, behind hits of every depth, aligned or not."""
    harness = Harness(
        TINY._replace(
            num_stages=num_stages,
            num_checkpoint_slots=num_checkpoint_slots,
            num_host_pages=host,
            num_host_slots=host,
            verify_rate=1.0,
        )
    )
    for length in range(1, 16):
        for first in (1, 2):
            harness.add(prompt(length, first), SamplingParams(max_tokens=17 - length))
            harness.add(prompt(length, first), SamplingParams(max_tokens=1))
    harness.finish()
    harness.check_outcomes()
    stats = harness.scheduler.prefix_cache_stats
    assert stats.num_mismatches == 0
    assert stats.num_hits > 0 or not num_checkpoint_slots


@pytest.mark.parametrize("seed", range(20))
def test_one_seat_one_slot_and_the_smallest_pool_never_stall(seed: int) -> None:
    harness = Harness(
        TINY._replace(
            max_num_seqs=1,
            max_model_len=24,
            num_pages=1 + 6,
            num_checkpoint_slots=seed % 2,
            num_stages=1 + seed % 3,
            max_num_batched_tokens=(1, 5)[seed % 2],
            verify_rate=1.0,
        )
    )
    play(harness, Random(seed), 6, abort_rate=0.02)
    harness.check_outcomes()


def test_to_start_over_is_no_stall() -> None:
    """Readers of one bad state start over, each once, though no token comes of it for long."""
    harness = Harness(TINY._replace(num_stages=2, max_num_batched_tokens=1, num_pages=1 + 12))
    harness.add(prompt(2), SamplingParams(max_tokens=1, ignore_eos=True))
    harness.finish()
    readers = [
        harness.add([*prompt(1), 5, *prompt(13, first)], SamplingParams(max_tokens=1))
        for first in (4, 8)
    ]
    harness.executor.break_rows = lambda segment: segment.epoch == 0 and segment.end == 15
    harness.finish()
    harness.check_outcomes()
    assert all(reader.num_cached_tokens == reader.num_preemptions == 1 for reader in readers)
