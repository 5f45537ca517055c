"""Who waits for memory is not looked up again and again, and starts as soon as there is some."""

import pytest

from stagecoach.cache.prefix_cache import PrefixCache
from stagecoach.cache.prefix_hash import BlockChain
from stagecoach.request import SamplingParams
from tests.cpu.schedule import fake_executor
from tests.cpu.schedule.fake_executor import Harness, Limits, prompt

SIZES = Limits(
    max_num_seqs=4,
    max_model_len=32,
    num_pages=1 + 8,
    max_num_batched_tokens=64,
    has_prefix_cache=True,
    state_checkpoint_interval=0,
    num_checkpoint_slots=4,
)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limit of every look into the cache from here on."""
    limits: list[int] = []
    find = PrefixCache.find

    def counted(self: PrefixCache, chain: BlockChain, limit: int) -> object:
        limits.append(limit)
        return find(self, chain, limit)

    monkeypatch.setattr(PrefixCache, "find", counted)
    monkeypatch.setattr(fake_executor, "check_head", lambda *_: None)  # looks as well
    return limits


def answer(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_the_head_is_looked_up_again_when_something_became_free(
    num_stages: int, lookups: list[int]
) -> None:
    harness = Harness(SIZES._replace(num_stages=num_stages))
    first = harness.add(prompt(10), answer(14))
    harness.launch()
    harness.commit()
    # Six of eight pages at the end, of which it holds three now: the other needs six.
    second = harness.add(prompt(22, first=5), answer(2))
    while first.finish_reason is None:
        if harness.launch() is None:
            harness.commit()
    assert lookups == [9, 21]
    harness.launch()
    assert lookups == [9, 21, 21] and second.num_plans_in_flight == 1
    harness.finish()
    harness.check_outcomes()


def test_the_head_starts_behind_what_was_filed_while_it_waited(lookups: list[int]) -> None:
    """Another's end leaves the state that it then begins with."""
    harness = Harness(SIZES)
    first = harness.add(prompt(18), answer(4))
    harness.launch()
    harness.commit()
    second = harness.add(prompt(24), answer(2))
    while first.finish_reason is None:
        harness.launch()
        harness.commit()
    harness.finish()
    harness.check_outcomes()
    assert second.num_cached_tokens == 17 and len(lookups) <= 4


def test_younger_ones_give_way_the_youngest_first_and_no_more_than_needed() -> None:
    harness = Harness(SIZES._replace(num_pages=1 + 9))
    old, middle, young = (harness.add(prompt(9, first=3 * n), answer(9)) for n in range(3))
    while not any(request.num_preemptions for request in (old, middle, young)):
        harness.launch()
        harness.commit()
    assert [request.num_preemptions for request in (old, middle, young)] == [0, 0, 1]
    harness.finish()
    harness.check_outcomes()
