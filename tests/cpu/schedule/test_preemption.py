"""Who loses its place and when, what is left of it, and what happens to late results."""

import pytest

from stagecoach.request import FinishReason, SamplingParams
from tests.cpu.schedule.fake_executor import (
    LONG,
    Harness,
    Limits,
    decode_until_ready,
    prompt,
    spans,
)


def test_the_youngest_idle_request_is_preempted_and_continues_as_if_nothing_happened() -> None:
    """I29: prompt and committed outputs are left, and the continuation is the same."""
    harness = Harness(Limits(num_pages=1 + 6, max_model_len=24, max_num_batched_tokens=64))
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    old = harness.add(prompt(8), params)
    young = harness.add(prompt(7), params)
    while not young.num_preemptions:
        outputs = list(young.output_token_ids)
        if harness.launch() is None:
            harness.commit()
    assert young.output_token_ids == outputs != []
    assert young.token_ids(0, young.num_tokens) == (*young.prompt_token_ids, *outputs)
    assert (young.num_computed, young.epoch, young.slot, young.sampling_row) == (0, 1, None, None)
    assert not young.page_ids and old.num_preemptions == 0
    harness.finish()
    harness.check_outcomes()
    assert harness.progress[young.request_id][-1].preemptions == young.num_preemptions >= 1
    resumed = [p for p in harness.plans if any(s.epoch == 1 and s.start == 0 for s in p.segments)]
    [segment] = [s for s in resumed[0].segments if s.request_id == young.request_id]
    assert segment.num_tokens == 7 + len(outputs) and segment.read_slot == 0


def test_a_request_in_flight_is_no_victim() -> None:
    """The older one waits for the younger one's result, and then takes its pages."""
    harness = Harness(
        Limits(
            num_stages=2,
            num_pages=1 + 3,
            block_size=8,
            max_model_len=24,
            max_num_batched_tokens=64,
        )
    )
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    old = harness.add(prompt(15), params)
    young = harness.add(prompt(2), params)
    decode_until_ready(harness, [old, young])
    assert [spans(harness.launch()), spans(harness.launch())] == [[(101, 2, 3)], [(100, 15, 16)]]
    assert harness.scheduler.num_free_pages == 0
    harness.commit()
    harness.commit()
    assert spans(harness.launch()) == [(101, 3, 4)]
    assert harness.launch() is None, "the next page of the older one is the younger one's"
    harness.commit()
    assert spans(harness.launch()) == [(100, 16, 17)]
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    harness.finish()
    harness.check_outcomes()


def test_a_younger_window_leaves_the_pages_promised_to_an_older_prompt() -> None:
    """An older request that was preempted and fills its pages anew is in every plan."""
    harness = Harness(
        Limits(num_pages=1 + 5, block_size=4, max_model_len=20, max_num_batched_tokens=3)
    )
    old = harness.add(prompt(12), SamplingParams(max_tokens=5, ignore_eos=True))
    young = harness.add(prompt(1), SamplingParams(max_tokens=14, ignore_eos=True))
    decode_until_ready(harness, [old, young])
    harness.scheduler._preempt(old)
    while not old.output_token_ids or old.num_computed < old.num_tokens - 1:
        plan = harness.launch()
        assert plan is not None
        assert old.request_id in [segment.request_id for segment in plan.segments], str(plan)
        harness.commit()
    assert (old.num_preemptions, young.num_preemptions) == (1, 0)
    harness.finish()
    harness.check_outcomes()


def test_preemption_does_not_ping_pong() -> None:
    """The oldest is never preempted; each preemption is paid by progress of an older request."""
    harness = Harness(
        Limits(max_num_seqs=5, num_pages=1 + 8, max_model_len=32, max_num_batched_tokens=64)
    )
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [harness.add(prompt(6, first), params) for first in range(5)]
    harness.finish()
    harness.check_outcomes()
    assert requests[0].num_preemptions == 0
    assert 1 <= sum(request.num_preemptions for request in requests) <= 5 * 32 // 4
    ends = [
        next(
            n
            for n, plan in reversed(list(enumerate(harness.plans)))
            if any(s.request_id == request.request_id for s in plan.segments)
        )
        for request in requests
    ]
    assert ends == sorted(ends)


def test_a_result_from_before_an_abort_never_touches_the_heir() -> None:
    """I83: aborted with two plans in flight, its slot and pages are another's at once."""
    harness = Harness(
        Limits(
            num_stages=3,
            max_num_seqs=1,
            num_pages=1 + 4,
            max_model_len=16,
            max_num_batched_tokens=4,
        )
    )
    gone = harness.add(prompt(12), SamplingParams(max_tokens=4))
    heir = harness.add(prompt(4, 5), SamplingParams(max_tokens=3, ignore_eos=True))
    harness.launch()
    harness.launch()
    slot, pages = gone.slot, set(gone.page_ids)
    harness.abort(gone)
    assert spans(harness.launch()) == [(101, 0, 4)]
    assert heir.slot == slot and set(heir.page_ids) <= pages
    assert harness.commit() == [] and harness.commit() == []
    assert heir.output_token_ids == []
    harness.finish()
    harness.check_outcomes()


