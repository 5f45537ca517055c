"""Ranges of ids, and negations: a token is allowed only if it exists and the grammar takes it."""

import numpy as np
import pytest

from stagecoach.request import StructuredOutputsParams
from tests.cpu.grammar.walks import XTML, allowed_ids, compiler_of, mask_rows, small_tokenizer

TOKENIZER = small_tokenizer(XTML)
COMPILER = compiler_of(TOKENIZER)
OPEN, CLOSE = TOKENIZER.special_id("<|open|>"), TOKENIZER.special_id("<|close|>")
ENDS = set(TOKENIZER.eos_token_ids)
SPECIAL = {TOKENIZER.special_id(name) for name in XTML}


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


@pytest.mark.parametrize(
    ("grammar", "text", "special"),
    [
        ("start: NOT\nNOT: ~/abc/", "ab", ENDS),
        ("start: NOT\nNOT: ~/abc/", "abc", set()),
        ("start: NOT <|open|>\nNOT: ~/(?s:.*)x/", "ab", {OPEN}),
        ("start: WORD <|open|> NOT\nWORD: /[a-c]*/\nNOT: ~/x/", "ab", {OPEN}),
        ("start: %lark {\nstart: NOT\nNOT: ~/x/\n} | <|close|>", "", {*ENDS, CLOSE}),
        ("start: <[*]>", "", SPECIAL),
        (f"start: <[^{OPEN}]>", "", SPECIAL - {OPEN}),
        (f'start: "a" <[{OPEN}-{CLOSE}]>', "a", {OPEN, CLOSE}),
        (f'start: "a" | <[{TOKENIZER.vocab_size}]>', "", set()),
        (f'start: "a" <[{TOKENIZER.vocab_size}-{TOKENIZER.vocab_size + 9}]>?', "a", ENDS),
    ],
)
def test_no_token_that_the_grammar_does_not_take(
    grammar: str, text: str, special: set[int]
) -> None:
    params = StructuredOutputsParams(grammar=grammar)
    constraint = COMPILER.compile(params)
    # Along drafts as behind tokens that are committed.
    last = mask_rows(constraint, TOKENIZER, ids(text))[-1]
    constraint.advance(ids(text))
    allowed = allowed_ids(constraint, TOKENIZER)
    assert np.flatnonzero(last).tolist() == allowed
    assert max(allowed) < TOKENIZER.vocab_size
    assert set(allowed) & SPECIAL == special
    for token_id in allowed:
        taken = COMPILER.compile(params)
        taken.advance((*ids(text), token_id))
        assert taken.error is None, token_id


def test_where_no_token_exists_the_text_ends_with_an_error() -> None:
    no_token = StructuredOutputsParams(grammar=f'start: "a" <[{TOKENIZER.vocab_size}]>')
    constraint = COMPILER.compile(no_token)
    constraint.advance(ids("a"))
    assert set(allowed_ids(constraint, TOKENIZER)) == ENDS
    constraint.advance((min(ENDS),))
    assert constraint.error is not None
