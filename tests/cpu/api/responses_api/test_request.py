"""Fields of /v1/responses: what is refused, and by which name."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from stagecoach.api.responses_api.request import ResponsesRequest
from stagecoach.errors import RequestError
from tests.cpu.api.conftest import Server

LOGPROBS = "message.output_text.logprobs"


def parse(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse(json.dumps({"input": "hi"} | fields).encode())


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no response is kept"),
        ({"conversation": "conv_1"}, "conversation", "no response is kept"),
        ({"background": True}, "background", "no response is kept"),
        ({"prompt": {"id": "p"}}, "prompt", "no prompt templates"),
        ({"truncation": "auto"}, "truncation", "too long"),
        ({"n": 2}, "n", "one answer"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "no place"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning.effort"),
        ({"response_format": {"type": "text"}}, "response_format", "text.format"),
        ({"top_logprobs": 3}, "top_logprobs", LOGPROBS),
        ({"logprobs": True}, "logprobs", LOGPROBS),
        ({"include": ["everything"]}, "include", "'everything'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not implemented"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not implemented"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools", "tool 0 has no name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'allowed_tools'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "its name"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "required"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields).chat_request()
    assert caught.value.field == param and word in caught.value.reason


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": None, "conversation": None, "prompt": None, "background": False},
        {"truncation": "disabled", "n": 1, "store": True, "max_tool_calls": 3},
        {"include": [LOGPROBS, "reasoning.encrypted_content"], "top_logprobs": 5},
        {"text": {"verbosity": "medium"}, "reasoning": {"summary": "auto"}},
        {"tools": [], "tool_choice": "auto", "stream_options": {"include_obfuscation": True}}
        | {"stream": True},
    ],
)
def test_what_is_harmless_is_taken(fields: dict[str, Any]) -> None:
    parse(**fields).chat_request()


@pytest.mark.parametrize(
    ("fields", "location"),
    [
        ({"input": None}, "input"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
    ],
)
def test_types_are_taken_as_they_are(fields: dict[str, Any], location: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse(**fields)
    assert caught.value.errors()[0]["loc"][0] == location


def test_tools_are_those_of_a_chat_without_what_is_null() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": None}
    [chat_tool] = parse(tools=[tool]).chat_request().tools or ()
    assert chat_tool.model_dump(exclude_unset=True) == {
        "type": "function",
        "function": {"name": "f", "parameters": {}},
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"input": "hi" * 300}, "input"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_what_the_engine_refuses_has_the_name_that_was_written(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        answer = server.post("/v1/responses", **({"input": "hi", "stream": stream} | fields))
        assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_a_real_engine_answers(server: Server) -> None:
    fields = {"input": "hi", "max_output_tokens": 4, "ignore_eos": True, "cache_salt": "responses"}
    [first, second] = [server.post("/v1/responses", **fields).json for _ in range(2)]
    assert first["status"] == "incomplete"
    assert first["usage"]["output_tokens"] == 4
    cached = [body["usage"]["input_tokens_details"]["cached_tokens"] for body in (first, second)]
    assert cached[0] == 0 < cached[1] < second["usage"]["input_tokens"]


LETTER = {
    "type": "object",
    "properties": {"letter": {"enum": ["a", "b"]}},
    "required": ["letter"],
    "additionalProperties": False,
}


def test_a_real_engine_obeys_the_form(server: Server) -> None:
    form = {"type": "json_schema", "name": "pick", "schema": LETTER, "strict": True}
    fields = {"input": "hi", "reasoning": {"effort": "none"}, "text": {"format": form}, "seed": 1}
    body = server.post("/v1/responses", **fields).json
    assert body["status"] == "completed" and body["text"] == {"format": form}
    [message] = body["output"]
    assert json.loads(message["content"][0]["text"])["letter"] in ("a", "b")


def test_a_form_that_is_none_is_refused_by_its_name(server: Server) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}
    for stream in (False, True):
        answer = server.post("/v1/responses", input="hi", text={"format": form}, stream=stream)
        assert (answer.status, answer.error["param"]) == (400, "text.format"), answer.body
