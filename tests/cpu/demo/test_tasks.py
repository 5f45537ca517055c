"""The tasks: reproducible, split without overlap, rightly graded, and never too long."""

from dataclasses import replace
from pathlib import Path

import pytest

from stagecoach.demo.example import Example
from stagecoach.demo.tasks import ALL_FAMILIES, FAMILIES, generate, grade
from stagecoach.text.chat import parse_answer
from stagecoach.text.chat_format import answer_segments, encode_segment, render
from stagecoach.text.message_stream import ParsedMessage, ToolCall
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(__file__).parents[3] / "stagecoach" / "demo" / "checkpoint"
MAX_TOKENS = 4096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


def prompt_of(example: Example) -> str:
    return repr((example.messages, example.tools, example.response_format))


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_an_example_is_a_function_of_its_arguments(family: str) -> None:
    assert generate(family, 3, 5) == generate(family, 3, 5)
    assert len({prompt_of(generate(family, 3, index)) for index in range(20)}) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_no_held_out_prompt_is_ever_trained_on(family: str) -> None:
    train = {prompt_of(generate(family, seed, 0, "train")) for seed in range(400)}
    held_out = {prompt_of(generate(family, seed, 0, "held_out")) for seed in range(100)}
    assert not train & held_out
    # The prompt's hash decides, so the same prompt can never be drawn for the other split.
    for seed in range(20):
        assert generate(family, seed, 0, "train").split == "train"
        assert generate(family, seed, 0, "held_out").split == "held_out"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_expected_answer_is_right_after_a_round_trip(family: str, tokenizer: Tokenizer) -> None:
    for index in range(40):
        example = generate(family, 1, index)
        segments = answer_segments(example.answer_message, thinking=example.thinking)
        ids = [token for segment in segments for token in encode_segment(tokenizer, segment)]
        prompt = render(tokenizer, example.messages, thinking=example.thinking)
        parsed = parse_answer("kimi_k3", tokenizer, ids, prompt_token_ids=prompt)
        assert grade(example, parsed)
        assert parsed.reasoning == example.expected.reasoning
        assert ids[-1] in tokenizer.eos_token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_other_answers_are_wrong(family: str) -> None:
    example, other = generate(family, 1, 0), generate(family, 1, 1)
    assert example.expected != other.expected
    assert not grade(example, other.expected)
    assert not grade(example, ParsedMessage())


def test_values_count_and_spelling_of_json_does_not() -> None:
    example = generate("extraction", 0, 0)
    spaced = example.expected.content.replace(": ", ":  ")
    assert grade(example, replace(example.expected, content=spaced))
    assert not grade(example, replace(example.expected, content="{}"))
    assert not grade(example, replace(example.expected, content="no JSON"))


def test_arguments_must_have_their_types() -> None:
    example = generate("tool_calls", 0, 0)
    right = (ToolCall("set_timer", '{"minutes": 5}'),)
    example = replace(example, expected=ParsedMessage(tool_calls=right))
    assert grade(example, ParsedMessage(tool_calls=(ToolCall("set_timer", '{"minutes":5}'),)))
    for name, arguments in (("set_timer", '{"minutes": "5"}'), ("stop_timer", '{"minutes": 5}')):
        wrong = ParsedMessage(tool_calls=(ToolCall(name, arguments),))
        assert not grade(example, wrong)


def test_thinking_is_not_graded() -> None:
    example = generate("arithmetic", 0, 0)
    assert grade(example, replace(example.expected, reasoning="I just know."))


def test_retrieval_fills_the_context_and_never_more(tokenizer: Tokenizer) -> None:
    longest = 0
    for index in range(150):
        example = generate("retrieval", 2, index)
        prompt = render(tokenizer, example.messages)
        answer = answer_segments(example.answer_message)
        num_answer = sum(len(encode_segment(tokenizer, segment)) for segment in answer)
        longest = max(longest, len(prompt) + num_answer)
    assert 3_500 < longest <= MAX_TOKENS


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown task family"):
        generate("poetry", 0, 0)
