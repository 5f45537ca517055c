"""Which drafts stand: exact distributions, and rules that would be wrong."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.kernels.sampling.noise import DRAFT_STREAM, TOKEN_STREAM, gumbel_noise
from stagecoach.request import SamplingParams
from stagecoach.runner import accept
from stagecoach.runner.accept import (
    AcceptanceRule,
    Rejection,
    SharedNoise,
    SyntheticAcceptance,
    count_accepted,
    make_rule,
)
from stagecoach.runner.sampler import probabilities
from stagecoach.runner.sampling_table import SamplingTable
from stagecoach.runner.step_inputs import build_sample_inputs
from stagecoach.schedule.step_plan import SamplingEntry, Segment, StepPlan, pack_page_table
from stagecoach.schedule.verify_window import VerifyWindow
from tests.cpu.runner.sampling import STOP_ID, chi_square, exact_probabilities, make_table
from tests.cpu.runner.window_runs import (
    NUM_DRAFTS,
    Decoder,
    FakeDrafter,
    all_drafts,
    decode,
    decoders,
    make_last_stage,
    ragged,
    speculation,
    target_logits,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu


def window(
    row: int, start: int, anchor_id: int, drafts: list[int], request_id: int | None = None
) -> Segment:
    return Segment(
        request_id=row if request_id is None else request_id,
        epoch=0,
        start=start,
        token_ids=(anchor_id, *drafts),
        num_draft_tokens=len(drafts),
        read_slot=1 + row,
        write_slot=1 + row,
        page_table=pack_page_table([1 + row]),
        sampling_row=row,
    )


# The home of the rule


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4),
        min_size=1,
        max_size=6,
    )
)
def test_the_device_keeps_the_row_that_the_window_keeps(
    pairs: list[list[tuple[int, int]]],
) -> None:
    """Drafts beside samples, for windows of all lengths; one more sample behind each."""
    segments = [
        window(row, 5, 0, [draft for draft, _ in pairs_of_row])
        for row, pairs_of_row in enumerate(pairs)
    ]
    inputs = build_sample_inputs(StepPlan(step=0, segments=tuple(segments)))
    samples = [[sampled for _, sampled in pairs_of_row] + [1] for pairs_of_row in pairs]
    token_ids_R = torch.tensor([sampled for row in samples for sampled in row])
    lengths = [1] * len(pairs)
    if inputs.windows is not None:
        lengths = (1 + count_accepted(token_ids_R, inputs.windows)).tolist()
    for segment, sampled, length in zip(segments, samples, lengths, strict=True):
        assert tuple(sampled[:length]) == VerifyWindow.of(segment).row(sampled)


# Distributions, over a Markov chain of six tokens

VOCAB_SIZE = 6
NUM_REQUESTS = 4000
PROMPT = (0, 1)
ANCHOR = PROMPT[-1]
_GENERATOR = torch.Generator().manual_seed(7)
TARGET_VV = 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=_GENERATOR)
OTHER_VV = 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=_GENERATOR)


class Outcome(NamedTuple):
    first_R: Tensor  # first token of each request
    second_R: Tensor
    num_accepted_R: Tensor  # of the first window


def two_tokens(
    rule: AcceptanceRule, values: dict[str, Any], draft_VV: Tensor, num_drafts: int = 2
) -> Outcome:
    """Two tokens of many requests that differ by their seed alone.

    A block is drafted behind the prompt and verified; where its first draft falls, the second
    token is sampled without drafts.
    """
    table = make_table(VOCAB_SIZE, [values] * NUM_REQUESTS, prompt=PROMPT)
    rows = list(range(NUM_REQUESTS))
    start = len(PROMPT) - 1
    choose = rule.draft_choice(rows, torch.full((NUM_REQUESTS,), start), table)
    drafts_NK = torch.empty(NUM_REQUESTS, num_drafts, dtype=torch.int64)
    before_N = torch.full((NUM_REQUESTS,), ANCHOR)
    for place in range(num_drafts):
        drafts_NK[:, place] = choose(place, draft_VV[before_N], drafts_NK[:, :place])
        before_N = drafts_NK[:, place]

    segments = [window(row, start, ANCHOR, drafts) for row, drafts in enumerate(drafts_NK.tolist())]
    inputs = build_sample_inputs(StepPlan(step=0, segments=tuple(segments)))
    flat_ids = torch.tensor([segment.token_ids for segment in segments]).flatten()
    verdict = rule.verify(TARGET_VV[flat_ids], inputs, table)
    assert verdict.num_accepted_S is not None
    table.append(inputs.sampling_rows, verdict.token_ids_R, verdict.is_output(inputs))
    tokens_NW = verdict.token_ids_R.unflatten(0, (NUM_REQUESTS, 1 + num_drafts))
    first_N, second_N = tokens_NW[:, 0], tokens_NW[:, 1].clone()

    short = (verdict.num_accepted_S == 0).nonzero().squeeze(-1).tolist()
    segments = [window(row, start + 1, int(first_N[row]), []) for row in short]
    inputs = build_sample_inputs(StepPlan(step=1, segments=tuple(segments)))
    second_N[short] = rule.verify(TARGET_VV[first_N[short]], inputs, table).token_ids_R
    return Outcome(first_N, second_N, verdict.num_accepted_S)


def chain_probabilities(values: dict[str, Any]) -> list[float]:
    """Of every pair of tokens, from the slow reference."""
    params = SamplingParams(**values)
    pairs = []
    firsts = exact_probabilities(TARGET_VV[ANCHOR].tolist(), params, PROMPT, ())
    for first, first_p in enumerate(firsts):
        seconds = exact_probabilities(TARGET_VV[first].tolist(), params, PROMPT, (first,))
        pairs += [first_p * second_p for second_p in seconds]
    return pairs


def strays(outcome: Outcome, values: dict[str, Any]) -> float:
    pairs_R = outcome.first_R * VOCAB_SIZE + outcome.second_R
    return chi_square(pairs_R, chain_probabilities(values))


CHAIN_PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 4},
    {"top_p": 0.75},
    {"min_p": 0.2},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"repetition_penalty": 2.0, "top_p": 0.9},
    {"logit_bias": {2: 2.0, 4: -1.0}, "min_tokens": 1},
    {"min_tokens": 2, "top_k": 3},
]
DRAFTERS = {
    "perfect": TARGET_VV,
    "good": 0.7 * TARGET_VV + 0.3 * OTHER_VV,
    "unlike": OTHER_VV,
    "sure": 4.0 * OTHER_VV,
}


@pytest.mark.parametrize("drafter", ["good", "unlike"])
@pytest.mark.parametrize("values", CHAIN_PARAMS, ids=str)
def test_rejection_keeps_the_distribution(values: dict[str, Any], drafter: str) -> None:
    outcome = two_tokens(Rejection(2), values, DRAFTERS[drafter])
    assert strays(outcome, values) < 3.09
    assert 0 < int(outcome.num_accepted_R.sum()) < 2 * NUM_REQUESTS


@pytest.mark.parametrize("drafter", ["perfect", "sure"])
def test_rejection_keeps_the_distribution_at_its_ends(drafter: str) -> None:
    outcome = two_tokens(Rejection(2), {}, DRAFTERS[drafter])
    assert strays(outcome, {}) < 3.09
    if drafter == "perfect":
        assert (outcome.num_accepted_R == 2).all()


def test_rejection_keeps_the_distribution_when_the_drafter_overflows() -> None:
    """NaN may make drafts useless, never what is sampled."""
    outcome = two_tokens(Rejection(2), {}, torch.full_like(TARGET_VV, torch.nan))
    assert strays(outcome, {}) < 3.09


def judge_without_ratio(
    target_p_DV: Tensor, draft_p_DV: Tensor, draft_ids_D: Tensor, *noise: Tensor
) -> Tensor:
    """Accepts with the target's probability of the draft, as if it were drawn greedily."""
    certain_DV = torch.zeros_like(draft_p_DV).scatter_(-1, draft_ids_D.unsqueeze(-1), 1.0)
    ids_D = accept_judge(target_p_DV, certain_DV, draft_ids_D, *noise)
    return torch.where(ids_D == draft_ids_D, ids_D, rest(target_p_DV, draft_p_DV, *noise))


