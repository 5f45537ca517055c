"""Answers that must obey something: the fields that ask for it, and what becomes of them."""

import json
import re
from typing import Any

import jsonschema
import pytest

from stagecoach.errors import RequestError
from stagecoach.request import FinishReason
from tests.cpu.api.asgi import events_of, exchange
from tests.cpu.api.conftest import Server
from tests.cpu.api.loopback import until
from tests.cpu.api.scripted import scripted_server
from tests.small_engine import LETTERS

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
CLOSE = 260  # <|close|>
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
WEATHER = {"type": "function", "function": {"name": "weather"}}
# The model is random: it writes what is right because nothing else is allowed.
QUIET: dict[str, Any] = {"messages": HI, "max_tokens": 100, "reasoning_effort": "none"}


def text_of(answer: Any) -> list[str]:
    """The text of each choice, of a whole answer or a stream."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"].startswith("application/json"):
        choices = answer.json["choices"]
        return [choice.get("text") or choice["message"]["content"] for choice in choices]
    texts: dict[int, str] = {}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_obey(server: Server, stream: bool, temperature: float) -> None:
    fields: dict[str, Any] = {"prompt": ["a", "b"], "n": 2, "seed": 3, "temperature": temperature}
    fields |= {"stream": stream, "max_tokens": 40}
    for form, pattern in (
        ({"regex": "[a-c]{3,5}-[0-9]"}, "[a-c]{3,5}-[0-9]"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: ("ab" | "c") "!"'}, "(ab|c)!"),
    ):
        texts = text_of(server.post(TEXT, **fields, structured_outputs=form))
        assert len(texts) == 4
        assert all(re.fullmatch(pattern, text) for text in texts), texts


@pytest.mark.parametrize("stream", [False, True])
def test_chats_obey(server: Server, stream: bool) -> None:
    for form in (
        {"response_format": AS_SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ):
        bias = {str(byte): -100 for byte in b" \n\t\r"}
        answer = server.post(CHAT, **QUIET, **form, logit_bias=bias, n=2, seed=1, stream=stream)
        texts = text_of(answer)
        assert len(texts) == 2
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)


ONE_TAG = {
    "begin": "<n>",
    "content": {"type": "json_schema", "json_schema": {"enum": [14, 32]}},
    "end": "</n>",
}
TRIGGERED = {"structures": [{"begin": "<n>", "schema": {"enum": [14]}, "end": "</n>"}]}
TAGS: tuple[dict[str, Any], ...] = (
    {"type": "structural_tag", "format": {"type": "tag", **ONE_TAG}},
    {"type": "structural_tag", "triggers": ["<n>"], **TRIGGERED},
)


def test_structural_tags_of_both_forms_and_in_both_fields(server: Server) -> None:
    # The older form lets any text stand before a tag; of these characters one comes soon.
    bias = {str(ord(char)): 60 for char in "<n>"}
    fields: dict[str, Any] = {"max_tokens": 150, "seed": 1, "logit_bias": bias}
    fields |= {"stop": "</n>", "include_stop_str_in_output": True}
    for tag in TAGS:
        form = {"structured_outputs": {"structural_tag": tag}}
        chat = server.post(CHAT, messages=HI, reasoning_effort="none", **form, **fields)
        text = server.post(TEXT, prompt="a", response_format=tag, **fields)
        for told in text_of(chat) + text_of(text):
            assert re.search("<n>(14|32)</n>", told), told
    unknown = {"type": "structural_tag", "format": {"type": "nix"}}
    answer = server.post(CHAT, messages=HI, response_format=unknown)
    assert (answer.status, answer.error["param"]) == (400, "response_format")


def test_reasoning_comes_before_what_must_obey(server: Server) -> None:
    """Thoughts are free, and then the content is held to its form from its first token."""
    bias = {str(token_id): 20.0 for token_id in (*LETTERS, CLOSE)}
    fields = {"messages": HI, "max_tokens": 300, "seed": 2, "logit_bias": bias}
    form = {"structured_outputs": {"regex": "[a-c]{3,5}"}}
    body = server.post(CHAT, **fields, **form, logprobs=True).json
    [choice] = body["choices"]
    assert re.fullmatch("[a-c]{3,5}", choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == body["usage"]["completion_tokens"]
    num_reasoning = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_reasoning == len(choice["message"]["reasoning_content"]) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_the_engine_finds_names_the_field(server: Server, stream: bool) -> None:
    """A status, in a stream too: nothing has been sent when the grammar is compiled."""
    impossible = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nix"}}}
    for path, fields, param, word in (
        (TEXT, {"prompt": "a", "response_format": impossible}, "response_format", "nix"),
        (CHAT, {"messages": HI, "response_format": impossible}, "response_format", "nix"),
        (TEXT, {"prompt": ["a", "b"], "n": 2}, "structured_outputs", "regex"),
        (CHAT, {"messages": HI, "n": 2}, "structured_outputs", "regex"),
    ):
        if param == "structured_outputs":
            fields = fields | {"structured_outputs": {"regex": "(("}}
        answer = server.post(path, **fields, stream=stream)
        assert answer.status == 400, answer.body
        assert answer.error["param"] == param
        assert word in answer.error["message"] and "\n" not in answer.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_what_the_client_wrote(model_folder: Any, stream: bool) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required"}
    with scripted_server(model_folder) as (server, engine):
        for fields, param in (
            ({"response_format": AS_SCHEMA} | forced, "response_format"),
            (forced, "tool_choice"),
            ({"tools": [WEATHER]}, "tools"),
        ):
            engine.refusal = RequestError("structured_outputs", "too large")
            answer = server.post(CHAT, messages=HI, stream=stream, **fields)
            assert (answer.status, answer.error["param"]) == (400, param)
            assert answer.error["message"] == f"{param}: too large"


def asked(model_folder: Any, **fields: Any) -> tuple[str, Any]:
    """The prompt that the engine gets, and what it must obey."""
    with scripted_server(model_folder) as (server, engine):
        engine.say([258])
        answer = server.post(CHAT, messages=HI, max_tokens=1, **fields)
        assert answer.status == 200, answer.body
        [(token_ids, params)] = engine.submitted
        prompt = engine.tokenizer.decode_bytes(token_ids).decode()
    return prompt, params.structured_outputs


def test_the_prompt_says_what_is_asked(model_folder: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for fields, words, has_grammar in (
        ({"response_format": AS_SCHEMA}, "`response_format=json_schema`", True),
        ({"response_format": {"type": "json_object"}}, "`response_format=json_object`", True),
        ({"response_format": {"type": "text"}}, "", False),
        ({"structured_outputs": {"json": SCHEMA}}, "", True),
        ({"tools": [WEATHER], "tool_choice": "required"}, "MUST call tools", True),
        ({"tools": [WEATHER], "tool_choice": named}, "MUST call tools", True),
        ({"tools": [WEATHER], "tool_choice": "auto"}, "", False),
    ):
        prompt, constraint = asked(model_folder, **fields)
        assert words in prompt
        assert ("response_format=" in prompt) == ("response_format" in words)
        assert ("MUST" in prompt) == ("MUST" in words)
        assert (constraint is not None) == has_grammar
        assert constraint is None or constraint.grammar
    prompt, _ = asked(model_folder, tools=[WEATHER], tool_choice="none")
    assert "MUST NOT call any tools" in prompt
    prompt, _ = asked(model_folder, response_format=AS_SCHEMA)
    assert '"enum":["x","y"]' in prompt


def test_strict_tools_are_held_to_their_parameters(model_folder: Any) -> None:
    strict = {"name": "weather", "strict": True, "parameters": {"type": "object"}}
    _, constraint = asked(model_folder, tools=[{"type": "function", "function": strict}])
    assert constraint is not None


def test_a_schema_without_a_schema_is_any_object(model_folder: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x"}}
    prompt, constraint = asked(model_folder, response_format=form)
    assert "`response_format=json_object`" in prompt and constraint is not None


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_grammar_that_cannot_go_on_ends_its_request(model_folder: Any, is_begun: bool) -> None:
    """A status, or the last event of a stream that has begun."""
    ending = {"finish_reason": FinishReason.ERROR, "error": "GrammarError: too many states"}
    with scripted_server(model_folder) as (server, engine):

        async def run() -> tuple[int | None, bytes]:
            fields = {"messages": HI, "response_format": AS_SCHEMA, "stream": True}
            body = json.dumps(fields).encode()
            async with exchange(server.app, "POST", CHAT, body) as state:
                await until(lambda: engine.open)
                if is_begun:
                    engine.tell(1, token_ids=(97,))
                    assert await state.next_body()
                engine.tell(1, **ending)
                last = await state.next_body()
                return state.status, last or b""

        status, last = server.run(run())
        assert status == (200 if is_begun else 400)
        event = events_of(last)[0] if is_begun else json.loads(last)
        assert event["error"]["code"] == "grammar_limit"
        assert "too many states" in event["error"]["message"]
