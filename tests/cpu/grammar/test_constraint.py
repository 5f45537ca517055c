"""A place in a grammar: what it says of drafts is what it says once they are committed."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.grammar.constraint import GrammarConstraint, MaskRows, fill_all
from stagecoach.request import StructuredOutputsParams
from tests.cpu.grammar.walks import (
    XTML,
    allowed_ids,
    compiler_of,
    mask_rows,
    small_tokenizer,
    walk,
)

TOKENIZER = small_tokenizer(XTML)
COMPILER = compiler_of(TOKENIZER)
ITEMS = {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
GRAMMARS = (
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {}, "b": ITEMS}}),
    StructuredOutputsParams(regex="(ab|abc){1,4}é?"),
    StructuredOutputsParams(choice=("true", "trueish", "tool")),
    StructuredOutputsParams(grammar='start: (/[a-c]*/ <|open|> %json {"type": "null"} <|close|>)*'),
    # By itself the library lets a negation be any special token, and a range any id.
    StructuredOutputsParams(grammar="start: NOT <|sep|> <[90-351]>\nNOT: ~/(?s:.*)[b-z](?s:.*)/"),
)
END = TOKENIZER.eos_token_ids[0]


def constraint_of(params: StructuredOutputsParams = GRAMMARS[0]) -> GrammarConstraint:
    return COMPILER.compile(params)


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


grammars = st.sampled_from(GRAMMARS)
randoms = st.integers(0, 2**32).map(Random)


@settings(max_examples=60)
@given(grammars, randoms)
def test_masks_along_drafts_are_those_after_the_same_tokens(
    params: StructuredOutputsParams, random: Random
) -> None:
    output = walk(constraint_of(params), TOKENIZER, random)
    start = random.randrange(len(output) + 1)
    drafts = (*output[start : start + 7], END)[: random.randint(1, 8)]
    if random.random() < 0.5:
        place = random.randrange(len(drafts))
        drafts = (*drafts[:place], random.randrange(TOKENIZER.vocab_size), *drafts[place + 1 :])
    asked, walked = constraint_of(params), constraint_of(params)
    asked.advance(tuple(output[:start]))
    walked.advance(tuple(output[:start]))

    rows = mask_rows(asked, TOKENIZER, drafts)
    num_useful = asked.num_useful_drafts(drafts)
    for position, draft in enumerate(drafts):
        row = mask_rows(walked, TOKENIZER)[0]
        np.testing.assert_array_equal(rows[position], row)
        if not row[draft] or draft in TOKENIZER.eos_token_ids:
            # What a row behind it samples never counts.
            assert num_useful == position + 1
            assert rows[position + 1 :, : TOKENIZER.vocab_size].all()
            break
        walked.advance((draft,))
    else:
        assert num_useful == len(drafts)
        np.testing.assert_array_equal(rows[-1], mask_rows(walked, TOKENIZER)[0])

    # Asking left no trace.
    fresh = constraint_of(params)
    fresh.advance(tuple(output[:start]))
    np.testing.assert_array_equal(mask_rows(asked, TOKENIZER), mask_rows(fresh, TOKENIZER))
    asked.advance((*output[start:], END))
    assert asked.error is None and asked.is_finished


@settings(max_examples=40)
@given(grammars, randoms)
def test_what_is_allowed_is_accepted_and_nothing_else(
    params: StructuredOutputsParams, random: Random
) -> None:
    output = walk(constraint_of(params), TOKENIZER, random)
    prefix = tuple(output[: random.randrange(len(output) + 1)])
    at_prefix = constraint_of(params)
    at_prefix.advance(prefix)
    row = mask_rows(at_prefix, TOKENIZER)[0]
    allowed, refused = np.flatnonzero(row), np.flatnonzero(~row[: TOKENIZER.vocab_size])
    for token_id in [random.choice(allowed), *random.sample(list(refused), 3)]:
        constraint = constraint_of(params)
        constraint.advance(prefix)
        constraint.advance((int(token_id),))
        assert (constraint.error is None) == row[token_id]


@pytest.mark.parametrize("few_rows", [0, 99])
def test_masks_of_a_plan_are_those_of_its_requests(
    few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows are made by the thread that asks."""
    monkeypatch.setattr("stagecoach.grammar.constraint._FEW_ROWS", few_rows)
    windows: list[MaskRows] = []
    expected = []
    for number, params in enumerate(GRAMMARS):
        constraint = constraint_of(params)
        # Some without drafts, at the front and in the middle.
        drafts = tuple(walk(constraint_of(params), TOKENIZER, Random(number)))[: number % 3]
        # One row between two requests belongs to nobody.
        windows.append(MaskRows(constraint, drafts, first_row=len(expected)))
        expected += [*mask_rows(constraint, TOKENIZER, drafts), np.True_]
    num_bits = len(expected[0])
    words_RW = np.zeros((len(expected), -(-num_bits // 32)), dtype=np.int32)
    fill_all(windows, memoryview(words_RW))
    bits = np.unpackbits(words_RW.view(np.uint8), axis=1, bitorder="little")[:, :num_bits]
    for row, wanted in zip(bits, expected, strict=True):
        np.testing.assert_array_equal(row, np.broadcast_to(wanted, row.shape))


def test_a_text_is_finished_by_its_end_alone() -> None:
    constraint = constraint_of(StructuredOutputsParams(choice=("true", "tool")))
    constraint.advance(ids("true"))
    assert not constraint.is_finished
    assert allowed_ids(constraint, TOKENIZER) == sorted(TOKENIZER.eos_token_ids)
    assert constraint.num_useful_drafts((END, *ids("true"))) == 1
    constraint.advance((END, *ids("true")))
    assert constraint.is_finished and constraint.error is None


def test_a_grammar_may_name_the_end_token_itself() -> None:
    constraint = constraint_of(StructuredOutputsParams(grammar=f'start: "ab" <[{END}]> | "c"'))
    drafts = (*ids("ab"), END, *ids("c"))
    assert constraint.num_useful_drafts(drafts) == len(drafts) - 1
    assert mask_rows(constraint, TOKENIZER, drafts)[1].nonzero()[0].tolist() == [END]
    constraint.advance(drafts)
    assert constraint.is_finished and constraint.error is None


@pytest.mark.parametrize("tokens", [ids("x"), (END,), (TOKENIZER.special_id("<|open|>"),)])
def test_what_was_not_allowed_is_told_and_ends_nothing_else(tokens: tuple[int, ...]) -> None:
    constraint = constraint_of()
    constraint.advance((*ids('{"a":'), *tokens))
    assert constraint.error is not None and str(tokens[0]) in constraint.error
    other = constraint_of()
    other.advance(ids("{}"))
    assert other.error is None


def test_a_limit_that_is_reached_later_is_told() -> None:
    # More ways to go on than the parser follows, but only behind the first brace.
    many = {f"p{number}": {"type": "string"} for number in range(1000)}
    constraint = constraint_of(StructuredOutputsParams(json={"type": "object", "properties": many}))
    assert allowed_ids(constraint, TOKENIZER)
    constraint.advance(ids("{"))
    rows = mask_rows(constraint, TOKENIZER)
    assert constraint.error is not None and "\n" not in constraint.error
    assert set(np.flatnonzero(rows[0])) == set(TOKENIZER.eos_token_ids)


@pytest.mark.parametrize("rule", ["max_tokens=2", 'stop="q"', 'suffix="[", max_tokens=2'])
def test_what_cannot_be_taken_back_is_never_tried(rule: str) -> None:
    """A rule that counts its tokens goes on without drafts, and as the rule says."""
    grammar = f'start: a "z"\na[{rule}]: /[a-y]*/'
    constraint = constraint_of(StructuredOutputsParams(grammar=grammar))
    for text in ("a", "b"):
        assert constraint.num_useful_drafts(ids("ccc")) == 0
        assert set(ids(text)) <= set(allowed_ids(constraint, TOKENIZER))
        constraint.advance(ids(text))
    if "max_tokens" in rule:
        assert set(allowed_ids(constraint, TOKENIZER)) == set(ids("z"))
    assert constraint.error is None
