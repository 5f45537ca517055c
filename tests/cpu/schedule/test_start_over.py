"""A request that is not finite behind others' prefix starts over once, without the cache."""

import pytest

from stagecoach.request import SamplingParams
from stagecoach.schedule.step_plan import Segment
from tests.cpu.schedule.fake_executor import LONG, Harness, Limits, prompt
from tests.cpu.schedule.fake_stage import BAD

SIZES = Limits(
    has_prefix_cache=True,
    num_checkpoint_slots=6,
    state_checkpoint_interval=4,
    max_num_batched_tokens=5,
)


def warm_harness(num_stages: int = 1, num_draft_tokens: int = 0) -> Harness:
    harness = Harness(SIZES._replace(num_stages=num_stages, num_draft_tokens=num_draft_tokens))
    harness.add(prompt(12), SamplingParams(max_tokens=1, ignore_eos=True))
    harness.finish()
    return harness


def break_once(harness: Harness, start: int) -> list[Segment]:
    """The first segment from `start` on is not finite."""
    broken: list[Segment] = []

    def is_broken(segment: Segment) -> bool:
        if segment.start < start or broken:
            return False
        broken.append(segment)
        return True

    harness.executor.break_rows = is_broken
    return broken


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("start", [11, 20, 27])
def test_a_reader_of_a_bad_state_comes_through_and_the_state_goes(
    start: int, num_stages: int, num_draft_tokens: int
) -> None:
    """In its first chunk, a later one with more in flight, or a window: nobody notices."""
    harness = warm_harness(num_stages, num_draft_tokens)
    hit = harness.add(prompt(26), LONG)
    broken = break_once(harness, start)
    harness.finish()
    harness.check_outcomes()
    assert broken and hit.num_cached_tokens >= 8
    assert hit.error is None and hit.num_preemptions == 1
    stats = harness.scheduler.prefix_cache_stats
    assert stats.evictions["quarantine"] > 0 and stats.evictions["not_finite"] >= 0
    starts = [s.start for plan in harness.plans for s in plan.segments if s.request_id == 101]
    assert 0 in starts, "it computed everything itself"


def test_its_own_bad_token_ends_it_and_acquits_what_it_read() -> None:
    harness = warm_harness()
    tokens = [*prompt(12), 3, BAD, 4]
    bad = harness.add(tokens, LONG)
    harness.finish()
    harness.check_outcomes()
    assert bad.error is not None and bad.num_cached_tokens > 0 and bad.num_preemptions == 1
    assert harness.scheduler.prefix_cache_stats.evictions["quarantine"] == 0
    again = harness.add(prompt(12), LONG)
    harness.finish()
    assert again.num_cached_tokens == 11


def test_who_read_nothing_ends_at_once() -> None:
    harness = Harness(SIZES)
    bad = harness.add([1, 2, BAD, 3], LONG)
    harness.finish()
    harness.check_outcomes()
    assert bad.error is not None and bad.num_preemptions == 0


def test_a_reader_of_a_bad_prefix_that_is_still_on_its_way_starts_over() -> None:
    """It hits what a plan in flight files, and is healthy itself."""
    harness = Harness(SIZES._replace(num_stages=3, max_num_batched_tokens=16))
    harness.add([*prompt(12), BAD], LONG)
    harness.launch()
    hit = harness.add([*prompt(12), 5, 6], LONG)
    harness.launch()
    assert hit.num_cached_tokens > 0
    harness.executor.break_rows = lambda segment: segment.start == hit.num_cached_tokens
    harness.finish()
    harness.check_outcomes()
    assert hit.error is None and hit.num_preemptions == 1