@pytest.mark.parametrize("num_launched", [1, 2, 3])
def test_results_of_an_older_epoch_are_dropped(num_launched: int) -> None:
    """I83: even if a request lost its place with chunks or a sample in flight."""
    harness = Harness(Limits(num_stages=4, max_num_batched_tokens=4))
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    request = harness.add(prompt(10), params)
    for _ in range(num_launched):
        harness.launch()
    harness.scheduler._preempt(request)
    assert spans(harness.launch()) == [(100, 0, 4)]
    for _ in range(num_launched):
        assert harness.commit() == []
    assert (request.num_steps, request.num_plans_in_flight, request.num_computed) == (0, 1, 4)
    harness.finish()
    harness.check_outcomes()


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "sampling", "ready", "preempted"])
def test_an_abort_at_any_moment_frees_everything_at_once(moment: str) -> None:
    harness = Harness(
        Limits(num_stages=2, num_pages=1 + 6, max_model_len=24, max_num_batched_tokens=8)
    )
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    other = harness.add(prompt(8), params)
    request = harness.add(prompt(12, 3), params)

    def is_there() -> bool:
        return {
            "waiting": request.slot is None,
            "prefilling": 0 < request.num_computed < 12 and request.num_plans_in_flight > 0,
            "sampling": request.is_sample_in_flight and bool(request.output_token_ids),
            "ready": bool(request.output_token_ids) and not request.num_plans_in_flight,
            "preempted": request.num_preemptions > 0 and request.slot is None,
        }[moment]

    while not is_there():
        assert not harness.is_ended(request.request_id), f"never {moment}"
        if harness.launch() is None:
            harness.commit()
    num_outputs = len(request.output_token_ids)
    harness.abort(request)
    assert request.finish_reason is FinishReason.ABORT
    assert (request.slot, request.sampling_row, len(request.page_ids)) == (None, None, 0)
    harness.finish()
    assert len(request.output_token_ids) == num_outputs
    assert harness.progress[request.request_id][-1].finish_reason is FinishReason.ABORT
    assert not harness.is_ended(other.request_id) or other.finish_reason is FinishReason.LENGTH
    harness.check_outcomes()


def test_an_abort_of_an_unknown_or_ended_request_is_nothing() -> None:
    harness = Harness(Limits())
    request = harness.add(prompt(3), SamplingParams(max_tokens=1))
    assert harness.scheduler.abort(7) is None
    harness.finish()
    assert harness.scheduler.abort(request.request_id) is None
    assert request.finish_reason is not FinishReason.ABORT


def test_only_results_are_left_when_all_requests_are_aborted() -> None:
    harness = Harness(Limits(num_stages=2, max_num_batched_tokens=2))
    request = harness.add(prompt(6), LONG)
    harness.launch()
    harness.abort(request)
    assert harness.scheduler.has_work and harness.launch() is None
    harness.commit()
    assert not harness.scheduler.has_work
    harness.scheduler.check_idle()


def test_freed_memory_is_poisoned_before_the_next_plan_runs() -> None:
    harness = Harness(Limits(num_stages=2, max_num_seqs=1, max_num_batched_tokens=8))
    gone = harness.add(prompt(8), LONG)
    harness.add(prompt(3), LONG)
    first = harness.launch()
    assert first is not None and not first.moves.scrub_pages and not first.moves.scrub_slots
    pages, slot = tuple(sorted(gone.page_ids)), gone.slot
    harness.abort(gone)
    second = harness.launch()
    assert second is not None
    assert (second.moves.scrub_pages, second.moves.scrub_slots) == (pages, (slot,))
    assert second.segments[0].write_slot == slot, "the heir's memory is poisoned as well"
    harness.finish()
    assert all(not plan.moves.scrub_pages for plan in harness.plans[2:])


def test_nothing_is_poisoned_outside_debug_mode() -> None:
    harness = Harness(Limits(num_stages=2, max_num_seqs=1), debug_poison=False)
    gone = harness.add(prompt(8), LONG)
    harness.add(prompt(3), SamplingParams(max_tokens=2))
    harness.launch()
    harness.abort(gone)
    harness.finish()
    assert all(not plan.moves.scrub_pages and not plan.moves.scrub_slots for plan in harness.plans)


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    harness = Harness(
        Limits(num_pages=1 + 6, max_model_len=24, max_num_batched_tokens=4, max_num_seqs=2)
    )
    params = SamplingParams(max_tokens=10, ignore_eos=True, prompt_logprobs=0)
    harness.add(prompt(7), params)
    young = harness.add(prompt(11, 4), params)
    harness.finish()
    assert young.num_preemptions
    harness.check_outcomes()


def test_two_requests_that_hold_pages_and_want_one_more_do_not_deadlock() -> None:
    harness = Harness(
        Limits(num_stages=2, max_num_seqs=2, num_pages=1 + 7, max_model_len=24, block_size=4)
    )
    harness.add(prompt(14), SamplingParams(max_tokens=8, ignore_eos=True))
    harness.add(prompt(11, 5), SamplingParams(max_tokens=8, ignore_eos=True))
    harness.finish()
    harness.check_outcomes()
