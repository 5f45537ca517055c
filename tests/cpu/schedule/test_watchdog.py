"""The watchdog over simulated traffic: what is lost on hard texts, what is kept on easy ones."""

import logging
from itertools import pairwise

import pytest

from stagecoach.schedule.draft_policy import DraftPolicy
from stagecoach.schedule.step_cost import BatchCost, StepCost
from stagecoach.schedule.watchdog import Watchdog
from tests.cpu.schedule.draft_traffic import Run, Text, run, speculation, step_cost

pytestmark = pytest.mark.cpu

# A token that costs much, and one that is nearly free beside the fixed cost of a step.
DEAR = {"token": 0.1, "width": 0.05, "block": 0.4, "block_token": 0.02}
CHEAP = {"token": 0.02, "width": 0.01, "block": 0.2, "block_token": 0.02}


def serve(
    rates: list[float], costs: dict[str, float], *, num_at_once: int, num_tokens: int = 128
) -> tuple[Run, DraftPolicy]:
    cost = step_cost(**costs)
    policy = DraftPolicy(speculation(), cost)
    texts = [Text(num_tokens, rate) for rate in rates]
    return run(policy, cost, texts, num_at_once=num_at_once), policy


@pytest.mark.parametrize("costs", [DEAR, CHEAP], ids=["dear", "cheap"])
@pytest.mark.parametrize("num_at_once", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.1])
def test_on_texts_that_nobody_can_draft_at_most_3_percent_are_lost(
    rate: float, num_at_once: int, costs: dict[str, float]
) -> None:
    """The first requests that the engine ever sees, too."""
    result, policy = serve([rate] * max(2, num_at_once), costs, num_at_once=num_at_once)
    assert result.speedup > 0.97
    stats = policy.stats()
    assert stats.is_paused and stats.num_pauses >= 1


@pytest.mark.parametrize("schedule", [True, False])
def test_drafts_that_the_budget_never_has_room_for_are_soon_not_made(schedule: bool) -> None:
    cost = step_cost(**DEAR)
    policy = DraftPolicy(speculation(schedule=schedule), cost)
    texts = [Text(200, 0.9) for _ in range(8)]
    result = run(policy, cost, texts, num_at_once=8, budget=8)
    assert not any(map(any, result.lengths))
    assert policy.stats().is_paused
    assert result.num_block_passes < 20
    assert result.speedup > 0.97


@pytest.mark.parametrize("num_at_once", [1, 4, 16])
def test_on_easy_texts_it_stays_out_of_the_way(num_at_once: int) -> None:
    guarded, policy = serve([0.9] * 2 * num_at_once, CHEAP, num_at_once=num_at_once)
    cost = step_cost(**CHEAP)
    unguarded = run(
        DraftPolicy(speculation(watchdog=False), cost),
        cost,
        [Text(128, 0.9) for _ in range(2 * num_at_once)],
        num_at_once=num_at_once,
    )
    assert guarded.speedup > 0.9 * unguarded.speedup > 1.4
    assert not policy.stats().is_paused


def test_while_paused_plans_hold_no_block_pass_but_for_rare_probes() -> None:
    result, _ = serve([0.0] * 8, DEAR, num_at_once=8, num_tokens=1000)
    assert len(result.lengths) == 1000
    assert 3 <= result.num_block_passes < 20


def test_one_hard_text_decodes_plainly_beside_easy_ones() -> None:
    cost = step_cost(**CHEAP)
    policy = DraftPolicy(speculation(schedule=False), cost)
    texts = [Text(400, 0.0), *(Text(1200, 0.9) for _ in range(3))]
    result = run(policy, cost, texts, num_at_once=4)
    hard = [lengths[0] for lengths in result.lengths[20:400]]
    easy = [lengths[1] for lengths in result.lengths[20:150]]
    assert sum(map(bool, hard)) < 40 and sum(map(bool, easy)) > 120
    assert policy.stats().num_pauses <= 1


