"""What requests find of each other's prefixes, where states are kept for it, and at whose cost."""

import pytest

from stagecoach.errors import RequestError
from stagecoach.request import FinishReason, Request, SamplingParams
from stagecoach.schedule.step_plan import Save, Segment
from tests.cpu.schedule.fake_drafter import FakeDrafter, FakePolicy
from tests.cpu.schedule.fake_executor import (
    LONG,
    Harness,
    Limits,
    decode_until_ready,
    prompt,
    spans,
)
from tests.cpu.schedule.fake_stage import BAD, VOCAB_SIZE

# Pages of four tokens, rungs every eight, and room for everything.
CACHING = Limits(
    has_prefix_cache=True,
    max_num_batched_tokens=64,
    num_checkpoint_slots=12,
    num_pages=1 + 100,
)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


def ids(length: int, seed: int = 1) -> list[int]:
    """Tokens that two seeds do not share."""
    return [
        1 + (seed * 7 + index * index + index // 3) % (VOCAB_SIZE - 1) for index in range(length)
    ]


def serve(harness: Harness, token_ids: list[int], params: SamplingParams = SHORT) -> Request:
    """One request from its arrival to its end."""
    request = harness.add(token_ids, params)
    harness.finish()
    return request


def segments_of(harness: Harness, request: Request) -> list[Segment]:
    return [
        segment
        for plan in harness.plans
        for segment in plan.segments
        if segment.request_id == request.request_id
    ]


def saved_positions(harness: Harness, request: Request) -> list[int]:
    return [save.position for segment in segments_of(harness, request) for save in segment.saves]


@pytest.mark.parametrize(
    ("num_shared", "num_cached"),
    [(0, 0), (3, 0), (7, 0), (8, 8), (12, 8), (16, 16), (17, 16), (20, 16), (22, 22), (23, 23)],
)
def test_hits_from_nothing_to_all(num_shared: int, num_cached: int) -> None:
    """I59: a hit ends at a rung, a prompt's end or an answer's, or there is none."""
    harness = Harness(CACHING)
    first = ids(23)
    writer = serve(harness, first, SamplingParams(max_tokens=1, ignore_eos=True))
    assert saved_positions(harness, writer) == [8, 16, 22]
    assert writer.num_cached_tokens == 0
    tail = [token % (VOCAB_SIZE - 1) + 1 for token in first[num_shared:23]]
    reader = serve(harness, [*first[:num_shared], *tail, 1, 2])
    assert reader.num_cached_tokens == num_cached
    [start, *_] = [segment.start for segment in segments_of(harness, reader)]
    assert start == num_cached
    harness.check_outcomes()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_the_same_prompt_twice_computes_one_token_also_at_whole_pages(length: int) -> None:
    """The hit is never the whole prompt, and nothing less than all but one token."""
    harness = Harness(CACHING)
    serve(harness, ids(length))
    again = serve(harness, ids(length))
    assert again.num_cached_tokens == length - 1
    assert spans(harness.plans[2])[0] == (101, length - 1, length)
    assert harness.progress[101][-1].num_cached_tokens == length - 1
    harness.check_outcomes()


def test_a_partly_filled_page_is_copied_and_whole_ones_are_shared() -> None:
    harness = Harness(CACHING._replace(num_stages=2))
    serve(harness, ids(11))
    reader = harness.add(ids(11), LONG)
    plan = harness.launch()
    assert plan is not None
    [copy] = plan.moves.copies
    assert (copy.num_tokens, copy.target) == (10 % 4, reader.page_ids[2])
    assert copy.source not in reader.page_ids
    other = harness.add(ids(11), LONG)
    plan = harness.launch()
    assert plan is not None and [copy.num_tokens for copy in plan.moves.copies] == [2]
    assert list(other.page_ids[:2]) == list(reader.page_ids[:2])
    assert other.page_ids[2] != reader.page_ids[2]
    harness.finish()
    harness.check_outcomes()


def test_a_reader_starts_beside_the_writers_later_chunk() -> None:
    """I76, I81, I82: filed when the plan is made, so nobody waits and nothing is cut or held."""
    limits = CACHING._replace(num_stages=4, max_num_batched_tokens=12, state_checkpoint_interval=4)
    harness = Harness(limits)
    writer = harness.add(ids(22), LONG)
    reader = harness.add(ids(9) + ids(3, seed=5), LONG)
    assert spans(harness.launch()) == [(100, 0, 12)]
    # The writer's first result is not here yet.
    assert spans(harness.launch()) == [(101, 8, 10), (100, 12, 22)]
    assert reader.num_cached_tokens == 8 and harness.scheduler.num_in_flight == 2
    ends = [(segment.start, segment.end) for segment in segments_of(harness, writer)]
    assert ends == [(0, 12), (12, 22)], "the writer's chunks are adjacent and in each plan"
    harness.finish()
    harness.check_outcomes()


def test_an_entry_is_not_read_by_the_plan_that_makes_it() -> None:
    """Nobody reads a slot in the plan that writes it; the next plan may."""
    harness = Harness(CACHING._replace(num_stages=2))
    for _ in range(3):
        harness.add(ids(12), SHORT)
    assert spans(harness.launch()) == [(100, 0, 12), (101, 0, 12), (102, 0, 12)]
    late = harness.add(ids(12), SHORT)
    assert spans(harness.launch()) == [(103, 11, 12)]
    assert late.num_cached_tokens == 11
    # Of three that computed the same, one saved it.
    assert [save.position for s in harness.plans[0].segments for save in s.saves] == [8, 11]
    harness.finish()
    harness.check_outcomes()


@pytest.mark.parametrize(("num_shared", "num_unique"), [(16, 6), (15, 7)])
def test_a_second_request_asks_for_the_state_that_the_third_hits(
    num_shared: int, num_unique: int
) -> None:
    """Whatever the grid, unique ends do not spoil a shared beginning."""
    harness = Harness(CACHING._replace(state_checkpoint_interval=0))
    requests = [serve(harness, ids(num_shared) + ids(num_unique, seed=seed)) for seed in (2, 3, 4)]
    whole_pages = num_shared // 4 * 4
    assert [request.num_cached_tokens for request in requests] == [0, 0, whole_pages]
    assert saved_positions(harness, requests[1])[0] == whole_pages
    stats = harness.scheduler.prefix_cache_stats
    assert (stats.num_queries, stats.num_hits, stats.num_hit_tokens) == (3, 1, whole_pages)
    assert stats.num_lost_tokens == whole_pages
    harness.check_outcomes()


def test_no_chunk_is_cut_for_a_state() -> None:
    harness = Harness(CACHING._replace(max_num_batched_tokens=9, state_checkpoint_interval=4))
    request = serve(harness, ids(22))
    chunks = [(s.start, s.end) for s in segments_of(harness, request) if s.start < 22]
    assert chunks == [(0, 9), (9, 18), (18, 22)]
    assert saved_positions(harness, request) == [4, 8, 12, 16, 20, 21]


def test_a_conversation_goes_on_from_the_end_of_its_last_answer() -> None:
    """Nothing but the newest token of the last turn is computed again."""
    harness = Harness(CACHING._replace(max_model_len=64, state_checkpoint_interval=0))
    history = ids(9)
    for _ in range(4):
        turn = serve(harness, history, SamplingParams(max_tokens=5, ignore_eos=True))
        history = history + turn.output_token_ids + ids(3, seed=len(history))
    cached = [request.num_cached_tokens for request in harness.requests.values()]
    assert cached == [0, 9 + 4, 17 + 4, 25 + 4]
    harness.check_outcomes()


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_an_answer_with_accepted_drafts_ends_where_it_would_without(num_drafts: int) -> None:
    """The state behind a row that was cut at a stop is its record's, up to the newest token."""
    limits = CACHING._replace(num_draft_tokens=num_drafts, state_checkpoint_interval=0)
    for stop in range(VOCAB_SIZE):
        harness = Harness(
            limits, policy=FakePolicy(), drafter=FakeDrafter(num_drafts, habits=(1.0,))
        )
        params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
        turn = serve(harness, ids(9), params)
        history = ids(9) + turn.output_token_ids
        again = serve(harness, [*history, 1, 2], params)
        assert again.num_cached_tokens == len(history) - 1
        harness.check_outcomes()


def test_rungs_in_an_answer_are_kept_with_drafts_in_flight() -> None:
    """I74 does not hold here: the fold passes every row, so each rung has its state."""
    limits = CACHING._replace(num_draft_tokens=3, state_checkpoint_interval=4)
    harness = Harness(limits, drafter=FakeDrafter(3, habits=(1.0,)))
    request = serve(harness, ids(5), SamplingParams(max_tokens=20, ignore_eos=True))
    assert saved_positions(harness, request) == [4, 8, 12, 16, 20]
    windows = [s for s in segments_of(harness, request) if s.saves and s.num_draft_tokens]
    assert any(save.position <= s.start for s in windows for save in s.saves)
    follower = serve(harness, ids(5) + request.output_token_ids[:8] + [1, 1, 1])
    assert follower.num_cached_tokens == 12
    harness.check_outcomes()


def test_the_next_turns_template_decides_where_a_prompt_ends() -> None:
    harness = Harness(CACHING._replace(state_checkpoint_interval=0))
    request = harness.add(ids(14), SHORT, checkpoint_position=10)
    harness.finish()
    assert saved_positions(harness, request) == [10]
    assert serve(harness, [*ids(10), 1, 2, 3]).num_cached_tokens == 10
    with pytest.raises(RequestError, match="at most the prompt's 3 tokens"):
        harness.add(ids(3), SHORT, checkpoint_position=4)
    harness.scheduler.check_idle()


def test_another_salt_shares_nothing() -> None:
    harness = Harness(CACHING)
    for salt in (None, "a", "b", ""):
        assert harness.add(ids(12), SHORT, cache_salt=salt).num_cached_tokens == 0
        harness.finish()
    assert [r.num_cached_tokens for r in harness.requests.values()] == [0] * 4
    again = harness.add(ids(12), SHORT, cache_salt="a")
    harness.finish()
    assert again.num_cached_tokens == 11
    harness.check_outcomes()


def test_who_skips_reading_is_still_read() -> None:
    harness = Harness(CACHING)
    params = SamplingParams(max_tokens=2, ignore_eos=True, skip_reading_prefix_cache=True)
    assert [serve(harness, ids(12), params).num_cached_tokens for _ in range(2)] == [0, 0]
    assert serve(harness, ids(12)).num_cached_tokens == 11
    harness.check_outcomes()


def test_prompt_logprobs_compute_every_row_that_gives_one() -> None:
    harness = Harness(CACHING)
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    serve(harness, ids(12))
    assert serve(harness, ids(12), params).num_cached_tokens == 0
    harness.check_outcomes()


def test_prompt_logprobs_that_were_delivered_are_not_computed_again() -> None:
    """What an admission has given counts for the next, and positions line up."""
    harness = Harness(CACHING._replace(max_num_batched_tokens=8))
    params = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=0)
    request = harness.add(ids(14), params)
    harness.launch()
    harness.commit()
    harness.scheduler._preempt(request)
    assert spans(harness.launch()) == [(100, 8, 14)]
    decode_until_ready(harness, [request])
    harness.scheduler._preempt(request)
    # All are there: the newest token is the only one to compute.
    assert spans(harness.launch()) == [(100, 14, 15)]
    harness.finish()
    harness.check_outcomes()
    assert request.num_cached_tokens == 0, "what it found of its own is no hit"


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_a_preempted_request_resumes_where_it_was(num_chunks: int) -> None:
    """Its slot becomes a checkpoint: nothing is copied and nothing computed again."""
    harness = Harness(CACHING._replace(max_num_batched_tokens=5, state_checkpoint_interval=0))
    request = harness.add(ids(13), LONG)
    for _ in range(num_chunks):
        harness.launch()
        harness.commit()
    position, slot = request.num_computed, request.slot
    assert position == min(13, 5 * num_chunks)
    harness.scheduler._preempt(request)
    plan = harness.launch()
    assert plan is not None
    [segment] = plan.segments
    assert (segment.start, segment.read_slot) == (position, slot)
    assert segment.write_slot == request.slot != slot
    assert harness.scheduler.prefix_cache_stats.num_resumed_tokens == position
    harness.finish()
    harness.check_outcomes()
    assert harness.scheduler.prefix_cache_stats.num_queries == 1


