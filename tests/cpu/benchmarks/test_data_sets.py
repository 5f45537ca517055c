"""What is asked: lengths to the token, what is shared and what is not."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.benchmarks import data_sets
from stagecoach.benchmarks.vocabulary import WordVocabulary
from stagecoach.errors import ConfigError

_IDS = list(range(100, 400))


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(
    st.integers(1, 20), st.integers(1, 60), st.integers(1, 40),
    st.floats(0.0, 0.9), st.integers(0, 30), st.integers(0, 99),
)  # fmt: skip
def test_random_prompts_have_the_lengths_that_were_asked_for(
    number: int, input_len: int, output_len: int, ratio: float, prefix_len: int, seed: int
) -> None:
    if prefix_len + int(input_len * (1 - ratio)) < 1:
        return
    made = data_sets.random_requests(
        _IDS,
        _rng(seed),
        num_requests=number,
        input_len=input_len,
        output_len=output_len,
        range_ratio=ratio,
        prefix_len=prefix_len,
    )
    assert len(made) == number
    for [request] in made:
        prompt = request.prompt
        assert isinstance(prompt, list) and set(prompt) <= set(_IDS)
        assert request.num_prompt_tokens == len(prompt)
        assert prompt[:prefix_len] == made[0][0].prompt[:prefix_len]
        own = len(prompt) - prefix_len
        assert input_len * (1 - ratio) - 1 <= own <= input_len * (1 + ratio) + 1
        assert max(1, output_len * (1 - ratio) - 1) <= request.num_output_tokens
        assert request.num_output_tokens <= output_len * (1 + ratio) + 1
        if ratio == 0.0:
            assert (own, request.num_output_tokens) == (input_len, output_len)


def test_random_prompts_differ_and_a_seed_repeats_them() -> None:
    def made(seed: int) -> list[data_sets.Conversation]:
        return data_sets.random_requests(
            _IDS, _rng(seed), num_requests=50, input_len=8, output_len=1
        )

    assert len({tuple(request.prompt) for [request] in made(1)}) == 50
    assert made(1) == made(1) != made(2)


def test_prefixes_are_used_equally_often_and_in_no_order() -> None:
    made = data_sets.prefix_repetition_requests(
        _IDS, _rng(), num_requests=40, num_prefixes=4, prefix_len=16, suffix_len=5, output_len=3
    )
    prefixes = [tuple(request.prompt[:16]) for [request] in made]
    assert sorted(Counter(prefixes).values()) == [10] * 4
    assert prefixes != sorted(prefixes)
    assert {request.num_prompt_tokens for [request] in made} == {21}
    assert len({tuple(request.prompt[16:]) for [request] in made}) == 40


def test_conversations_have_so_many_messages_in_all() -> None:
    made = data_sets.multi_turn_conversations(
        _IDS, _rng(), num_requests=10, num_turns=4, input_len=6, output_len=2, prefix_len=3
    )
    assert [len(conversation) for conversation in made] == [4, 4, 2]
    assert [request.num_prompt_tokens for request in made[0]] == [9, 6, 6, 6]
    assert len({tuple(conversation[0].prompt[:3]) for conversation in made}) == 1


def _write(folder: Path, conversations: list[Any]) -> Path:
    path = folder / "conversations.json"
    path.write_text(json.dumps(conversations))
    return path


def _entry(*lengths: int) -> dict[str, Any]:
    """A conversation of texts with so many words; each text has words of its own."""
    texts = [" ".join(f"w{length}_{place}" for place in range(length)) for length in lengths]
    return {"conversations": [{"from": "x", "value": text} for text in texts]}


def test_share_gpt_takes_usable_lengths_and_starts_again_when_it_has_too_few(
    tmp_path: Path,
) -> None:
    usable = [_entry(5, 7), _entry(1024, 9), _entry(20, 2028, 3)]
    unusable = [
        _entry(3, 50), _entry(50, 3), _entry(1025, 9), _entry(21, 2028), _entry(9),
        {"conversations": [{"value": "a b c d e"}, {}]}, {}, 3,
    ]  # fmt: skip
    path = _write(tmp_path, usable + unusable)
    made = data_sets.share_gpt_requests(path, WordVocabulary(), _rng(), num_requests=7)
    lengths = [(request.num_prompt_tokens, request.num_output_tokens) for [request] in made]
    assert set(lengths) == {(5, 7), (1024, 9), (20, 2028)}
    assert lengths[:4] == lengths[3:]
    prompts = {entry["conversations"][0]["value"] for entry in usable}
    assert {request.prompt for [request] in made} == prompts
    made = data_sets.share_gpt_requests(
        path, WordVocabulary(), _rng(), num_requests=20, output_len=2
    )
    # A short answer does not matter where its length is given.
    assert {request.num_prompt_tokens for [request] in made} == {5, 1024, 20, 50, 21}
    assert {request.num_output_tokens for [request] in made} == {2}


def test_share_gpt_conversations_take_what_the_user_says(tmp_path: Path) -> None:
    path = _write(tmp_path, [_entry(4, 5, 6, 7, 8), _entry(9, 10)])
    made = data_sets.share_gpt_conversations(
        path, WordVocabulary(), _rng(), num_requests=7, num_turns=2, output_len=3
    )
    lengths = {tuple(item.num_prompt_tokens for item in conversation) for conversation in made}
    assert lengths <= {(4, 6), (9,), (4,)}
    assert {(4, 6), (9,)} <= lengths
    assert sum(map(len, made)) == 7


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "Expecting property name"),
        ("{}", "must hold a JSON list of conversations"),
        ("[]", "no entry has `conversations` with two texts"),
        ('[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "has a usable length"),
    ],
)
def test_a_file_that_is_not_usable_is_refused(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=text):
        data_sets.share_gpt_requests(path, WordVocabulary(), _rng(), num_requests=1)
    with pytest.raises(ConfigError, match=r"--dataset-path=.*No such file"):
        data_sets.share_gpt_requests(tmp_path / "no", WordVocabulary(), _rng(), num_requests=1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"input_len": 0}, "--random-input-len=0: with"),
        ({"input_len": -1}, "--random-input-len=-1: must be at least 0"),
        ({"output_len": 0}, "--random-output-len=0: must be at least 1"),
        ({"range_ratio": 1.0}, "--random-range-ratio=1.0: must be in"),
        ({"prefix_len": -1}, "--random-prefix-len=-1: must be at least 0"),
        ({"input_len": 1, "range_ratio": 0.5}, "a prompt may be empty"),
    ],
)
def test_random_lengths_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    defaults: dict[str, Any] = {"num_requests": 1, "input_len": 5, "output_len": 5}
    with pytest.raises(ConfigError, match=text):
        data_sets.random_requests(_IDS, _rng(), **(defaults | options))


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_prefixes", 0), ("prefix_len", 0), ("suffix_len", -1), ("output_len", 0)],
)
def test_prefix_options_out_of_range_are_refused(name: str, value: int) -> None:
    options = {"num_prefixes": 2, "prefix_len": 2, "suffix_len": 2, "output_len": 2, name: value}
    with pytest.raises(ConfigError, match=f"--prefix-repetition-{name.replace('_', '-')}={value}"):
        data_sets.prefix_repetition_requests(_IDS, _rng(), num_requests=2, **options)


def test_as_text_changes_the_prompts_alone() -> None:
    words = WordVocabulary()
    token_ids = words.encode("one two three")
    made = data_sets.random_requests(token_ids, _rng(), num_requests=2, input_len=4, output_len=3)
    for [before], [after] in zip(made, data_sets.as_text(made, words), strict=True):
        assert after.prompt == words.decode(before.prompt)
        assert (after.num_prompt_tokens, after.num_output_tokens) == (4, 3)
