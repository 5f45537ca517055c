"""The last stage with drafts: the tokens, and all that comes with them, of plain decoding."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.request import TokenLogprobs
from stagecoach.runner import last_stage as last_stage_module
from stagecoach.runner.last_stage import LastStage
from stagecoach.schedule.step_plan import RowResult, StepPlan
from tests.cpu.runner.window_runs import (
    NUM_DRAFTS,
    STOP_ID,
    VOCAB_SIZE,
    Decoder,
    FakeDrafter,
    FakeModel,
    FakeStream,
    Prefix,
    Schedule,
    all_drafts,
    decode,
    decoders,
    make_last_stage,
    plain,
    ragged,
    run_plan,
    speculation,
    target_logits,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu

NUM_TOKENS = 24


def run(
    params: list[dict[str, Any]],
    schedule: Schedule,
    *,
    error: float | None,
    acceptance: str = "shared",
    synthetic: float | None = None,
    num_tokens: int = NUM_TOKENS,
) -> list[Decoder]:
    """Decode to the end; without an `error` on an engine without a drafter."""
    requests = decoders(params)
    if error is None:
        last_stage = make_last_stage(None, None)
    else:
        asked = speculation(acceptance, synthetic=synthetic)
        last_stage = make_last_stage(asked, FakeDrafter(error))
    decode(last_stage, requests, num_tokens, schedule)
    return requests


def assert_same(ours: list[Decoder], theirs: list[Decoder], num_tokens: int = NUM_TOKENS) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids[:num_tokens] == other.token_ids[:num_tokens]
        assert one.logprobs[:num_tokens] == other.logprobs[:num_tokens]
        if one.params.logprobs is not None:
            assert [entry.token_id for entry in one.logprobs] == one.token_ids


EVERY_PARAMETER: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1, "logprobs": 0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.7, "logprobs": 2},
    {"logit_bias": {7: 4.0, 2: -100.0}},
    {"min_tokens": 9},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.8, "min_tokens": 4},
]


@pytest.mark.parametrize("acceptance", ["shared", "rejection"])
@pytest.mark.parametrize("error", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("schedule", [all_drafts, ragged])
def test_greedy_tokens_are_those_of_plain_decoding(
    schedule: Schedule, error: float, acceptance: str
) -> None:
    params = [{**values, "temperature": 0.0} for values in EVERY_PARAMETER]
    theirs = run(params, plain, error=None)
    assert_same(run(params, schedule, error=error, acceptance=acceptance), theirs)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("error", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("schedule", [all_drafts, ragged])
def test_random_tokens_are_those_of_plain_decoding(
    schedule: Schedule, error: float, temperature: float
) -> None:
    params = [{**values, "temperature": temperature} for values in EVERY_PARAMETER]
    theirs = run(params, plain, error=None)
    ours = run(params, schedule, error=error)
    assert_same(ours, theirs)
    assert len({tuple(request.token_ids) for request in ours}) == len(params)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "top_k": st.sampled_from([1, 3, 9]),
        "min_p": st.sampled_from([0.01, 0.3]),
        "presence_penalty": st.sampled_from([-1.0, 2.0]),
        "frequency_penalty": st.just(0.5),
        "repetition_penalty": st.sampled_from([0.5, 1.3]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-9.0, 4.0])),
        "min_tokens": st.integers(0, 12),
        "logprobs": st.integers(0, 4),
    },
)


@settings(max_examples=12, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.sampled_from([0.0, 0.2, 0.5]), st.randoms())
def test_any_mix_of_requests_and_lengths_gives_each_its_plain_tokens(
    params: list[dict[str, Any]], error: float, random: Any
) -> None:
    def schedule(step: int, decoder: Decoder) -> tuple[int, int, bool]:
        return random.randint(1, 4), random.randint(0, NUM_DRAFTS), random.random() < 0.8

    ours = run(params, schedule, error=error, num_tokens=14)
    for number in range(len(params)):
        alone = decoders(params)[number : number + 1]
        decode(make_last_stage(None, None), alone, 14, plain)
        assert_same([ours[number]], alone, 14)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_drafter_that_knows_the_target_is_always_right(temperature: float) -> None:
    """Equal parameters and equal noise make equal choices: bias, masks and penalties too."""
    params = [{**values, "temperature": temperature} for values in EVERY_PARAMETER]
    for request in run(params, all_drafts, error=0.0):
        first, *windows = request.rows
        assert first == (0, 1)
        assert set(windows) == {(NUM_DRAFTS, NUM_DRAFTS + 1)}


def test_nothing_is_left_of_a_rejected_draft_in_the_penalties() -> None:
    """Counts after windows are those of the output, beside requests without penalties."""
    params: list[dict[str, Any]] = [
        {"temperature": 1.3},
        {"temperature": 1.3, "frequency_penalty": 0.1},
        {"temperature": 0.0, "presence_penalty": 0.1},
    ]
    requests = decoders(params)
    last_stage = make_last_stage(speculation(), FakeDrafter(0.6))
    decode(last_stage, requests, NUM_TOKENS, all_drafts)
    assert any(drafts + 1 > tokens for request in requests for drafts, tokens in request.rows)
    assert last_stage._table is not None
    counts_RV = last_stage._table.output_counts(torch.tensor([1, 2]))
    for counts_V, request in zip(counts_RV, requests[1:], strict=True):
        expected_V = torch.tensor(request.token_ids).bincount(minlength=VOCAB_SIZE)
        assert torch.equal(counts_V.to(torch.int64), expected_V)


def test_min_tokens_ends_in_the_middle_of_a_window() -> None:
    def stop_at_once(prefix: Prefix) -> Tensor:
        logits_V = target_logits(prefix).clone()
        logits_V[STOP_ID] = 50.0
        return logits_V

    for temperature in (0.0, 1.0):
        requests = decoders([{"temperature": temperature, "min_tokens": 4}])
        drafter = FakeDrafter(0.0)
        last_stage = make_last_stage(speculation(), drafter, model=FakeModel(stop_at_once))
        decode(last_stage, requests, 6, all_drafts)
        assert STOP_ID not in requests[0].token_ids[:4]
        assert requests[0].token_ids[4] == STOP_ID


SPOILT = pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])


@SPOILT
@pytest.mark.parametrize("acceptance", ["shared", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_spoilt_request_ends_alone(temperature: float, acceptance: str, value: float) -> None:
    """From its fifth token on one logit is not finite; all others get their plain tokens."""
    params = [
        {"temperature": temperature, "logprobs": 2, "top_p": 0.9},
        {"temperature": temperature, "presence_penalty": 1.0},
    ] * 2

    def spoilt(prefix: Prefix) -> Tensor:
        logits_V = target_logits(prefix)
        is_theirs = prefix[: len(third)] == third and len(prefix) >= len(third) + 4
        return logits_V.index_fill(0, torch.tensor(9), value) if is_theirs else logits_V

    third = decoders(params)[2].prompt
    requests, plain_requests = decoders(params), decoders(params)
    drafter = FakeDrafter(0.3)
    last_stage = make_last_stage(speculation(acceptance), drafter, model=FakeModel(spoilt))
    decode(last_stage, requests, NUM_TOKENS, all_drafts)
    decode(make_last_stage(None, None, model=FakeModel(spoilt)), plain_requests, NUM_TOKENS, plain)
    for ours in (requests, plain_requests):
        assert [item.is_spoilt for item in ours] == [False, False, True, False]
    assert len(plain_requests[2].token_ids) == 4
    if acceptance == "shared" or temperature == 0.0:
        for number in (0, 1, 3):
            assert_same([requests[number]], [plain_requests[number]])
        # A window that ends at a spoilt row gives nothing of what was right before it.
        num_tokens = len(requests[2].token_ids)
        assert requests[2].token_ids == plain_requests[2].token_ids[:num_tokens]


@SPOILT
def test_what_is_behind_a_rejected_draft_may_be_anything(value: float) -> None:
    """Logits after a draft that is not the target's are never looked at."""
    params = [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 1}]
    theirs = run(params, plain, error=None)
    right = {
        (*request.prompt, *request.token_ids[:place])
        for request in theirs
        for place in range(NUM_TOKENS + 1)
    }
    num_spoilt = 0

    def spoilt(prefix: Prefix) -> Tensor:
        nonlocal num_spoilt
        logits_V = target_logits(prefix)
        if prefix in right or len(prefix) > NUM_TOKENS:
            return logits_V
        num_spoilt += 1
        return torch.full_like(logits_V, value)

    requests = decoders(params)
    last_stage = make_last_stage(speculation(), FakeDrafter(0.4), model=FakeModel(spoilt))
    decode(last_stage, requests, NUM_TOKENS - 8, all_drafts)
    assert num_spoilt > 10
    assert not any(request.is_spoilt for request in requests)
    for ours, others in zip(requests, theirs, strict=True):
        assert ours.token_ids == others.token_ids[: len(ours.token_ids)]