@pytest.mark.parametrize("odds", [0.0, 0.7, 1.0])
def test_a_preempted_speculating_request_replays_its_record(odds: float) -> None:
    limits = CACHING._replace(num_draft_tokens=3, state_checkpoint_interval=0)
    harness = Harness(limits, drafter=FakeDrafter(3, habits=(odds,)))
    request = harness.add(ids(6), LONG)
    replays = []
    while not harness.is_ended(request.request_id):
        harness.launch()
        harness.commit()
        if harness.is_ended(request.request_id):
            break
        replay = request.num_replay
        harness.scheduler._preempt(request)
        plan = harness.launch()
        assert plan is not None and plan.segments[0].replay == replay
        replays.append(replay)
        harness.commit()
    harness.finish()
    harness.check_outcomes()
    assert max(replays) == (3 if odds else 0)


def test_preempted_requests_resume_after_a_squeeze() -> None:
    """Under real pressure of pages: what is left of them is used, and counted apart from hits."""
    harness = Harness(
        CACHING._replace(num_pages=1 + 9, max_model_len=32, max_num_seqs=4, num_stages=2)
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for seed in range(4):
        harness.add(ids(6, seed), params)
    harness.finish()
    harness.check_outcomes()
    assert harness.scheduler.num_preemptions > 0
    stats = harness.scheduler.prefix_cache_stats
    assert stats.num_resumed_tokens > 0 and stats.num_queries == 4


def test_a_match_that_cannot_start_leaks_nothing() -> None:
    """Finding holds nothing; the request starts when there is room, behind its hit."""
    harness = Harness(CACHING._replace(num_pages=1 + 7, max_model_len=24))
    serve(harness, ids(9))
    big = harness.add(ids(13, seed=5), SamplingParams(max_tokens=10, ignore_eos=True))
    harness.launch()
    follower = harness.add(ids(9) + ids(6, seed=3), SamplingParams(max_tokens=2, ignore_eos=True))
    free = harness.scheduler.num_free_pages
    for _ in range(3):
        harness.commit()
        harness.launch()
        assert follower.slot is None and not follower.page_ids
        assert harness.scheduler.num_free_pages >= free - 1
        harness.scheduler.check_integrity()
    harness.finish()
    assert big.num_preemptions == 0
    harness.check_outcomes()


@pytest.mark.parametrize("num_checkpoint_slots", [0, 1, 2])
def test_pressure_of_checkpoints_is_waited_for_and_never_an_assertion(
    num_checkpoint_slots: int,
) -> None:
    """Slots that a plan in flight makes are not taken; requests wait for results."""
    limits = CACHING._replace(
        num_stages=4,
        max_num_seqs=3,
        num_live_slots=1,
        num_checkpoint_slots=num_checkpoint_slots,
        state_checkpoint_interval=4,
        max_num_batched_tokens=7,
    )
    harness = Harness(limits)
    for seed in range(8):
        harness.add(ids(11, seed % 3), LONG)
    harness.finish()
    harness.check_outcomes()
    assert harness.scheduler.prefix_cache_stats.num_unfiled > 0


def test_one_off_prompts_leave_alone_what_was_hit() -> None:
    """A flood of prompts that nobody asks for again leaves what was hit alone."""
    harness = Harness(CACHING._replace(num_checkpoint_slots=3, num_live_slots=1, max_num_seqs=1))
    serve(harness, ids(17))
    assert serve(harness, ids(17)).num_cached_tokens == 16
    for seed in range(20, 32):
        serve(harness, ids(17, seed))
    assert serve(harness, ids(17)).num_cached_tokens == 16
    harness.check_outcomes()


def test_the_ends_of_conversations_that_go_on_outlive_their_earlier_ends() -> None:
    """As many conversations as there are slots for the last two ends of each; none is lost."""
    num_conversations, num_turns = 5, 6
    harness = Harness(
        CACHING._replace(
            num_checkpoint_slots=2 * num_conversations,
            num_live_slots=1,
            max_num_seqs=1,
            num_pages=1 + 200,
            max_model_len=100,
        )
    )
    conversations = [ids(9, seed) for seed in range(30, 30 + num_conversations)]
    ends = [0] * num_conversations
    for turn in range(num_turns):
        for number, token_ids in enumerate(conversations):
            request = serve(harness, token_ids)
            assert request.num_cached_tokens == ends[number]
            answer = request.output_token_ids
            ends[number] = len(token_ids) + len(answer) - 1
            conversations[number] = [*token_ids, *answer, *ids(4, 50 + turn)]
    harness.check_outcomes()


def test_a_request_that_is_not_finite_ends_alone_and_leaves_nothing() -> None:
    harness = Harness(CACHING)
    bad = harness.add([*ids(9), BAD, *ids(6)], LONG)
    good = harness.add(ids(9), SHORT)
    harness.finish()
    harness.check_outcomes()
    assert bad.finish_reason is FinishReason.ERROR and not bad.output_token_ids
    [item] = harness.progress[bad.request_id]
    assert item.error == (
        "NonFiniteError: NaN or infinity in what was computed for tokens [0, 16) of the request"
    )
    assert good.finish_reason is FinishReason.LENGTH
    # The clean part of it was withdrawn too. What the other one left is there: pages, no state.
    assert serve(harness, [*ids(9), BAD, *ids(6)]).num_cached_tokens == 0
    assert [serve(harness, ids(9)).num_cached_tokens for _ in range(2)] == [0, 8]
    stats = harness.scheduler.prefix_cache_stats
    assert stats.evictions["not_finite"] > 0
    harness.check_outcomes()


def test_what_a_hit_on_bad_values_computes_goes_too() -> None:
    """Whoever went on from entries before they were known to be bad ends as they did."""
    harness = Harness(CACHING._replace(num_stages=3, max_num_batched_tokens=12))
    bad = harness.add([1, BAD, *ids(16)], LONG)
    harness.launch()
    reader = harness.add([1, BAD, *ids(8), 3, 3], LONG)
    other = harness.add(ids(5), SHORT)
    harness.launch()
    assert reader.num_cached_tokens == 8
    harness.finish()
    harness.check_outcomes()
    reasons = [request.finish_reason for request in (bad, reader, other)]
    assert reasons == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]
    assert serve(harness, [1, BAD, *ids(16)]).num_cached_tokens == 0


