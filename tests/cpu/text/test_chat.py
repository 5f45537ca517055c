"""The chat format of a model, by its type: rendered, parsed, and precise about what it lacks."""

from pathlib import Path
from typing import Any

import pytest

from stagecoach.errors import RequestError
from stagecoach.text import chat_format
from stagecoach.text.chat import make_parser, parse_answer, render_messages
from stagecoach.text.chat_template import ChatTemplate
from stagecoach.text.marker_parser import MarkerParser
from stagecoach.text.message_stream import ParsedMessage
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer
from stagecoach.text.xtml_parser import XtmlParser

DEMO = Path(__file__).parents[3] / "stagecoach" / "demo" / "checkpoint"
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{{ mood | default('') }}: {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture
def templated(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate(TEMPLATE))
    return tokenizer


def text_of(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    token_ids = render_messages("kimi_linear", tokenizer, messages, **options)
    return tokenizer.decode_bytes(token_ids).decode()


def test_k3_renders_xtml(tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"thinking_effort": "low", "tool_choice": "required"}
    assert render_messages("kimi_k3", tokenizer, HELLO, [TOOL], **options) == chat_format.render(
        tokenizer, HELLO, tools=[TOOL], **options
    )


def test_others_render_their_template(templated: Tokenizer) -> None:
    assert text_of(templated, HELLO) == "user: Hello\nassistant: "
    assert text_of(templated, HELLO, add_generation_prompt=False) == "user: Hello\n"
    assert text_of(templated, HELLO, mood=" (calm)") == "user: Hello\nassistant (calm): "
    assert text_of(templated, HELLO, tools=[TOOL]).startswith('[{"type": "function"')
    assert text_of(templated, HELLO, tools=[TOOL], tool_choice="none").startswith("user")
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert text_of(templated, [{"role": "user", "content": parts}]).startswith("user: Hello\n")


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        ("{{ reasoning_effort }}", {"thinking_effort": "low"}, "low"),
        ("{{ thinking }}", {"thinking": False}, "False"),
        ("{{ enable_thinking }}", {"thinking": False}, "False"),
        ("{{ enable_thinking }}{{ thinking }}", {"thinking": True, "enable_thinking": 5}, "5True"),
    ],
)
def test_how_much_to_think_has_the_template_s_name(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    options: dict[str, Any],
    expected: str,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate(template))
    assert text_of(tokenizer, HELLO, **options) == expected


def test_each_has_its_parser(tokenizer: Tokenizer) -> None:
    assert isinstance(make_parser("kimi_k3", tokenizer, prompt_token_ids=[]), XtmlParser)
    assert isinstance(make_parser("kimi_linear", tokenizer, prompt_token_ids=[]), MarkerParser)


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [(True, ParsedMessage("Hi", "")), (False, ParsedMessage("", "Hi"))],
)
def test_an_answer_begins_where_its_prompt_ends(
    thinking: bool, expected: ParsedMessage, tokenizer: Tokenizer
) -> None:
    prompt = render_messages("kimi_k3", tokenizer, HELLO, thinking=thinking)
    token_ids = tokenizer.encode("Hi STOP there")
    answer = parse_answer("kimi_k3", tokenizer, token_ids, prompt_token_ids=prompt, stop=[" STOP"])
    assert answer == expected


def test_a_stop_string_must_not_be_empty(tokenizer: Tokenizer) -> None:
    for model_type in ("kimi_k3", "kimi_linear"):
        with pytest.raises(ValueError, match="stop"):
            make_parser(model_type, tokenizer, prompt_token_ids=[], stop=[""])


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("model_type", ["kimi_k3", "kimi_linear"])
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "must be a list of objects"),
        ([{"content": "x"}], "message 0 must be an object with a role"),
        ([user("x"), user(5)], "message 1: content must be text or parts"),
        ([user(["x"])], "message 0: a part of content must be an object"),
        ([user([{"type": "image_url", "image_url": {}}])], "content of type 'image_url'"),
        ([user([{"type": "input_audio"}])], "content of type 'input_audio'"),
        ([user([{"type": "text"}])], "a text part has no text"),
        ([{"role": "assistant", "audio": {"id": "a"}}], "message 0: audio is not supported"),
        ([{"role": "assistant", "function_call": {}}], "function_call is not supported"),
        ([{"role": "assistant", "tool_calls": {}}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "no function name"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "no function name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "must be JSON text",
        ),
    ],
)
def test_messages_that_cannot_be_written_are_refused(
    messages: Any, message: str, model_type: str, templated: Tokenizer
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render_messages(model_type, templated, messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("kimi_k3", {"enable_thinking": True}),
        ("kimi_k3", {"thinking_effort": "extreme"}),
        ("kimi_k3", {"tool_choice": {"type": "function"}}),
        ("kimi_k3", {"response_format": {"type": "xml"}}),
        ("kimi_linear", {"thinking_effort": "low"}),
        ("kimi_linear", {"tool_choice": "required"}),
        ("kimi_linear", {"tool_choice": {"type": "function"}}),
        ("kimi_linear", {"response_format": {"type": "json_object"}}),
        ("kimi_linear", {"documents": []}),
    ],
)
def test_options_that_cannot_be_honoured_are_named(
    model_type: str, options: dict[str, Any], templated: Tokenizer
) -> None:
    with pytest.raises(RequestError) as caught:
        render_messages(model_type, templated, HELLO, **options)
    assert caught.value.field == next(iter(options))


def test_a_model_without_any_format_says_so(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match=r"no chat template, .* model_type kimi_linear"):
        render_messages("kimi_linear", tokenizer, HELLO)