def first_row(request: Decoder, last_stage: LastStage, **changes: Any) -> RowResult:
    """What comes of the whole prompt in one segment."""
    segment = request.segment(len(request.prompt), 0, proposes=True)
    plan = StepPlan(
        step=0,
        segments=(msgspec.structs.replace(segment, **changes),),
        admissions=(request.entry(),),
    )
    ends = range(1, 1 + len(request.prompt))
    [row] = run_plan(last_stage, plan, FakeStream(request.prompt[:end] for end in ends))
    return row


def test_a_drafter_that_overflows_is_sure_of_nothing() -> None:
    class Overflowing(FakeDrafter):
        def propose(self, *args: Any) -> Any:
            proposal = super().propose(*args)
            assert proposal is not None and proposal.confidences_NK is not None
            confidences_NK = proposal.confidences_NK.clone()
            confidences_NK[:, 1] = torch.nan
            return proposal._replace(confidences_NK=confidences_NK)

    [request] = decoders([{}])
    row = first_row(request, make_last_stage(speculation(), Overflowing(0.3)))
    assert row.is_finite
    assert row.confidences == (1.0, 0.0, *(1 + place / 64 for place in range(2, NUM_DRAFTS)))


def test_the_largest_logits_are_reported_as_they_come_from_the_head() -> None:
    """Whatever the sampling parameters make of them; equal ones by id."""
    [request] = decoders([{"temperature": 0.5, "logit_bias": {7: 50.0}, "top_k": 2}])
    row = first_row(request, make_last_stage(None, None), reports_logits=True, proposes=False)
    logits_V = target_logits(request.prompt)
    order = sorted(range(VOCAB_SIZE), key=lambda token_id: (-logits_V[token_id], token_id))
    assert row.logit_ids == tuple(order[:16])
    assert row.logits == tuple(logits_V[list(row.logit_ids)].tolist())
    assert row.token_ids == (7,)