def test_a_late_row_that_is_not_finite_withdraws_what_an_abort_left() -> None:
    """I83 drops its tokens, not its news."""
    harness = Harness(CACHING._replace(num_stages=3, max_num_batched_tokens=8))
    gone = harness.add([*ids(3), BAD, *ids(16)], LONG)
    harness.launch()
    harness.launch()
    harness.abort(gone)
    harness.commit()
    harness.finish()
    assert serve(harness, [*ids(3), BAD, *ids(16)]).num_cached_tokens == 0
    harness.check_outcomes()


@pytest.mark.parametrize("num_launched", [1, 2, 3])
def test_an_abort_leaves_the_state_behind_all_that_was_planned(num_launched: int) -> None:
    """Stop strings end in aborts, mostly with a sample in flight."""
    harness = Harness(
        CACHING._replace(num_stages=3, max_num_batched_tokens=5, state_checkpoint_interval=0)
    )
    gone = harness.add(ids(13), LONG)
    for _ in range(num_launched):
        harness.launch()
    harness.abort(gone)
    follower = harness.add([*ids(13), 1, 2], SHORT)
    plan = harness.launch() if harness.scheduler.can_launch else None
    while plan is None:
        harness.commit()
        plan = harness.launch()
    # The prompt's end is a rung; the state behind what was planned last is deeper or elsewhere.
    assert plan.segments[0].start == follower.num_cached_tokens == min(13, 5 * num_launched)
    harness.finish()
    harness.check_outcomes()


