"""Negations in a grammar: what is negated is found, and nothing else is touched."""

import time

import pytest

from stagecoach.text.lark_negation import negations_as_texts

TEXT = "/(?s:.*)/"


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ("A: ~B", f"A: (~B & {TEXT})"),
        ("A: ~B{1,3} C", f"A: (~B & {TEXT}){{1,3}} C"),
        ('A: "x" ~ "a".."c" | D', f'A: "x" (~ "a".."c" & {TEXT}) | D'),
        (r"A: ~/a~\/b/i+", rf"A: (~/a~\/b/i & {TEXT})+"),
        ('A: ~("(" | (~B)) ")"', f'A: (~("(" | ((~B & {TEXT}))) & {TEXT}) ")"'),
        ("A: ~~B", f"A: (~(~B & {TEXT}) & {TEXT})"),
        ("A: ~ // of (\n B", f"A: (~ // of (\n B & {TEXT})"),
        ('A: "~B" | "\\"~B" | /~B/ // ~B\n# ~B', None),
        ('start: %json {"enum": ["~B", "~\\"B"]}', None),
        # What cannot be read is told by who compiles it.
        ("A: ~", None),
        ("A: ~(B", None),
        ("A: ~) B", None),
        ('A: "~B', None),
    ],
)
def test_a_negation_is_of_texts(grammar: str, expected: str | None) -> None:
    assert negations_as_texts(grammar) == (grammar if expected is None else expected)


@pytest.mark.parametrize("part", ["~", "~(", '~\\"', "~/", "\\/", '"a" ..', '~"a\n', ' ~"a" '])
def test_any_text_is_read_in_a_time_that_grows_with_its_length(part: str) -> None:
    grammar = "~" + part * (300_000 // len(part))
    began = time.process_time()
    negations_as_texts(grammar)
    assert time.process_time() - began < 5
