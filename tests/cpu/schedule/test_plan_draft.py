"""What a segment says of its request, and how the request advances with it."""

from typing import Any

import pytest

from stagecoach.cache.memory_moves import MemoryMoves
from stagecoach.cache.prefix_hash import prefix_digest
from stagecoach.cache.state_slots import ZERO_SLOT
from stagecoach.request import (
    Request,
    SamplingParams,
    StructuredOutputsParams,
    TokenLogprobs,
)
from stagecoach.schedule.plan_draft import PlanDraft
from stagecoach.schedule.step_plan import Save
from tests.cpu.table_constraint import TableConstraint, line

PROMPT = (5, 6, 7, 8, 9, 10)


def make_request(**params: Any) -> Request:
    request = Request(
        request_id=3,
        prompt_token_ids=PROMPT,
        params=SamplingParams(**params),
        seed=0,
        max_tokens=8,
        slot=4,
        sampling_row=2,
    )
    request.page_ids.extend((7, 8))
    return request


@pytest.mark.parametrize(
    ("start", "length", "num_delivered", "targets"),
    [
        (0, 6, 0, (6, 7, 8, 9, 10)),  # nothing follows the last prompt token
        (0, 2, 0, (6, 7)),
        (2, 2, 2, (8, 9)),
        (5, 1, 5, ()),
        (0, 6, 5, ()),  # all delivered by an earlier admission
        (0, 6, 4, (6, 7, 8, 9, 10)),  # one is missing: targets go with the first rows
        (0, 2, 2, ()),
        (0, 3, 2, (6, 7, 8)),
    ],
)
def test_prompt_logprob_targets(
    start: int, length: int, num_delivered: int, targets: tuple[int, ...]
) -> None:
    request = make_request(prompt_logprobs=3)
    request.num_computed = start
    request.prompt_logprobs.extend([TokenLogprobs(0, 0.0, 1)] * num_delivered)
    draft = PlanDraft(100, frozenset())
    request.read_slot = 4 if start else ZERO_SLOT
    draft.add_chunk(request, length)
    [segment] = draft.finish(0).segments
    assert (segment.prompt_logprob_targets, segment.num_prompt_logprobs) == (targets, 3)


def test_a_request_advances_as_its_segment_is_added() -> None:
    request = make_request()
    draft = PlanDraft(10, frozenset({0}))
    assert draft.is_empty
    draft.add_chunk(request, 4)
    assert (request.num_computed, request.num_plans_in_flight) == (4, 1)
    assert not request.is_sample_in_flight and not draft.is_empty and draft.budget == 6
    draft = PlanDraft(10, frozenset({0}))
    draft.add_chunk(request, 2)
    assert (request.num_computed, request.num_plans_in_flight) == (6, 2)
    assert request.is_sample_in_flight
    draft.finish(1)
    assert draft.requests == (request,)


def test_a_window_is_the_newest_token() -> None:
    request = make_request()
    request.output_token_ids.extend((20, 21))
    request.num_computed, request.read_slot = 7, 4
    draft = PlanDraft(10, frozenset())
    draft.add_window(request)
    moves = MemoryMoves(scrub_pages=(3, 5))
    plan = draft.finish(9, moves)
    [segment] = plan.segments
    assert (segment.start, segment.token_ids, segment.sampling_row) == (7, (21,), 2)
    assert (segment.read_slot, segment.write_slot, segment.page_ids) == (4, 4, (7, 8))
    assert (plan.step, plan.moves) == (9, moves)
    assert not plan.admissions


def test_a_window_takes_the_first_drafts_and_uses_all_of_them_up() -> None:
    """I14, I31: full, ragged and missing rows are its own drafts, in their order."""
    for num_drafts in range(4):
        request = make_request()
        request.output_token_ids.append(20)
        request.num_computed, request.num_replay, request.read_slot = 6, 2, 4
        request.draft_token_ids, request.confidences = (21, 22, 23), (0.9, 0.8, 0.7)
        draft = PlanDraft(10, frozenset())
        draft.add_window(request, num_drafts, proposes=True)
        [segment] = draft.finish(0).segments
        assert segment.token_ids == (20, 21, 22, 23)[: 1 + num_drafts]
        assert (segment.start, segment.num_draft_tokens) == (6, num_drafts)
        assert (segment.replay, segment.proposes) == (2, True)
        assert draft.budget == 9 - num_drafts
        assert (request.draft_token_ids, request.confidences) == ((), ())
        assert (request.num_computed, request.num_replay) == (7 + num_drafts, 0)


def test_only_what_samples_may_propose() -> None:
    draft = PlanDraft(10, frozenset())
    with pytest.raises(AssertionError, match="not sampled"):
        draft.add_chunk(make_request(), 4, proposes=True)
    draft.add_chunk(make_request(), 6, proposes=True)
    [segment] = draft.finish(0).segments
    assert segment.proposes and segment.sampling_row == 2


def test_the_first_segment_after_a_hit_reads_the_checkpoint_and_later_ones_their_own_slot() -> None:
    request = make_request()
    request.num_computed, request.num_replay, request.read_slot = 3, 1, 9
    draft = PlanDraft(10, frozenset(), has_digests=True)
    draft.add_chunk(request, 2, saves=(Save(4, 6),))
    [first] = draft.finish(0).segments
    assert (first.start, first.read_slot, first.replay, first.write_slot) == (3, 9, 1, 4)
    assert first.saves == (Save(4, 6),) and first.read_digest == prefix_digest(PROMPT[:3])
    draft = PlanDraft(10, frozenset())
    draft.add_chunk(request, 1)
    [second] = draft.finish(1).segments
    assert (second.start, second.read_slot, second.replay, second.write_slot) == (5, 4, 0, 4)
    assert second.saves == () and second.read_digest == b""


def test_rows_of_a_request_with_a_grammar_wait_for_masks() -> None:
    """Where they are sampled; workers are told nothing else of it."""
    wanted = StructuredOutputsParams(regex="a" * 10_000)
    request = make_request(structured_outputs=wanted, temperature=0.5)
    request.constraint = TableConstraint(line(20, 21, 22), vocab_size=40)
    draft = PlanDraft(100, frozenset())
    draft.add_chunk(request, 4)
    [segment] = draft.finish(0).segments
    assert not segment.is_constrained
    draft = PlanDraft(100, frozenset())
    draft.add_chunk(request, 2)
    plan = draft.finish(1)
    assert plan.segments[0].is_constrained
    [entry] = plan.admissions
    assert entry.params == SamplingParams(temperature=0.5)
    assert len(plan.encode()) < 1_000
    request.output_token_ids.append(20)
    request.num_samples_in_flight = 0
    request.draft_token_ids = (21, 22)
    draft = PlanDraft(100, frozenset())
    draft.add_window(request, 2)
    [segment] = draft.finish(2).segments
    assert segment.is_constrained and segment.token_ids == (20, 21, 22)
    free = make_request()
    draft = PlanDraft(100, frozenset())
    draft.add_chunk(free, 6)
    assert not draft.finish(0).segments[0].is_constrained