def test_a_reset_forgets_everything_at_once() -> None:
    harness = Harness(CACHING._replace(num_stages=2, max_num_batched_tokens=16))
    serve(harness, ids(14))
    running = harness.add(ids(14, seed=3), LONG)
    harness.launch()
    harness.scheduler.reset_prefix_cache()
    harness.scheduler.check_integrity()
    assert harness.scheduler.prefix_cache_stats.num_cached_pages == 0
    for token_ids in (ids(14), ids(14, seed=3)):
        request = harness.add(token_ids, SHORT)
        harness.finish()
        assert request.num_cached_tokens == 0
    harness.check_outcomes()
    assert running.finish_reason is FinishReason.LENGTH


def test_with_caching_off_nothing_is_kept_or_counted() -> None:
    harness = Harness(CACHING._replace(has_prefix_cache=False))
    for _ in range(3):
        request = serve(harness, ids(14))
        assert request.num_cached_tokens == 0 and saved_positions(harness, request) == []
    stats = harness.scheduler.prefix_cache_stats
    assert (stats.num_hits, stats.num_filed, stats.num_cached_pages) == (0, 0, 0)
    assert all(not plan.moves.copies for plan in harness.plans)


def test_evicted_prefixes_come_back_from_the_host() -> None:
    limits = CACHING._replace(
        num_pages=1 + 6,
        max_model_len=24,
        num_checkpoint_slots=1,
        max_num_seqs=1,
        state_checkpoint_interval=0,
    )
    cold, warm = (
        Harness(limits._replace(num_host_pages=count, num_host_slots=count)) for count in (0, 20)
    )
    for harness in (cold, warm):
        serve(harness, ids(15))
        serve(harness, ids(15, seed=2))
        serve(harness, ids(15, seed=3))
        again = serve(harness, ids(15))
        assert again.num_cached_tokens == (14 if harness is warm else 0)
        harness.check_outcomes()
    [load] = [move for plan in warm.plans for move in plan.moves.load_slots]
    [segment] = [s for p in warm.plans if p.moves.load_slots for s in p.segments]
    assert segment.read_slot == segment.write_slot == load.device
    assert warm.scheduler.prefix_cache_stats.num_loaded > 1