def judge_without_residual(
    target_p_DV: Tensor, draft_p_DV: Tensor, draft_ids_D: Tensor, *noise: Tensor
) -> Tensor:
    """Resamples from the target's distribution."""
    ids_D = accept_judge(target_p_DV, draft_p_DV, draft_ids_D, *noise)
    again_D = rest(target_p_DV, torch.zeros_like(draft_p_DV), *noise)
    return torch.where(ids_D == draft_ids_D, ids_D, again_D)


accept_judge = accept.judge_drafts


def rest(target_p_DV: Tensor, draft_p_DV: Tensor, seeds_D: Tensor, positions_D: Tensor) -> Tensor:
    noise_DV = gumbel_noise(seeds_D, positions_D, VOCAB_SIZE, "cpu", TOKEN_STREAM)
    return (noise_DV + (target_p_DV - draft_p_DV).clamp_min(0).log()).argmax(-1)


@pytest.mark.parametrize("judge", [judge_without_ratio, judge_without_residual])
def test_a_wrong_rule_is_found_out(
    judge: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "judge_drafts", judge)
    assert strays(two_tokens(Rejection(2), {}, DRAFTERS["unlike"]), {}) > 6.0


def test_one_noise_for_two_draws_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "ACCEPT_STREAM", DRAFT_STREAM)
    assert strays(two_tokens(Rejection(2), {}, DRAFTERS["unlike"]), {}) > 6.0


