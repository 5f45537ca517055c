"""Whether answers obey: a text that is wrong is found, in the middle and at its end."""

from pathlib import Path

import pytest

from stagecoach.config.engine import EngineConfig, ResolvedConfig
from stagecoach.fuzz.draw import Given, draw_script
from stagecoach.fuzz.grammars import WANTED, Obedience, has_vocabulary
from stagecoach.fuzz.oracle import Answer, Expected
from stagecoach.request import FinishReason, SamplingParams, StructuredOutputsParams
from stagecoach.resolve import resolve
from tests.cpu.engine.fakes import resolved

DIGITS, WORD, CHOICE, SCHEMA, NESTED = WANTED
END = 258


@pytest.fixture(scope="module")
def config(model: str) -> ResolvedConfig:
    return resolve(EngineConfig(model=model))


@pytest.fixture(scope="module")
def obedience() -> Obedience:
    return Obedience()


def finding_kind(
    obedience: Obedience, config: ResolvedConfig, wanted: StructuredOutputsParams, text: str
) -> str | None:
    """A text that ends with `$` has ended."""
    is_whole = text.endswith("$")
    token_ids = (*text.removesuffix("$").encode(), *([END] if is_whole else []))
    answer = Answer(token_ids, finish_reason=FinishReason.STOP if is_whole else None)
    expected = Expected((1,), SamplingParams(structured_outputs=wanted), answer)
    found = obedience.check(config, [expected], [answer])
    return found and found.kind


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (DIGITS, "12,3$"),
        (DIGITS, "12,"),
        (WORD, "abc!$"),
        (CHOICE, "perhaps$"),
        (CHOICE, ""),
        (SCHEMA, '{"a":22}$'),
        (NESTED, "((1)1)$"),
        (NESTED, "((1)"),
    ],
)
def test_what_obeys(
    obedience: Obedience, config: ResolvedConfig, wanted: StructuredOutputsParams, text: str
) -> None:
    assert finding_kind(obedience, config, wanted, text) is None


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (DIGITS, "0"),
        (DIGITS, "12,$"),
        (WORD, "abx"),
        (WORD, "a!$"),
        (CHOICE, "no way$"),
        (SCHEMA, '{"a":2}$'),
        (SCHEMA, '{"a":22}}'),
        (NESTED, "(1))"),
        (NESTED, "((1)$"),
    ],
)
def test_what_does_not(
    obedience: Obedience, config: ResolvedConfig, wanted: StructuredOutputsParams, text: str
) -> None:
    assert finding_kind(obedience, config, wanted, text) == "grammar"


def test_requests_without_a_grammar_may_say_anything(
    obedience: Obedience, config: ResolvedConfig
) -> None:
    answer = Answer((1, 2, 3))
    assert obedience.check(config, [Expected((1,), SamplingParams(), answer)], [answer]) is None


def test_grammars_are_drawn_where_there_is_a_vocabulary(
    given: Given, config: ResolvedConfig, tmp_path: Path
) -> None:
    assert has_vocabulary(config) and not has_vocabulary(resolved(checkpoint=tmp_path))
    drawn = {
        has: [
            ask.params.structured_outputs
            for index in range(60)
            for ask in draw_script(4, index, given._replace(has_vocabulary=has)).requests
        ]
        for has in (False, True)
    }
    assert set(drawn[False]) == {None}
    assert {wanted and str(wanted) for wanted in drawn[True]} == {None, *map(str, WANTED)}