def test_saves_are_in_the_plan_as_position_and_slot() -> None:
    harness = Harness(CACHING)
    request = harness.add(ids(12), LONG)
    plan = harness.launch()
    assert plan is not None
    [segment] = plan.segments
    assert [save.position for save in segment.saves] == [8, 11]
    assert all(isinstance(save, Save) for save in segment.saves)
    assert request.slot not in {save.slot for save in segment.saves}
    assert harness.scheduler.num_free_slots == harness.scheduler.num_slots - 3
    harness.commit()
    # Ready: they can be evicted for somebody who needs a slot.
    assert harness.scheduler.num_free_slots == harness.scheduler.num_slots - 1
    harness.finish()


def test_prompts_of_whole_pages_are_found_without_copies() -> None:
    harness = Harness(CACHING)
    serve(harness, prompt(9))
    assert serve(harness, prompt(9)).num_cached_tokens == 8
    assert all(not plan.moves.copies for plan in harness.plans)


def test_a_long_prompts_grid_leaves_a_slot_for_its_end() -> None:
    """What is worth most is saved first, and then as much of the grid as is vacant."""
    limits = CACHING._replace(
        num_checkpoint_slots=3, num_live_slots=1, max_num_seqs=1, state_checkpoint_interval=4
    )
    harness = Harness(limits)
    request = serve(harness, ids(40), SamplingParams(max_tokens=1, ignore_eos=True))
    assert saved_positions(harness, request) == [4, 8, 39]
    assert serve(harness, ids(40)).num_cached_tokens == 39
    harness.check_outcomes()


