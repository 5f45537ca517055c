"""Shadows under the scheduler: they change nothing for anybody, and give way at once."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.request import Request, SamplingParams
from tests.cpu.schedule.fake_executor import LONG, Harness, Limits, prompt
from tests.cpu.schedule.test_schedules import limits, make_harness, play

VERIFYING = Limits(
    has_prefix_cache=True,
    num_checkpoint_slots=4,
    state_checkpoint_interval=4,
    verify_rate=1.0,
)


def counts(harness: Harness) -> tuple[int, int, int]:
    stats = harness.scheduler.prefix_cache_stats
    return stats.num_verified, stats.num_mismatches, stats.num_unverified


def warm(harness: Harness, length: int = 12) -> None:
    harness.add(prompt(length), SamplingParams(max_tokens=1, ignore_eos=True))
    harness.finish()


@settings(max_examples=50, deadline=None)
@given(
    sizes=limits(),
    seed=st.integers(0, 2**32 - 1),
    rate=st.sampled_from([1.0, 0.5, 0.1]),
    abort_rate=st.sampled_from([0.0, 0.02, 0.1]),
)
def test_every_schedule_with_shadows_gives_the_tokens_of_the_request_alone(
    sizes: Limits, seed: int, rate: float, abort_rate: float
) -> None:
    """Each is settled one way or the other, no right hit is found wrong, and nothing is left."""
    sizes = sizes._replace(has_prefix_cache=True, verify_rate=rate)
    harness = make_harness(sizes, seed)
    play(harness, Random(seed), 10, abort_rate)
    harness.check_outcomes()
    num_verified, num_mismatches, num_unverified = counts(harness)
    assert num_mismatches == 0
    assert num_verified + num_unverified >= len(harness.shadows)
    assert not harness.scheduler.shadows.waiting
    assert len(harness.scheduler.shadows.take_verdicts()) == num_verified


def test_the_random_schedules_verify_and_give_up() -> None:
    totals = [0, 0, 0]
    for seed in range(24):
        sizes = Limits(
            num_stages=1 + seed % 3,
            max_num_batched_tokens=(5, 9, 64)[seed % 3],
            max_model_len=24,
            num_pages=1 + 6 + (2, 6, 30)[seed % 3],
            num_draft_tokens=(3, 0)[seed % 2],
            has_prefix_cache=True,
            state_checkpoint_interval=4,
            num_checkpoint_slots=2 + seed % 4,
            num_host_pages=12 * (seed % 2),
            num_host_slots=6 * (seed % 2),
            verify_rate=1.0,
        )
        harness = make_harness(sizes, seed)
        play(harness, Random(seed), 12, abort_rate=0.02)
        harness.check_outcomes()
        totals = [total + count for total, count in zip(totals, counts(harness), strict=True)]
    num_verified, num_mismatches, num_unverified = totals
    assert num_verified > 25 and num_unverified > 10 and num_mismatches == 0, totals


def test_a_hit_is_computed_again_and_compared_where_it_ended() -> None:
    harness = Harness(VERIFYING)
    warm(harness)
    hit = harness.add(prompt(12), LONG)
    harness.finish()
    assert hit.num_cached_tokens == 11 and counts(harness) == (1, 0, 0)
    [shadow] = harness.shadows.values()
    spans = [
        (segment.start, segment.end)
        for plan in harness.plans
        for segment in plan.segments
        if segment.request_id == shadow.request_id
    ]
    assert spans == [(0, 11), (11, 12)]
    [comparing] = [plan for plan in harness.plans if plan.comparisons]
    assert any(segment.request_id == shadow.request_id for segment in comparing.segments)
    reported = [
        (segment.request_id, segment.end)
        for plan in harness.plans
        for segment in plan.segments
        if segment.reports_logits
    ]
    assert sorted(reported) == sorted([(hit.request_id, 12), (shadow.request_id, 12)])
    harness.check_outcomes()


def test_a_shadow_is_in_no_count_and_files_nothing() -> None:
    harness = Harness(VERIFYING)
    warm(harness)
    before = harness.scheduler.prefix_cache_stats
    harness.add(prompt(12), SamplingParams(max_tokens=2, ignore_eos=True))
    seen = []
    while harness.scheduler.has_work:
        harness.launch()
        seen.append(harness.scheduler.num_running)
        harness.commit()
    after = harness.scheduler.prefix_cache_stats
    assert max(seen) == 1 and seen[-1] == 0
    assert after.num_queries == before.num_queries + 1
    assert after.num_filed == before.num_filed + 1  # what the request itself left
    assert set(harness.progress) == set(harness.requests)


def test_a_shadow_waits_for_a_seat_and_starts_before_those_that_wait() -> None:
    harness = Harness(VERIFYING._replace(max_num_seqs=1, num_live_slots=2))
    warm(harness)
    harness.add(prompt(12), SamplingParams(max_tokens=3, ignore_eos=True))
    harness.launch()
    harness.add(prompt(5, first=3), SamplingParams(max_tokens=1, ignore_eos=True))
    harness.finish()
    order = list(dict.fromkeys(s.request_id for plan in harness.plans for s in plan.segments))
    [shadow_id] = harness.shadows
    assert order == [100, 101, shadow_id, 102] and counts(harness) == (1, 0, 0)


def begin_shadow(sizes: Limits) -> tuple[Harness, Request, Request]:
    """A hit whose shadow is between two chunks."""
    harness = Harness(sizes._replace(max_num_batched_tokens=6))
    warm(harness)
    hit = harness.add(prompt(12), LONG)
    while not harness.shadows:
        harness.launch()
        harness.commit()
    [shadow] = harness.shadows.values()
    assert shadow.slot is not None and 0 < shadow.num_computed < 11
    return harness, hit, shadow


def test_a_shadow_gives_its_memory_to_whoever_needs_a_page() -> None:
    harness, hit, shadow = begin_shadow(VERIFYING._replace(num_pages=1 + 8, max_model_len=32))
    harness.finish()
    assert counts(harness) in ((0, 0, 1), (1, 0, 0)) and shadow.slot is None
    assert harness.scheduler.num_preemptions == 0 and hit.num_preemptions == 0
    harness.check_outcomes()


def test_a_shadow_ends_with_its_request_if_that_has_not_reported() -> None:
    harness = Harness(VERIFYING._replace(max_num_batched_tokens=4))
    warm(harness, 24)
    hit = harness.add([*prompt(12), 5, 5, 5, 5, 5, 5, 5, 5, 5, 5], LONG)
    harness.launch()
    harness.launch() or harness.commit()
    harness.abort(hit)
    assert counts(harness) == (0, 0, 1)
    harness.finish()
    assert counts(harness) == (0, 0, 1)


def test_a_reset_in_between_takes_nothing_from_a_verification() -> None:
    harness, _, _ = begin_shadow(VERIFYING)
    harness.scheduler.reset_prefix_cache()
    harness.scheduler.check_integrity()
    harness.finish()
    assert counts(harness) == (1, 0, 0)


def test_a_hit_on_the_host_is_verified_as_well() -> None:
    sizes = VERIFYING._replace(
        num_checkpoint_slots=2,
        num_pages=1 + 16,
        num_host_pages=40,
        num_host_slots=20,
        state_checkpoint_interval=0,
    )
    harness = Harness(sizes)
    warm(harness)
    for first in range(2, 9):
        harness.add(prompt(20, first=first), SamplingParams(max_tokens=1, ignore_eos=True))
        harness.finish()
    before = counts(harness)
    hit = harness.add(prompt(12), LONG)
    harness.finish()
    loads = [plan for plan in harness.plans if len(plan.moves.load_slots) == 2]
    assert hit.num_cached_tokens and loads, "the state came from the host, for both"
    assert counts(harness) == (before[0] + 1, *before[1:])