class Single:
    """A watchdog over one request after another, each alone."""

    def __init__(self, costs: dict[str, float] = CHEAP) -> None:
        self.proposed = True
        self.watchdog = Watchdog("a-draft", 7)
        self.cost: StepCost = step_cost(**costs)

    def round(self, request_id: int, num_accepted: int, num_drafts: int = 7) -> bool:
        """One step; whether it verified drafts that were proposed in the step before."""
        batch = BatchCost(self.cost, num_windows=1, num_places=7, num_in_flight=1)
        self.watchdog.begin_plan([request_id], lambda: batch)
        had_proposal = self.proposed
        may_verify = had_proposal and self.watchdog.may_verify(request_id)
        self.proposed = self.watchdog.should_propose(request_id)
        if may_verify:
            self.watchdog.note_round(request_id, num_drafts, num_accepted)
        return may_verify


def test_it_reacts_within_a_few_windows() -> None:
    single = Single(DEAR)
    verified = [single.round(1, 0) for _ in range(40)]
    assert 1 <= sum(verified) <= 3 and not any(verified[4:])


def test_a_text_that_turns_hard_is_noticed_within_a_few_windows() -> None:
    single = Single(DEAR)
    assert all(single.round(1, 5) for _ in range(50))
    verified = [single.round(1, 0) for _ in range(40)]
    assert sum(verified) <= 14


def test_probes_come_at_growing_distances_and_end_a_pause() -> None:
    single = Single()
    probes = [step for step in range(3000) if single.round(1, 0)]
    gaps = [later - earlier for earlier, later in pairwise(probes[3:])]
    # Multiples of powers of two: a gap may fall short of the one before by half of it.
    assert gaps[0] < gaps[-1] and gaps[-1] >= 512 and len(probes) < 15
    assert any(single.round(1, 7) for _ in range(3000))
    # Whether the probe paid was not known when the next step might have proposed.
    assert not single.round(1, 7)
    assert all(single.round(1, 7) for _ in range(100))
    assert not single.watchdog.is_paused


def test_a_new_request_starts_from_what_is_known_of_all() -> None:
    single = Single()
    for request_id in range(5):
        for _ in range(10):
            single.round(request_id, 0)
        single.watchdog.forget(request_id)
    assert not single.watchdog.should_propose(99)
    easy = Single()
    for _ in range(10):
        easy.round(0, 6)
    assert easy.watchdog.should_propose(99)


def test_a_pause_and_its_end_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    single = Single()
    with caplog.at_level(logging.INFO, logger="stagecoach"):
        for _ in range(3):
            for _ in range(60):
                single.round(1, 0)
            for _ in range(3000):
                single.round(1, 7)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("is paused" in line for line in lines) == 1
    assert sum("is tried again" in line for line in lines) == 1
    assert single.watchdog.num_pauses == 3
    assert not any("does not fit" in line for line in lines)


def test_a_broken_draft_is_named_and_a_hard_text_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="stagecoach"):
        serve([0.0] * 16 + [0.2] * 16, CHEAP, num_at_once=1)
        hard = [record.getMessage() for record in caplog.records]
        caplog.clear()
        watchdog = Watchdog("a-draft", 7)
        batch = BatchCost(step_cost(), num_windows=4, num_places=7, num_in_flight=1)
        for _ in range(10):
            watchdog.begin_plan(range(4), lambda: batch)
            for request_id in range(4):
                watchdog.note_round(request_id, 7, 0)
    broken = [record for record in caplog.records if "does not fit" in record.getMessage()]
    assert not any("does not fit" in line for line in hard)
    assert len([record for record in broken if record.levelno == logging.WARNING]) == 1
    assert "a-draft" in broken[0].getMessage()


def test_requests_that_are_forgotten_leave_nothing() -> None:
    _, policy = serve([0.5] * 6, DEAR, num_at_once=3)
    assert policy._watchdog is not None
    assert not policy._watchdog._requests and not policy._requests