def test_context_is_written_in_every_step_and_before_the_block() -> None:
    drafter = FakeDrafter(0.3)
    requests = decoders([{}, {"temperature": 0.0}])

    def schedule(step: int, decoder: Decoder) -> tuple[int, int, bool]:
        return 2, 2, step % 2 == 1

    decode(make_last_stage(speculation(), drafter), requests, 8, schedule)
    steps = "".join(call[0] for call in drafter.calls)
    assert steps.replace("wp", "b").replace("w", "").count("p") == 0
    assert "ww" in steps and "wp" in steps


def test_a_block_stands_at_the_newest_token_and_its_context_before_it() -> None:
    drafter = FakeDrafter(0.4)
    requests = decoders([{"temperature": 1.3}] * 3)
    newest: list[list[tuple[int, int]]] = []

    def schedule(step: int, decoder: Decoder) -> tuple[int, int, bool]:
        if decoder.token_ids:
            newest.append([(decoder.token_ids[-1], len(decoder.known) - 1)])
        return ragged(step, decoder)

    decode(make_last_stage(speculation(), drafter), requests, 12, schedule)
    known = {pair for pairs in newest for pair in pairs}
    known |= {(request.token_ids[-1], len(request.known) - 1) for request in requests}
    for block in drafter.blocks:
        pairs = zip(block.anchor_ids_N.tolist(), block.starts_N.tolist(), strict=True)
        assert set(pairs) <= known
        assert block.context_rows_NL.shape[1] >= int(block.starts_N.max())