def test_a_draft_of_unknown_origin_is_judged_without_bias() -> None:
    """As after a forgotten proposal: whatever it is, the token is the target's."""

    class Forgetful(Rejection):
        def draft_choice(self, *args: Any) -> Any:
            return Rejection(2).draft_choice(*args)

    outcome = two_tokens(Forgetful(2), {}, DRAFTERS["good"])
    assert strays(outcome, {}) < 3.09


@pytest.mark.parametrize("drafter", ["good", "unlike", "sure"])
@pytest.mark.parametrize("values", [{}, {"temperature": 0.5}, {"top_k": 3}], ids=str)
def test_how_many_drafts_stand(values: dict[str, Any], drafter: str) -> None:
    """Rejection: the overlap of the distributions, the most that any rule can reach. Shared
    noise: less than that, but more than independent noise and no less than the bound of
    Daliri et al. ("Coupling without communication", 2025)."""
    params = SamplingParams(**values)
    target, draft = (
        torch.tensor(exact_probabilities(matrix_VV[ANCHOR].tolist(), params, PROMPT, ()))
        for matrix_VV in (TARGET_VV, DRAFTERS[drafter])
    )
    overlap = torch.minimum(target, draft).sum().item()
    independent = (target * draft).sum().item()
    rates = [
        (two_tokens(rule, values, DRAFTERS[drafter]).num_accepted_R > 0).double().mean().item()
        for rule in (SharedNoise(2), Rejection(2))
    ]
    noise = 4.0 * math.sqrt(0.25 / NUM_REQUESTS)
    assert abs(rates[1] - overlap) < noise
    assert rates[0] < overlap + noise
    assert rates[0] > overlap / (2.0 - overlap) - noise
    assert rates[0] > independent + noise


def test_shared_noise_keeps_the_distribution_too() -> None:
    assert strays(two_tokens(SharedNoise(2), {}, DRAFTERS["unlike"]), {}) < 3.09


def test_the_ratio_uses_what_the_draft_was_drawn_from() -> None:
    """In the drafter's own precision, cut by the request's parameters, in its row."""
    params: list[dict[str, Any]] = [{"top_k": 2}, {"temperature": 0.0}, {"temperature": 0.3}]
    table = make_table(VOCAB_SIZE, params)
    rule = Rejection(2)
    rows, starts_N = [2, 0], torch.tensor([4, 9])
    logits_NV = OTHER_VV[:2].to(torch.bfloat16)
    choose = rule.draft_choice(rows, starts_N, table)
    ids_N = choose(0, logits_NV, torch.empty(2, 0, dtype=torch.int64))
    p_NV = probabilities(logits_NV, rows, starts_N + 1, table)
    noise_NV = gumbel_noise(table.seeds_N[rows], starts_N + 1, VOCAB_SIZE, "cpu", DRAFT_STREAM)
    assert torch.equal(ids_N, (p_NV.log() + noise_NV).argmax(-1))
    assert set(rule._drafts_p) == {0, 2}
    for index, row in enumerate(rows):
        assert torch.equal(rule._drafts_p[row][0], p_NV[index])
    assert int((p_NV[1] > 0).sum()) == 2


