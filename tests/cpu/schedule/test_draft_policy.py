"""The policy: lengths within their limits, and statistics that count what they say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.schedule.draft_policy import Candidate, DraftPolicy
from stagecoach.schedule.step_cost import StepCost, StepShape
from tests.cpu.schedule.draft_traffic import Text, run, speculation, step_cost

pytestmark = pytest.mark.cpu


def plain_policy(num_places: int = 3) -> DraftPolicy:
    return DraftPolicy(speculation(num_places, schedule=False, watchdog=False), None)


def test_without_schedule_and_watchdog_a_window_is_as_long_as_it_may_be() -> None:
    policy = plain_policy()
    for _ in range(50):
        lengths = policy.choose_lengths(
            [Candidate(1, (0.01,) * 3, 3), Candidate(2, (), 1), Candidate(3, (), 0)], 100
        )
        assert lengths == [3, 1, 0]
        assert policy.should_propose(1) and policy.should_propose(9)
        policy.note_window(1, 3, 0)
        policy.note_window(2, 1, 0)
        policy.note_plain(3)
    stats = policy.stats()
    assert not stats.is_paused and stats.num_pauses == 0
    assert stats.window_lengths == (50, 50, 0, 50)


def test_statistics_count_only_windows_that_verified_drafts() -> None:
    """I36."""
    policy = plain_policy()
    policy.note_proposal(1, 3)
    policy.note_window(1, 3, 1)
    policy.note_proposal(1, 3)
    policy.note_window(1, 2, 2)
    policy.note_plain(1)
    policy.note_plain(2)
    policy.note_proposal(2, 3)
    stats = policy.stats()
    assert stats.num_windows == 2
    assert (stats.num_proposed_tokens, stats.num_draft_tokens, stats.num_accepted_tokens) == (
        9,
        5,
        3,
    )
    assert stats.drafted_per_position == (2, 2, 1)
    assert stats.accepted_per_position == (2, 1, 0)


@settings(deadline=None, max_examples=50)
@given(
    st.booleans(),
    st.booleans(),
    st.sampled_from(["shared", "rejection"]),
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 4), st.booleans(), st.floats(0, 1), st.integers(0, 4)),
            min_size=1,
            max_size=5,
        ),
        max_size=8,
    ),
)
def test_lengths_never_exceed_their_limits(
    schedule: bool,
    watchdog: bool,
    acceptance: str,
    plans: list[list[tuple[int, bool, float, int]]],
) -> None:
    config = speculation(4, schedule=schedule, watchdog=watchdog, acceptance=acceptance)
    policy = DraftPolicy(config, step_cost())
    num_drafts = num_accepted = 0
    for plan in plans:
        candidates = [
            Candidate(number, (confidence,) * 4 if has_confidences else (), limit)
            for number, (limit, has_confidences, confidence, _) in enumerate(plan)
        ]
        lengths = policy.choose_lengths(candidates, 10)
        assert len(lengths) == len(candidates)
        for candidate, length, (_, _, _, accepted) in zip(candidates, lengths, plan, strict=True):
            assert 0 <= length <= candidate.limit
            policy.should_propose(candidate.request_id)
            if length:
                policy.note_window(candidate.request_id, length, min(accepted, length))
                num_drafts += length
                num_accepted += min(accepted, length)
            else:
                policy.note_plain(candidate.request_id)
    stats = policy.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (num_drafts, num_accepted)
    assert sum(stats.window_lengths) == sum(map(len, plans))


def test_confidences_decide_who_gets_long_windows() -> None:
    policy = DraftPolicy(speculation(4), step_cost())
    sure, doubtful = (0.99,) * 4, (0.05,) * 4
    assert policy.choose_lengths([Candidate(1, sure, 4), Candidate(2, doubtful, 4)], 0) == [4, 0]
    assert policy.choose_lengths([Candidate(1, sure, 2), Candidate(2, doubtful, 4)], 0) == [2, 0]


def test_a_temperature_of_the_draft_tames_its_confidences() -> None:
    candidates = [Candidate(1, (0.9,) * 4, 4)]
    dear = step_cost(token=0.6, block=0.1)
    bold = DraftPolicy(speculation(4), dear).choose_lengths(candidates, 0)
    tame = DraftPolicy(speculation(4, temperatures=(8.0,) * 4), dear).choose_lengths(candidates, 0)
    assert bold[0] > tame[0]


def test_without_a_confidence_head_lengths_follow_acceptance() -> None:
    policy = DraftPolicy(speculation(4, watchdog=False), step_cost(token=0.3, block=0.1))
    for _ in range(40):
        policy.note_window(1, 4, 4)
        policy.note_window(2, 4, 1)
    lengths = policy.choose_lengths([Candidate(1, (), 4), Candidate(2, (), 4)], 0)
    assert lengths == [4, 1]


def test_a_request_without_windows_of_its_own_is_judged_by_all() -> None:
    policy = DraftPolicy(speculation(4, watchdog=False), step_cost(token=0.3, block=0.1))
    for _ in range(60):
        policy.note_window(1, 4, 1)
    assert policy.choose_lengths([Candidate(9, (), 4)], 0) == [1]


def test_a_probe_verifies_at_least_one_draft() -> None:
    cost = step_cost()
    policy = DraftPolicy(speculation(), cost)
    result = run(policy, cost, [Text(2000, 0.0)], num_at_once=1)
    verified = [lengths[0] for lengths in result.lengths if lengths[0]]
    assert verified and set(verified) == {1}


def test_a_window_of_one_verified_by_a_dear_table_is_not_by_a_cheap_one() -> None:
    """The same confidences, other costs: the table decides."""
    candidates = [Candidate(1, (0.5,) * 7, 7)]
    cheap = DraftPolicy(speculation(), step_cost(token=0.01, width=0.0))
    dear = DraftPolicy(speculation(), step_cost(token=0.9, width=0.5))
    assert cheap.choose_lengths(candidates, 0)[0] > dear.choose_lengths(candidates, 0)[0]


def test_live_steps_reach_the_table() -> None:
    cost: StepCost = step_cost()
    policy = DraftPolicy(speculation(), cost)
    shape = StepShape(8, 8, 1)
    before = cost.seconds(shape)
    policy.note_step(shape, (2 * before,))
    assert before < cost.seconds(shape) < 2 * before


def test_a_schedule_or_watchdog_without_costs_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="cost"):
        DraftPolicy(speculation(watchdog=False), None)
