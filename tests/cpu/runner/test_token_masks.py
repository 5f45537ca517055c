"""Masks on the device: each bit where it belongs, and choices among what is left alone."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.request import SamplingParams
from stagecoach.runner.accept import AcceptanceRule, Rejection, SharedNoise
from stagecoach.runner.sampler import choose_tokens
from stagecoach.runner.step_inputs import build_sample_inputs
from stagecoach.runner.token_masks import constrained_rows, mask_logits, unpack_masks
from stagecoach.schedule.step_plan import Segment, StepPlan, pack_page_table
from tests.cpu.runner.sampling import chi_square, exact_probabilities, make_table

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu


def pack(allowed: list[set[int]], vocab_size: int) -> bytes:
    """One row of int32 words for each set of tokens."""
    num_bytes = 4 * -(-vocab_size // 32)
    return b"".join(
        sum(1 << token for token in tokens).to_bytes(num_bytes, "little") for tokens in allowed
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 100), st.data())
def test_every_bit_is_its_token(vocab_size: int, data: st.DataObject) -> None:
    """Whatever the vocabulary: bits behind its end are nobody's."""
    allowed = data.draw(st.lists(st.sets(st.integers(0, vocab_size - 1)), min_size=1, max_size=5))
    masks = pack([{*tokens, 32 * -(-vocab_size // 32) - 1} for tokens in allowed], vocab_size)
    if vocab_size % 32 == 0:
        masks = pack(allowed, vocab_size)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    biases_CV = unpack_masks(masks, len(allowed), torch.empty(1, vocab_size, dtype=dtype))
    assert (biases_CV.dtype, biases_CV.shape) == (dtype, (len(allowed), vocab_size))
    assert set(biases_CV.unique().tolist()) <= {0.0, -torch.inf}
    is_allowed_CV = biases_CV == 0
    assert [set(row.nonzero().squeeze(-1).tolist()) for row in is_allowed_CV] == allowed


@pytest.mark.parametrize("size", [0, 7, 16, 63])
def test_masks_that_are_too_short_are_ours(size: int) -> None:
    with pytest.raises(AssertionError, match="bytes of masks for 2 rows of 300 tokens"):
        unpack_masks(bytes(size), 2, torch.empty(1, 300))


def window(row: int, start: int, token_ids: list[int], **fields: Any) -> Segment:
    return Segment(
        request_id=row,
        epoch=0,
        start=start,
        token_ids=tuple(token_ids),
        num_draft_tokens=len(token_ids) - 1,
        read_slot=1 + row,
        write_slot=1 + row,
        page_table=pack_page_table([1 + row]),
        sampling_row=row,
        **fields,
    )


def test_masks_belong_to_the_rows_of_constrained_segments_in_the_plans_order() -> None:
    chunk = Segment(
        request_id=9,
        epoch=0,
        start=4,
        token_ids=(1, 2),
        read_slot=9,
        write_slot=9,
        page_table=pack_page_table([1]),
        sampling_row=9,
        is_constrained=True,
    )
    plan = StepPlan(
        step=0,
        segments=(
            window(0, 3, [5, 1, 2]),
            window(1, 4, [5, 1], is_constrained=True),
            window(2, 5, [5], is_constrained=True),
            window(3, 6, [5]),
            chunk,
        ),
    )
    inputs = build_sample_inputs(plan)
    rows = constrained_rows(plan, inputs)
    assert rows == [3, 4, 5, 7]
    logits_RV = torch.randn(8, 40, dtype=torch.float64)
    allowed = [{1}, {2, 39}, {0, 31, 32}, set(range(40))]
    before_RV = logits_RV.clone()
    masked_RV = mask_logits(logits_RV, rows, pack(allowed, 40))
    assert torch.equal(logits_RV, before_RV)
    for row in range(8):
        kept = allowed[rows.index(row)] if row in rows else set(range(40))
        cut = sorted(set(range(40)) - kept)
        assert torch.equal(masked_RV[row, sorted(kept)], logits_RV[row, sorted(kept)])
        assert (masked_RV[row, cut] == -torch.inf).all()
    everything = mask_logits(logits_RV[rows], [0, 1, 2, 3], pack(allowed, 40))
    assert torch.equal(everything, masked_RV[rows])


EVERY_PARAMETER: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "logit_bias": {3: 5.0}},
    {},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.3, "temperature": 0.4},
    {"presence_penalty": 2.0, "frequency_penalty": -1.0, "repetition_penalty": 0.3},
    {"logit_bias": {0: -100.0, 1: 100.0}, "top_k": 2, "top_p": 0.5},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("values", EVERY_PARAMETER, ids=str)
def test_what_is_chosen_is_allowed_under_every_parameter(
    values: dict[str, Any], dtype: torch.dtype
) -> None:
    """Also where the best logits by far are forbidden, and where one token is all there is."""
    vocab_size, num_rows, random = 50, 60, Random(1)
    table = make_table(vocab_size, [values] * num_rows, prompt=(0, 1, 3))
    logits_RV = 3.0 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1))
    allowed = [set(random.sample(range(vocab_size), 1 + row % 5)) for row in range(num_rows)]
    for row, tokens in enumerate(allowed):
        logits_RV[row, [token for token in range(vocab_size) if token not in tokens]] += 40.0
    masked_RV = mask_logits(logits_RV.to(dtype), list(range(num_rows)), pack(allowed, vocab_size))
    chosen = choose_tokens(masked_RV, list(range(num_rows)), torch.arange(5, 5 + num_rows), table)
    assert all(token in allowed[row] for row, token in enumerate(chosen.tolist()))