def test_what_a_draft_was_drawn_from_is_forgotten_with_the_next_segment_of_its_row() -> None:
    table = make_table(VOCAB_SIZE, [{}, {}])
    rule = Rejection(2)
    rule.draft_choice([0, 1], torch.tensor([4, 4]), table)
    plan = StepPlan(step=0, segments=(window(1, 5, 0, []),))
    rule.verify(OTHER_VV[:1], build_sample_inputs(plan), table)
    assert set(rule._drafts_p) == {0}


def test_with_rejection_neighbours_change_nothing() -> None:
    params: list[dict[str, Any]] = [{}, {"temperature": 0.6, "top_p": 0.9}, {"logprobs": 2}]
    together = decoders(params)
    decode(make_last_stage(speculation("rejection"), FakeDrafter(0.3)), together, 12, all_drafts)
    for number, other in enumerate(together):
        alone = decoders(params)[number : number + 1]
        decode(make_last_stage(speculation("rejection"), FakeDrafter(0.3)), alone, 12, all_drafts)
        assert alone[0].token_ids == other.token_ids
        assert alone[0].logprobs == other.logprobs


def test_rejection_needs_no_drafts_to_be_plain_decoding() -> None:
    params: list[dict[str, Any]] = [{}, {"temperature": 0.6, "top_p": 0.9}]

    def no_windows(step: int, decoder: Decoder) -> tuple[int, int, bool]:
        return 3, 0, True

    runs = [decoders(params) for _ in range(2)]
    decode(make_last_stage(speculation("rejection"), FakeDrafter(0.3)), runs[0], 12, no_windows)
    decode(make_last_stage(None, None), runs[1], 12, all_drafts)
    for ours, theirs in zip(*runs, strict=True):
        assert ours.token_ids == theirs.token_ids


def test_noise_of_a_block_is_not_made_again_to_verify_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per block pass, and for the prompts' tokens."""
    num_calls = 0

    def count(*args: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return gumbel_noise(*args)

    monkeypatch.setattr("stagecoach.runner.accept.gumbel_noise", count)
    monkeypatch.setattr("stagecoach.runner.sampler.gumbel_noise", count)
    drafter = FakeDrafter(0.3)
    params = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7}]
    decode(make_last_stage(speculation(), drafter), decoders(params), 12, all_drafts)
    assert num_calls == drafter.calls.count("propose") + 1


def test_noise_of_another_seed_or_place_is_never_used() -> None:
    """A row changes hands, or its request goes on elsewhere than behind its block.

    Ids of requests say nothing: the scratch plans at the start have ids of their own.
    """
    rule = SharedNoise(2)
    logits_RV = torch.zeros(1, VOCAB_SIZE)
    for start, seed in [(6, 0), (5, 1), (5, 0)]:
        table = make_table(VOCAB_SIZE, [{}], seeds=[seed])
        plan = StepPlan(step=0, segments=(window(0, start, 0, []),))
        inputs = build_sample_inputs(plan)
        expected = SharedNoise(0).verify(logits_RV, inputs, table)
        rule.draft_choice([0], torch.tensor([5]), make_table(VOCAB_SIZE, [{}]))
        assert (rule._take_noise(inputs, table) is not None) == ((start, seed) == (5, 0))
        rule.draft_choice([0], torch.tensor([5]), make_table(VOCAB_SIZE, [{}]))
        assert torch.equal(rule.verify(logits_RV, inputs, table).token_ids_R, expected.token_ids_R)


