"""Scripts: their file form, and prompts written in pieces."""

from pathlib import Path

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from stagecoach.errors import ConfigError
from stagecoach.fuzz import script as scripts
from stagecoach.fuzz.draw import Given, draw_script
from stagecoach.fuzz.script import Ask, Script, family_tokens, prompt_token_ids
from stagecoach.request import SamplingParams


@for_all(seed=st.integers(0, 10**6), index=st.integers(0, 1000))
def test_a_script_is_read_back_from_its_file_unchanged(seed: int, index: int) -> None:
    given = Given("tiny", {}, ((1, 1), (2, 1), (2, 2)), "tiny-draft", 4096)
    script = draw_script(seed, index, given)
    assert scripts.decode(scripts.encode(script)) == script
    assert draw_script(seed, index, given) == script
    # As long as it has requests, and a line for each option.
    assert scripts.encode(script).count("\n") < 20 + len(script.requests) + len(script.engine)


def test_a_file_says_only_what_is_not_the_default() -> None:
    ask = Ask(prompt="a8 b2", params=SamplingParams(temperature=0.0), abort_after=3)
    text = scripts.encode(Script(model="tiny", engine={"block_size": 8}, requests=(ask,)))
    assert '{"prompt": "a8 b2", "params": {"temperature": 0.0}, "abort_after": 3}' in text
    assert '    "block_size": 8\n' in text
    for absent in ("salt", "resets", "turn", "draft_accuracy", "max_tokens"):
        assert absent not in text


def test_pieces_of_a_prompt() -> None:
    sequences = {0: (1, 2, 3)}
    tokens = prompt_token_ids("a3 @0 [7,8] z2", 500, sequences.__getitem__)
    assert tokens[3:8] == (1, 2, 3, 7, 8)
    assert tokens[:3] == family_tokens("a", 3, 500) == family_tokens("a", 9, 500)[:3]
    assert tokens[8] == tokens[9]


def test_families_are_different_texts_and_two_repeat_themselves() -> None:
    texts = {family: family_tokens(family, 64, 500) for family in "abcyz"}
    assert len(set(texts.values())) == 5
    assert len(set(texts["z"])) == 1
    assert texts["y"][:8] == texts["y"][8:16] and len(set(texts["y"])) == 8
    assert len(set(texts["a"])) > 32


@pytest.mark.parametrize("text", ["a", "A3", "@", "[1,2", "a3,b4", "3"])
def test_a_piece_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is no piece"):
        prompt_token_ids(text, 500, lambda _: ())


@pytest.mark.parametrize("ask", [Ask(prompt="@1"), Ask(prompt="a1", after=1), Ask(prompt="@0")])
def test_a_request_refers_to_earlier_ones_only(ask: Ask) -> None:
    with pytest.raises(ConfigError, match="no earlier request"):
        Script(model="tiny", requests=(ask,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a schedule"),
        ('{"model": "tiny"}', "missing required field `requests`"),
        ('{"model": "tiny", "requests": [{"prompt": "a1", "color": 1}]}', "unknown field `color`"),
    ],
)
def test_what_is_no_script_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        scripts.read(path)


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="speed"):
        Script(model="tiny", engine={"speed": 9}, requests=()).engine_config()
