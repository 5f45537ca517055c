"""Windows with drafts: how long, at whose cost, and what becomes of what they verified."""

import pytest

from stagecoach.request import FinishReason, Request, SamplingParams
from stagecoach.schedule.step_plan import Segment, StepPlan
from tests.cpu.schedule.fake_drafter import FakeDrafter, FakePolicy
from tests.cpu.schedule.fake_executor import (
    EOS,
    LONG,
    Harness,
    Limits,
    decode_until_ready,
    make_scheduler,
    one_shot,
    prompt,
    spans,
)

SPECULATING = Limits(num_draft_tokens=3, max_num_batched_tokens=64)


def make_harness(limits: Limits, odds: float, policy: FakePolicy | None = None) -> Harness:
    """A drafter that is right with these odds at each place."""
    drafter = FakeDrafter(limits.num_draft_tokens, habits=(odds,))
    return Harness(limits, drafter=drafter, policy=policy)


def segment_of(plan: StepPlan | None, request: Request) -> Segment:
    assert plan is not None
    [segment] = [s for s in plan.segments if s.request_id == request.request_id]
    return segment


def test_the_first_decode_after_a_prompt_is_a_full_verify() -> None:
    """I35: the last chunk proposes, and a middle chunk does not."""
    harness = make_harness(SPECULATING._replace(max_num_batched_tokens=4), 1.0)
    request = harness.add(prompt(6), LONG)
    assert not segment_of(harness.launch(), request).proposes
    harness.commit()
    assert segment_of(harness.launch(), request).proposes
    harness.commit()
    window = segment_of(harness.launch(), request)
    tokens = one_shot(prompt(6), LONG, 0, 20).token_ids
    assert (window.start, window.token_ids) == (6, tuple(tokens[:4]))
    assert (window.num_draft_tokens, window.replay, window.proposes) == (3, 0, True)


def test_right_drafts_are_all_taken_and_replayed() -> None:
    """I19, I23, I32: the window starts at the anchor; the next one replays what was accepted."""
    harness = make_harness(SPECULATING, 1.0)
    request = harness.add(prompt(6), LONG)
    harness.launch()
    harness.commit()
    segments = []
    for num_tokens in (7, 11, 15):
        assert request.num_tokens == num_tokens
        segments.append(segment_of(harness.launch(), request))
        [item] = harness.commit()
        assert len(item.token_ids) == 4
    assert [(s.start, s.end, s.replay) for s in segments] == [(6, 10, 0), (10, 14, 3), (14, 18, 3)]
    assert {(s.read_slot, s.write_slot) for s in segments} == {(request.slot, request.slot)}
    harness.finish()
    harness.check_outcomes()


def test_wrong_drafts_cost_nothing_but_their_width() -> None:
    harness = make_harness(SPECULATING, 0.0)
    request = harness.add(prompt(6), LONG)
    harness.launch()
    harness.commit()
    segments = []
    for _ in range(3):
        segments.append(segment_of(harness.launch(), request))
        [item] = harness.commit()
        assert len(item.token_ids) == 1
    assert [(s.start, s.end, s.replay) for s in segments] == [(6, 10, 0), (7, 11, 0), (8, 12, 0)]
    harness.finish()
    harness.check_outcomes()