def test_the_last_slot_is_taken_over_with_the_state_in_it() -> None:
    """Without a slot beside the running ones, a conversation still goes on where it was."""
    limits = CACHING._replace(num_checkpoint_slots=0, num_live_slots=2, max_num_seqs=2)
    harness = Harness(limits)
    harness.add(ids(6, seed=9), LONG)
    turn = harness.add(ids(9), SHORT)
    decode_until_ready(harness, [turn])
    while not harness.is_ended(turn.request_id):
        if harness.launch() is None:
            harness.commit()
    history = ids(9) + turn.output_token_ids
    follower = harness.add([*history, 3], SHORT)
    while follower.slot is None:
        if (plan := harness.launch()) is None:
            harness.commit()
    assert plan is not None and follower.num_cached_tokens == len(history) - 1
    [segment] = [s for s in plan.segments if s.request_id == follower.request_id]
    assert segment.start == len(history) - 1 and segment.read_slot == segment.write_slot
    harness.finish()
    harness.check_outcomes()


def test_a_preempted_request_resumes_in_its_own_slot_where_there_is_no_other() -> None:
    limits = CACHING._replace(num_checkpoint_slots=0, num_live_slots=1, max_num_seqs=1)
    harness = Harness(limits._replace(num_draft_tokens=3), drafter=FakeDrafter(3, habits=(1.0,)))
    request = harness.add(ids(6), LONG)
    decode_until_ready(harness, [request])
    harness.launch()
    harness.commit()
    slot, position, replay = request.slot, request.num_computed, request.num_replay
    harness.scheduler._preempt(request)
    plan = harness.launch()
    assert plan is not None and replay == 3
    [segment] = plan.segments
    assert (segment.start, segment.replay) == (position, replay)
    assert segment.read_slot == segment.write_slot == slot
    harness.finish()
    harness.check_outcomes()