# Distributions, over a Markov chain of six tokens of which a grammar allows some behind each.

VOCAB_SIZE = 6
NUM_REQUESTS = 4000
PROMPT = (0, 1)
ANCHOR = PROMPT[-1]
_GENERATOR = torch.Generator().manual_seed(7)
TARGET_VV = 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=_GENERATOR)
DRAFT_VV = 0.6 * TARGET_VV + 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=_GENERATOR)
ALLOWED = {0: {1, 2}, 1: {0, 2, 3}, 2: {1, 3, 4, 5}, 3: {0, 4}, 4: {0, 1, 2, 3, 4}, 5: {2}}

Cut = Callable[[list[int]], int]


def useful(drafts: list[int]) -> int:
    """Up to and with the first that is not allowed: the rule of Constraint.num_useful_drafts."""
    before = ANCHOR
    for count, draft in enumerate(drafts, start=1):
        if draft not in ALLOWED[before]:
            return count
        before = draft
    return len(drafts)


def up_to_the_first_bad(drafts: list[int]) -> int:
    """Without it: whether a row has a draft then depends on what the draft is."""
    count = useful(drafts)
    before = ([ANCHOR, *drafts])[count - 1]
    return count if drafts[count - 1] in ALLOWED[before] else count - 1


def masked(before: list[int]) -> Tensor:
    """The target's logits behind each token, with those of its grammar alone."""
    masks = pack([ALLOWED[token] for token in before], VOCAB_SIZE)
    return mask_logits(TARGET_VV[before], list(range(len(before))), masks)


def two_tokens(rule: AcceptanceRule, values: dict[str, Any], cut: Cut) -> Tensor:
    """Pairs of tokens of many requests that differ by their seed alone: int64 [R].

    A block is drafted behind the prompt, without a grammar, cut and verified; where its first
    draft falls, the second token is sampled without drafts.
    """
    table = make_table(VOCAB_SIZE, [values] * NUM_REQUESTS, prompt=PROMPT)
    rows, start = list(range(NUM_REQUESTS)), len(PROMPT) - 1
    choose = rule.draft_choice(rows, torch.full((NUM_REQUESTS,), start), table)
    drafts_NK = torch.empty(NUM_REQUESTS, 2, dtype=torch.int64)
    before_N = torch.full((NUM_REQUESTS,), ANCHOR)
    for place in range(2):
        drafts_NK[:, place] = choose(place, DRAFT_VV[before_N], drafts_NK[:, :place])
        before_N = drafts_NK[:, place]
    segments = [
        window(row, start, [ANCHOR, *drafts[: cut(drafts)]])
        for row, drafts in enumerate(drafts_NK.tolist())
    ]
    inputs = build_sample_inputs(StepPlan(step=0, segments=tuple(segments)))
    flat = [token for segment in segments for token in segment.token_ids]
    verdict = rule.verify(masked(flat), inputs, table)
    assert verdict.num_accepted_S is not None
    table.append(inputs.sampling_rows, verdict.token_ids_R, verdict.is_output(inputs))
    first_row_S = torch.tensor(inputs.first_rows)
    first_N = verdict.token_ids_R[first_row_S]
    # Of a row that has a second token; others get theirs below.
    last_row = len(verdict.token_ids_R) - 1
    second_N = verdict.token_ids_R[(first_row_S + 1).clamp_max(last_row)]
    short = (verdict.num_accepted_S == 0).nonzero().squeeze(-1).tolist()
    segments = [window(row, start + 1, [int(first_N[row])]) for row in short]
    inputs = build_sample_inputs(StepPlan(step=1, segments=tuple(segments)))
    second_N[short] = rule.verify(masked(first_N[short].tolist()), inputs, table).token_ids_R
    return first_N * VOCAB_SIZE + second_N


def strays(pairs_R: Tensor, values: dict[str, Any]) -> float:
    params = SamplingParams(**values)
    expected = []
    firsts = exact_probabilities(masked([ANCHOR])[0].tolist(), params, PROMPT, ())
    for first, first_p in enumerate(firsts):
        seconds = exact_probabilities(masked([first])[0].tolist(), params, PROMPT, (first,))
        expected += [first_p * second_p for second_p in seconds]
    return chi_square(pairs_R, expected)


@pytest.mark.parametrize("rule", [SharedNoise(2), Rejection(2)], ids=["shared", "rejection"])
@pytest.mark.parametrize(
    "values", [{}, {"temperature": 1.7, "top_k": 3}, {"presence_penalty": 1.5}], ids=str
)
def test_the_distribution_is_the_targets_among_what_is_allowed(
    rule: AcceptanceRule, values: dict[str, Any]
) -> None:
    assert strays(two_tokens(rule, values, useful), values) < 3.09


def test_taking_the_first_bad_draft_away_would_change_the_distribution() -> None:
    assert strays(two_tokens(Rejection(2), {}, up_to_the_first_bad), {}) > 6.0