def test_without_a_confidence_head_there_are_none() -> None:
    drafter = FakeDrafter(0.3)
    drafter.has_confidences = False
    requests = decoders([{}, {"logprobs": 1}])
    last_stage = make_last_stage(speculation(), drafter)
    rows = []
    original = last_stage.run

    def record(*args: Any) -> Any:
        rows.append(original(*args))
        return rows[-1]

    last_stage.run = record  # type: ignore[method-assign]
    decode(last_stage, requests, 8, all_drafts)
    assert all(row.confidences == () for step in rows for row in step)
    assert all(len(row.draft_token_ids) == NUM_DRAFTS for step in rows for row in step)


def test_log_probabilities_are_made_once_a_step_and_never_for_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_calls = 0
    original = last_stage_module.requested_logprobs

    def count(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return original(*args)

    def refuse(*_: Any) -> None:
        raise AssertionError("a draft needs no log-probabilities")

    monkeypatch.setattr(last_stage_module, "requested_logprobs", count)
    drafter = FakeDrafter(0.3)
    propose = drafter.propose

    def propose_without(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stagecoach.runner.logprobs.token_logprobs", refuse)
            return propose(*args)

    drafter.propose = propose_without  # type: ignore[method-assign]
    decode(make_last_stage(speculation(), drafter), decoders([{"logprobs": 4}]), 9, all_drafts)
    assert num_calls == drafter.calls.count("write")


class Listener:
    """Another rank: gets what rank 0 sent."""

    rank = 1
    size = 2

    def __init__(self, sent: list[Tensor]) -> None:
        self._sent = sent

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        sent = self._sent.pop(0)
        assert (tensor.shape, tensor.dtype) == (sent.shape, sent.dtype)
        return sent


class Speaker(Listener):
    """Rank 0: what it sends is kept."""

    rank = 0

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._sent.append(tensor.clone())
        return tensor


def test_every_rank_of_the_stage_runs_the_same_blocks() -> None:
    sent: list[Tensor] = []
    drafters = [FakeDrafter(0.4), FakeDrafter(0.4)]
    first = make_last_stage(speculation(), drafters[0], tp=Speaker(sent))
    second = make_last_stage(speculation(), drafters[1], tp=Listener(sent), is_sampler=False)
    run_first: Callable[..., Any] = first.run

    def run_both(*args: Any) -> Any:
        rows = run_first(*args)
        assert second.run(*args) is None
        assert not sent
        return rows

    first.run = run_both  # type: ignore[method-assign]
    requests = decoders([{"temperature": 1.0, "frequency_penalty": 1.0}, {}, {"temperature": 0.0}])
    decode(first, requests, NUM_TOKENS, ragged)
    assert drafters[0].calls == drafters[1].calls
    assert len(drafters[0].blocks) > 5
    for ours, theirs in zip(drafters[0].blocks, drafters[1].blocks, strict=True):
        assert ours.runs == theirs.runs
        for one, other in zip(ours[:3], theirs[:3], strict=True):
            assert torch.equal(one, other)
    assert second._table is None


def test_time_in_the_head_and_the_drafter_is_counted() -> None:
    last_stage: LastStage = make_last_stage(speculation(), FakeDrafter(0.3))
    decode(last_stage, decoders([{}]), 3, all_drafts)
    assert last_stage.head_seconds > 0.0


def test_log_probabilities_of_an_accepted_draft_are_the_targets() -> None:
    [request] = run([{"temperature": 0.0, "logprobs": 1}], all_drafts, error=0.2)
    for place, entry in enumerate(request.logprobs):
        prefix = (*request.prompt, *request.token_ids[:place])
        expected_V = target_logits(prefix).log_softmax(-1)
        best = int(expected_V.argmax())
        assert entry == TokenLogprobs(best, entry.logprob, 1, (best,), (entry.logprob,))
        assert entry.logprob == pytest.approx(expected_V[best].item(), abs=1e-12)