@pytest.mark.parametrize(
    "rule", [SharedNoise(2), Rejection(2)], ids=lambda rule: type(rule).__name__
)
def test_what_is_kept_of_a_row_holds_no_memory_of_its_neighbours(
    rule: SharedNoise | Rejection,
) -> None:
    """A row whose request has ended keeps its part until the row has a new tenant."""
    table = make_table(VOCAB_SIZE, [{}] * 4)
    choose = rule.draft_choice(range(4), torch.full((4,), 5), table)
    choose(0, TARGET_VV[:4], torch.empty(4, 0, dtype=torch.int64))
    if isinstance(rule, SharedNoise):
        kept = [item.noise_KV for item in rule._kept.values()]
    else:
        kept = [p_V for parts in rule._drafts_p.values() for p_V in parts]
    assert len(kept) == 4
    for part in kept:
        assert part.untyped_storage().nbytes() == part.nbytes


# Synthetic acceptance


@pytest.mark.parametrize("length", [1.0, 1.3, 2.5, 3.7, 4.9, 5.0])
@pytest.mark.parametrize("error", [0.0, 1.0])
def test_synthetic_rows_have_the_asked_length_and_vary_least(length: float, error: float) -> None:
    requests = decoders([{"temperature": 0.0}, {"temperature": 1.0}])
    drafter = FakeDrafter(error)
    decode(make_last_stage(speculation(synthetic=length), drafter), requests, 60, all_drafts)
    for request in requests:
        lengths = [tokens for drafts, tokens in request.rows if drafts]
        assert set(lengths) <= {math.floor(length), math.ceil(length)}
        for count in range(1, len(lengths) + 1):
            exact = count * (length - 1.0)
            assert abs(sum(lengths[:count]) - count - exact) < 1.0
        assert sum(lengths[:10]) == round(10 * length)


def test_a_synthetic_row_ends_with_the_targets_choice() -> None:
    [request] = decoders([{"temperature": 0.0}])
    decode(make_last_stage(speculation(synthetic=3.0), FakeDrafter(1.0)), [request], 30, all_drafts)
    place = 0
    is_drafted = []
    for _, num_tokens in request.rows:
        for count in range(1, num_tokens + 1):
            best = int(target_logits((*request.prompt, *request.token_ids[:place])).argmax())
            if count == num_tokens:
                assert request.token_ids[place] == best
            else:
                is_drafted.append(request.token_ids[place] != best)
            place += 1
    assert any(is_drafted)


def test_a_synthetic_window_accepts_no_more_than_it_has() -> None:
    requests = decoders([{}, {"temperature": 0.0}])
    last_stage = make_last_stage(speculation(synthetic=4.0), FakeDrafter(0.5))
    decode(last_stage, requests, 40, ragged)
    for request in requests:
        for num_drafts, num_tokens in request.rows:
            assert num_tokens == 1 + min(num_drafts, 3)


def test_a_new_tenant_of_a_row_begins_the_synthetic_schedule_anew() -> None:
    """Lengths of a request do not depend on who had its row."""
    rule = SyntheticAcceptance(1.75, NUM_DRAFTS)
    table = SamplingTable(1, VOCAB_SIZE, "cpu")

    def lengths(request_id: int) -> list[int]:
        params = SamplingParams(temperature=0.0)
        entry = SamplingEntry(
            row=0,
            request_id=request_id,
            params=params,
            seed=0,
            stop_token_ids=(STOP_ID,),
            num_prompt_tokens=2,
        )
        table.admit([entry])
        plan = StepPlan(step=0, segments=(window(0, 5, 0, [1, 2], request_id),))
        inputs = build_sample_inputs(plan)
        counts = []
        for _ in range(3):
            forced = rule.forced_accepts([0], [2], table)
            num_accepted_S = rule.verify(TARGET_VV[:3], inputs, table, forced).num_accepted_S
            assert num_accepted_S is not None
            counts += num_accepted_S.tolist()
        return counts

    assert lengths(1) == lengths(2) == [0, 1, 1]


# The choice among them


def test_the_options_name_the_rule() -> None:
    assert isinstance(make_rule(None), SharedNoise)
    assert isinstance(make_rule(speculation("shared")), SharedNoise)
    assert isinstance(make_rule(speculation("rejection")), Rejection)
    assert isinstance(make_rule(speculation(synthetic=2.0)), SyntheticAcceptance)
    with pytest.raises(AssertionError, match="unknown acceptance: other"):
        make_rule(speculation("other"))