@pytest.mark.parametrize("odds", [1.0, 0.0])
@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_a_row_never_exceeds_max_tokens_and_nothing_is_drafted_for_nobody(
    max_tokens: int, odds: float
) -> None:
    harness = make_harness(SPECULATING, odds)
    request = harness.add(prompt(3), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    num_left = max_tokens
    while harness.scheduler.has_work:
        segment = segment_of(harness.launch(), request)
        # A row of one token must leave two: a draft, and the sample behind it.
        assert segment.proposes == (num_left >= 3)
        assert segment.num_draft_tokens == (min(3, num_left - 1) if num_left < max_tokens else 0)
        [item] = harness.commit()
        assert 1 <= len(item.token_ids) <= num_left
        num_left -= len(item.token_ids)
    assert request.finish_reason is FinishReason.LENGTH
    harness.check_outcomes()


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_request_of_one_token_never_proposes_nor_verifies(num_stages: int) -> None:
    """I37: all that an engine which only prefills is asked for, here beside one that decodes."""
    policy = FakePolicy()
    harness = make_harness(
        SPECULATING._replace(num_stages=num_stages, max_num_batched_tokens=8), 1.0, policy
    )
    decoding = harness.add(prompt(3), LONG)
    asked = [
        harness.add(prompt(9 + number), SamplingParams(max_tokens=1, ignore_eos=True))
        for number in range(3)
    ]
    harness.finish()
    ids = {request.request_id for request in asked}
    segments = [s for plan in harness.plans for s in plan.segments if s.request_id in ids]
    assert len(segments) > len(asked), "each prompt is cut somewhere"
    assert not any(s.proposes or s.num_draft_tokens or s.replay for s in segments)
    assert sum(s.num_tokens for s in segments) == 9 + 10 + 11, "nothing was decoded"
    assert set(policy.asked) == {decoding.request_id}
    harness.check_outcomes()


def test_a_window_stays_below_the_models_length() -> None:
    harness = make_harness(SPECULATING._replace(max_model_len=12), 1.0)
    harness.add(prompt(3), SamplingParams(max_tokens=None, ignore_eos=True))
    harness.finish()
    ends = [segment.end for plan in harness.plans for segment in plan.segments]
    assert max(ends) == 11, "the last token is never forwarded"
    harness.check_outcomes()


@pytest.mark.parametrize(
    ("budget", "windows"),
    [(64, [3, 3, 3]), (12, [3, 3, 3]), (6, [1, 1, 1]), (5, [0, 1, 1]), (3, [0, 0, 0]), (2, [0, 0])],
)
def test_every_request_gets_its_anchor_before_anybody_a_draft(
    budget: int, windows: list[int]
) -> None:
    """And what is left of the budget is shared evenly; a window is charged its real width."""
    harness = make_harness(SPECULATING, 0.0)
    decode_until_ready(harness, [harness.add(prompt(2, first), LONG) for first in range(3)])
    harness.scheduler._max_num_batched_tokens = budget
    plan = harness.launch()
    assert plan is not None and plan.num_tokens == len(windows) + sum(windows) <= budget
    assert sorted(segment.num_draft_tokens for segment in plan.segments) == windows


def test_windows_decodes_and_chunks_share_a_plan() -> None:
    harness = make_harness(SPECULATING._replace(max_num_batched_tokens=9), 1.0)
    drafted = harness.add(prompt(3), LONG)
    plain = harness.add(prompt(3, 4), SamplingParams(max_tokens=2, ignore_eos=True))
    decode_until_ready(harness, [drafted, plain])
    waiting = harness.add(prompt(8), LONG)
    plan = harness.launch()
    assert [
        (s.request_id, s.num_tokens, s.num_draft_tokens, s.is_window) for s in plan.segments
    ] == [
        (plain.request_id, 1, 0, True),
        (drafted.request_id, 4, 3, True),
        (waiting.request_id, 4, 0, False),
    ]
    harness.finish()
    harness.check_outcomes()


def test_drafts_take_free_pages_only() -> None:
    """I30, and nobody is preempted for a guess."""
    harness = make_harness(
        SPECULATING._replace(block_size=4, num_pages=1 + 5, max_model_len=16), 0.0
    )
    old = harness.add(prompt(6), SamplingParams(max_tokens=10, ignore_eos=True))
    young = harness.add(prompt(9), SamplingParams(max_tokens=7, ignore_eos=True))
    decode_until_ready(harness, [old, young])
    assert harness.scheduler.num_free_pages == 0
    plan = harness.launch()
    # Each is held to the pages that it has: positions 6, 7 and 9, 10, 11.
    assert spans(plan) == [(old.request_id, 6, 8), (young.request_id, 9, 12)]
    assert harness.scheduler.num_preemptions == 0
    harness.finish()
    harness.check_outcomes()


@pytest.mark.parametrize(("num_free", "end"), [(1, 8), (2, 9)])
def test_drafts_leave_a_free_page_to_the_next_anchor_of_every_other(
    num_free: int, end: int
) -> None:
    """Or else the older one, whose next anchor opens a page, would take it from somebody."""
    harness = make_harness(
        SPECULATING._replace(num_stages=2, block_size=4, num_pages=1 + 5 + num_free), 0.0
    )
    old = harness.add(prompt(11), SamplingParams(max_tokens=9, ignore_eos=True))
    young = harness.add(prompt(5), SamplingParams(max_tokens=9, ignore_eos=True))
    decode_until_ready(harness, [old, young])
    assert harness.scheduler.num_free_pages == num_free
    assert spans(harness.launch()) == [(young.request_id, 5, end)]
    harness.finish()
    harness.check_outcomes()


@pytest.mark.parametrize(("num_pages", "end"), [(7, 8), (8, 9)])
def test_drafts_leave_the_pages_promised_to_an_older_prompt(num_pages: int, end: int) -> None:
    harness = make_harness(
        SPECULATING._replace(
            block_size=4, num_pages=1 + num_pages, max_model_len=20, max_num_batched_tokens=8
        ),
        0.0,
    )
    old = harness.add(prompt(12), SamplingParams(max_tokens=5, ignore_eos=True))
    young = harness.add(prompt(2), SamplingParams(max_tokens=14, ignore_eos=True))
    decode_until_ready(harness, [old, young])
    harness.scheduler._preempt(old)
    young.draft_token_ids = (5, 5, 5)
    for _ in range(3):
        harness.launch()
        harness.commit()
    assert (old.num_computed, len(old.page_ids)) == (12, 3)
    assert (young.num_computed, len(young.page_ids)) == (5, 2)
    # Two or three pages are free: one for the older one's next chunk, which is planned later,
    # and one for its next anchor.
    assert segment_of(harness.launch(), young).end == end
    harness.commit()
    assert (old.num_preemptions, young.num_preemptions) == (1, 0)
    harness.finish()
    harness.check_outcomes()


def test_drafts_keep_no_prompt_waiting() -> None:
    """Budgets that windows alone could use up: a prompt gets half of what anchors leave."""
    harness = make_harness(SPECULATING, 1.0)
    request = harness.add(prompt(3), LONG)
    decode_until_ready(harness, [request])
    harness.scheduler._max_num_batched_tokens = 4
    waiting = harness.add(prompt(5), LONG)
    assert spans(harness.launch()) == [(request.request_id, 3, 5), (waiting.request_id, 0, 2)]
    harness.finish()
    harness.check_outcomes()


def test_pages_of_rejected_drafts_serve_the_next_window() -> None:
    """I21: pages cover a window exactly, but for what its predecessor left."""
    harness = make_harness(SPECULATING, 0.0)
    request = harness.add(prompt(6), LONG)
    decode_until_ready(harness, [request])
    counts = []
    for _ in range(4):
        counts.append((segment_of(harness.launch(), request).end, len(request.page_ids)))
        harness.commit()
    assert counts == [(10, 3), (11, 3), (12, 3), (13, 4)]


def test_a_request_that_is_picked_for_the_plan_is_no_victim_of_a_senior_in_it() -> None:
    """The younger one was ready first; the older one waits for its result."""
    harness = make_harness(
        SPECULATING._replace(block_size=4, num_pages=1 + 5, max_model_len=20), 0.0
    )
    old = harness.add(prompt(11), SamplingParams(max_tokens=9, ignore_eos=True))
    young = harness.add(prompt(5), SamplingParams(max_tokens=9, ignore_eos=True))
    decode_until_ready(harness, [old, young])
    assert spans(harness.launch()) == [(young.request_id, 5, 8), (old.request_id, 11, 12)]
    harness.commit()
    assert (old.num_computed, harness.scheduler.num_free_pages) == (12, 0)
    assert spans(harness.launch()) == [(young.request_id, 6, 8)]
    harness.commit()
    assert spans(harness.launch()) == [(old.request_id, 12, 16)]
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    harness.finish()
    harness.check_outcomes()


def test_drafts_end_with_their_admission() -> None:
    """I29: preemption leaves the committed tokens and nothing else."""
    harness = make_harness(SPECULATING, 1.0)
    request = harness.add(prompt(6), LONG)
    harness.launch()
    harness.commit()
    harness.launch()
    harness.commit()
    assert len(request.draft_token_ids) == len(request.confidences) == request.num_replay == 3
    harness.scheduler._preempt(request)
    assert (request.draft_token_ids, request.confidences, request.num_replay) == ((), (), 0)
    assert request.num_tokens == 11
    segment = segment_of(harness.launch(), request)
    assert (segment.start, segment.end, segment.replay, segment.proposes) == (0, 11, 0, True)
    harness.finish()
    harness.check_outcomes()


def test_drafts_of_an_older_epoch_are_dropped_with_their_row() -> None:
    """I83."""
    policy = FakePolicy()
    harness = make_harness(SPECULATING._replace(num_stages=2), 1.0, policy)
    request = harness.add(prompt(6), LONG)
    harness.launch()
    harness.commit()
    harness.launch()
    harness.scheduler._preempt(request)
    assert segment_of(harness.launch(), request).start == 0
    assert harness.commit() == []
    assert request.draft_token_ids == () and policy.windows == [] and len(policy.proposals) == 1
    harness.finish()
    harness.check_outcomes()


def test_an_abort_with_drafts_in_flight_frees_everything_and_tells_the_policy() -> None:
    policy = FakePolicy()
    harness = make_harness(SPECULATING._replace(num_stages=2), 1.0, policy)
    request = harness.add(prompt(6), LONG)
    harness.launch()
    harness.commit()
    harness.launch()
    harness.commit()
    harness.launch()
    harness.abort(request)
    assert policy.forgotten == [request.request_id]
    last = harness.progress[request.request_id][-1]
    assert (last.num_windows, last.num_draft_tokens, last.num_accepted_tokens) == (1, 3, 3)
    assert harness.commit() == [] and request.draft_token_ids == ()
    harness.finish()
    harness.check_outcomes()


def test_what_a_row_holds_behind_a_stop_is_cut_everywhere() -> None:
    """I28: tokens, logprobs, drafts; the counts know of all that was accepted."""
    params = SamplingParams(max_tokens=20, logprobs=0)
    for seed in range(200):
        expected = one_shot(prompt(6), params, seed, 20)
        if expected.token_ids[-1] == EOS and 2 <= len(expected.token_ids) <= 4:
            break
    harness = make_harness(SPECULATING, 1.0)
    request = harness.add(prompt(6), params, seed=seed)
    harness.launch()
    harness.commit()
    harness.launch()
    [item] = harness.commit()
    assert list(item.token_ids) == expected.token_ids[1:] and len(item.token_ids) < 4
    assert len(item.logprobs) == len(item.token_ids)
    assert item.finish_reason is FinishReason.STOP and item.num_accepted_tokens == 3
    assert not request.draft_token_ids
    harness.scheduler.check_idle()
    harness.check_outcomes()


def test_the_policy_sees_raw_confidences_limits_and_the_rest_of_the_plan() -> None:
    """I31: each candidate is a window of the plan, with or without drafts."""
    policy = FakePolicy()
    harness = make_harness(SPECULATING._replace(max_num_batched_tokens=20), 1.0, policy)
    drafted = harness.add(prompt(3), LONG)
    plain = harness.add(prompt(3, 4), SamplingParams(max_tokens=2, ignore_eos=True))
    decode_until_ready(harness, [drafted, plain])
    confidences, draft_token_ids = drafted.confidences, drafted.draft_token_ids
    assert len(confidences) == 3
    harness.add(prompt(30), LONG)
    plan = harness.launch()
    assert policy.choices[-1].candidates == (
        (drafted.request_id, confidences, 3),
        (plain.request_id, (), 0),
    )
    assert policy.choices[-1].num_other_tokens == 18, "what of the prompt would fit"
    assert segment_of(plan, drafted).token_ids[1:] == draft_token_ids
    assert segment_of(plan, plain).num_draft_tokens == 0


def test_the_policy_is_asked_once_for_each_sample_that_could_use_drafts() -> None:
    policy = FakePolicy()
    harness = make_harness(SPECULATING._replace(max_num_batched_tokens=4), 0.0, policy)
    request = harness.add(prompt(6), SamplingParams(max_tokens=5, ignore_eos=True))
    harness.finish()
    # Five samples, of which the last two leave no use for a draft; a middle chunk samples nothing.
    assert policy.asked == [request.request_id] * 3
    assert policy.proposals == [(request.request_id, 3)] * 3
    assert policy.windows == [(request.request_id, most, 0) for most in (3, 2, 1)]
    assert policy.plain == [request.request_id] * 2, "the prompt's sample and the last one"
    assert policy.forgotten == [request.request_id]


def test_a_policy_that_proposes_for_nobody_is_plain_decoding() -> None:
    class Reluctant(FakePolicy):
        def should_propose(self, request_id: int) -> bool:
            return False

    harness = make_harness(SPECULATING, 1.0, Reluctant())
    harness.add(prompt(6), LONG)
    harness.finish()
    assert all(s.num_draft_tokens == s.replay == 0 for p in harness.plans for s in p.segments)
    harness.check_outcomes()


@pytest.mark.parametrize("lengths", [[4], [-1], [], [1, 1]])
def test_windows_that_were_not_allowed_are_fatal(lengths: list[int]) -> None:
    class Wrong(FakePolicy):
        def choose_lengths(self, candidates: object, num_other_tokens: int) -> list[int]:
            return lengths

    harness = make_harness(SPECULATING, 1.0, Wrong())
    harness.add(prompt(6), LONG)
    harness.launch()
    harness.commit()
    with pytest.raises((AssertionError, ValueError), match=r"windows of|zip\(\)"):
        harness.launch()


def test_more_drafts_than_a_window_takes_are_fatal() -> None:
    harness = Harness(SPECULATING, drafter=FakeDrafter(4, habits=(1.0,)))
    harness.add(prompt(6), LONG)
    harness.launch()
    with pytest.raises(AssertionError, match="too many drafts"):
        harness.commit()


def test_check_integrity_finds_drafts_that_outlived_their_row() -> None:
    harness = make_harness(SPECULATING, 1.0)
    request = harness.add(prompt(6), LONG)
    harness.launch()
    request.draft_token_ids = (5,)
    with pytest.raises(AssertionError, match="drafts of another time"):
        harness.scheduler.check_integrity()
    harness.scheduler._preempt(request)
    request.num_replay = 1
    with pytest.raises(AssertionError, match="waits with drafts"):
        harness.scheduler.check_integrity()


def test_drafts_and_a_policy_come_together() -> None:
    with pytest.raises(AssertionError, match="3 for None"):
        make_scheduler(Limits(num_draft_tokens=3))
