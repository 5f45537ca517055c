"""Whatever a client sends, it gets a precise answer in one form, and the server goes on."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from stagecoach.api.chat_api.request import ChatCompletionRequest
from stagecoach.api.completions_api.request import CompletionRequest
from stagecoach.api.error_body import HttpError, QueueFullError, failure_of
from stagecoach.errors import (
    CapacityError,
    EngineDeadError,
    GrammarError,
    LethalRequestError,
    NonFiniteError,
    PromptTooLongError,
    RequestError,
    StagecoachError,
    WorkerDiedError,
)
from tests.cpu.api.conftest import Server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def named(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def assert_error(answer: Any, status: int, param: str | None, *words: str) -> None:
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json) == {"error"}
    error = answer.error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert "\n" not in error["message"]
    for word in words:
        assert word in error["message"], error


WRONG_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "field required"),
    ({"prompt": None}, "prompt", "valid string"),
    ({"prompt": 5}, "prompt", "valid string"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "at least one token"),
    ({"prompt": ["a", ""]}, "prompt", "(prompt 1)"),
    ({"prompt": [[1], []]}, "prompt", "(prompt 1)"),
    # The branch of a union that got furthest says where.
    ({"prompt": ["a", 5]}, "prompt[1]", "valid string"),
    ({"prompt": [5, "a"]}, "prompt[1]", "valid integer"),
    ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]", "valid integer"),
    ({"prompt": [1, 10**6]}, "prompt", "token id 1000000"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [2**70]}, "prompt", "token id"),
    ({"prompt": [1.5]}, "prompt[0]", "valid integer"),
    ({"prompt": [True]}, "prompt[0]", "valid integer"),
    ({"prompt": "x" * 600}, "prompt", "600 tokens"),
    ({"prompt": ["a"] * 27}, "prompt", "27 completions"),
    ({"prompt": "a", "n": 27}, "prompt", "27 completions"),
    ({"prompt": "a", "n": 0}, "n", "at least 1"),
    ({"prompt": "a", "n": 1.0}, "n", "valid integer"),
    ({"prompt": "a", "n": True}, "n", "valid integer"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1, or 0 with echo"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "at least 1"),
    ({"prompt": "a", "max_tokens": 513}, "max_tokens", "at most 512"),
    ({"prompt": "a", "max_tokens": 2**80}, "max_tokens", ""),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"prompt": "a", "temperature": "0.5"}, "temperature", "valid number"),
    ({"prompt": "a", "temperature": -1}, "temperature", "[0, 100]"),
    ({"prompt": "a", "top_p": 0}, "top_p", "(0, 1]"),
    ({"prompt": "a", "top_k": -2}, "top_k", "at least -1"),
    ({"prompt": "a", "min_p": 2}, "min_p", "[0, 1]"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "(0, 100]"),
    ({"prompt": "a", "seed": -1}, "seed", "at least 0"),
    ({"prompt": "a", "seed": 2**63 - 1, "n": 2}, "seed", "seed + n - 1"),
    ({"prompt": "a", "seed": 2**64}, "seed", ""),
    ({"prompt": "a", "stop": ""}, "stop", "must not be empty"),
    ({"prompt": "a", "stop": ["x", 5]}, "stop[1]", "valid string"),
    ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", "token id 999"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "at most 20"),
    ({"prompt": "a", "logprobs": 21, "echo": True}, "logprobs", "at most 20"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "at least 0"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
    ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "token id 999"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "[-100, 100]"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias", ""),
    ({"prompt": "a", "min_tokens": 20}, "min_tokens", "at most 16"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not implemented"),
    ({"prompt": "a", "best_of": 2}, "best_of", "not implemented"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt", "not empty"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "stream true"),
    (
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "valid boolean",
    ),
    ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    ({"prompt": "a", "stream": True, "top_p": 9}, "top_p", "(0, 1]"),
    ({"prompt": "a", "guided_json": {}}, "guided_json", "is now structured_outputs.json"),
    ({"prompt": "a", "structural_tag": "{}"}, "structural_tag", "is now structured_outputs"),
]


def test_a_wrong_field_of_a_completion_is_named(server: Server) -> None:
    for fields, param, word in WRONG_COMPLETIONS:
        assert_error(server.post(TEXT, **fields), 400, param, word)


WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "valid array"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": ["hi"]}, "messages[0]", ""),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "field required"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "'system'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "'image_url' is not implemented",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages",
        "needs a text",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
        "field required",
    ),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "tokens"),
    ({"tools": [{}]}, "tools[0].type", "field required"),
    ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name", ""),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "no tools"),
    ({"tool_choice": named("f")}, "tool_choice", "no tools"),
    ({"tool_choice": named("g"), "tools": [TOOL]}, "tool_choice", "name 'g'"),
    ({"tool_choice": named(5), "tools": [TOOL]}, "tool_choice.function.name", "valid string"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type", "'function'"),
    ({"tool_choice": "any"}, "tool_choice", "'required'"),
    (
        {"tool_choice": "required", "tools": [TOOL], "min_tokens": 3},
        "tool_choice",
        "min_tokens",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs true"),
    ({"logprobs": 2}, "logprobs", "valid boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"reasoning_effort": "minimal"}, "reasoning_effort", "minimal"),
    ({"chat_template_kwargs": {"nix": 1}}, "chat_template_kwargs", "nix"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"functions": [{"name": "f"}]}, "functions", "is now tools"),
    ({"audio": {}}, "audio", "not implemented"),
    ({"chat_template": "{{ x }}"}, "chat_template", "not implemented"),
]


WRONG_IN_BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "required",
    ),
    (
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        "response_format",
        "ignore_eos",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "not both",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]", "valid string"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "not implemented",
    ),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "structured_outputs", "min_tokens"),
]


def test_a_wrong_form_of_the_answer_is_named(server: Server) -> None:
    for fields, param, word in WRONG_IN_BOTH:
        assert_error(server.post(TEXT, prompt="a", **fields), 400, param, word)
        assert_error(server.post(CHAT, **HI | fields), 400, param, word)
        assert_error(server.post(CHAT, **HI | fields, stream=True), 400, param, word)


def test_a_wrong_field_of_a_chat_is_named(server: Server) -> None:
    for fields, param, word in WRONG_CHATS:
        assert_error(server.post(CHAT, **HI | fields), 400, param, word)


NOT_OUR_JSON = (
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"\xff\xfe",
    b'{"prompt": NaN}',
    b'{"prompt": -Infinity}',
    b'{"prompt": 1e999}',
    b'{"prompt": "a", "model": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": "a"} trailing',
    b"{'prompt': 'a'}",
    b'{"prompt": "a",}',
)


@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_of_ours_is_refused(server: Server, path: str) -> None:
    for body in NOT_OUR_JSON:
        answer = server.call("POST", path, body, {"content-type": "application/json"})
        assert answer.status == 400, (body, answer.body)
        assert answer.error["type"] == "invalid_request_error"


def test_null_fields_count_as_absent(server: Server) -> None:
    """Clients send null for what they were not given."""
    for path, model, fields in (
        (TEXT, CompletionRequest, {"prompt": "a"}),
        (CHAT, ChatCompletionRequest, HI),
    ):
        nulls = dict.fromkeys(model.model_fields) | dict.fromkeys(model.refused)
        answer = server.post(path, **nulls | fields | {"max_tokens": 1})
        assert answer.status == 200, answer.body


def test_an_unknown_field_is_told_once_and_changes_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"prompt": "a", "max_tokens": 3, "seed": 1}
    expected = server.post(TEXT, **fields).json["choices"]
    with caplog.at_level("WARNING", logger="stagecoach"):
        for _ in range(3):
            told = server.post(TEXT, **fields, a_field_of_tomorrow={"x": [1]}).json["choices"]
            assert told == expected
    lines = [record for record in caplog.records if "a_field_of_tomorrow" in record.getMessage()]
    assert len(lines) == 1


def test_an_unknown_model_is_404(server: Server) -> None:
    for path, fields in ((TEXT, {"prompt": "a"}), (CHAT, HI)):
        answer = server.post(path, **fields, model="gpt-5")
        assert_error(answer, 404, "model", "gpt-5", "small")
        assert answer.error["code"] == "model_not_found"
    assert server.post(TEXT, prompt="a", model="other-name").json["model"] == "other-name"


LONG = [{"role": "user", "content": "x" * 600}]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": ["a", "x" * 600]}, "prompt"),
        (CHAT, {"messages": LONG}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/messages", {"messages": LONG, "max_tokens": 1}, "messages"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_words_that_agents_know(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = server.post(path, **fields)
    assert answer.status == 400
    error = answer.json["error"]
    # Anthropic's words, then those of OpenAI and vLLM: clients shorten the prompt on reading them.
    assert re.match(rf"{param}: prompt is too long: \d+ tokens > 511 maximum;", error["message"])
    assert "this model's maximum context length is 512 tokens" in error["message"]
    if path != "/v1/messages":
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_paths_and_methods_that_are_not_there(server: Server) -> None:
    for path in ("/nix", "/v1/embeddings", "/v1/v1/chat/completions"):
        assert_error(server.post(path), 404, None, f"no POST '{path}' here")
    answer = server.get(TEXT)
    assert_error(answer, 405, None, f"no GET '{TEXT}' here")
    assert answer.headers["allow"] == "POST"


def test_a_mistake_of_ours_is_a_500_that_says_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: CompletionRequest) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(CompletionRequest, "params", broken)
    answer = server.call("POST", TEXT, {"prompt": "a"}, {"x-request-id": "mine"})
    assert_error(answer, 500, None, "log")
    assert answer.headers["x-request-id"] == "mine"
    assert b"a bug" not in answer.body
    assert caplog.text.count("ZeroDivisionError: a bug") == 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.data())
def test_any_value_in_any_field_is_taken_or_refused(data: st.DataObject) -> None:
    """Nothing but the two errors that become 400 leaves the parser."""
    model = data.draw(st.sampled_from([CompletionRequest, ChatCompletionRequest]))
    good: dict[str, Any] = {"prompt": "a"} if model is CompletionRequest else dict(HI)
    name = data.draw(st.sampled_from(sorted({*model.model_fields, *model.refused, "new"})))
    value = data.draw(_JSON)
    try:
        body = model.parse(json.dumps(good | {name: value}).encode())
        body.params()
    except (RequestError, ValidationError) as error:
        failure = failure_of(error)
        assert failure.status == 400
        assert "\n" not in failure.error.message


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("top_p", "wrong"), 400, "invalid_request_error", "invalid_value"),
        (PromptTooLongError("a", "b"), 400, "invalid_request_error", "context_length_exceeded"),
        (HttpError(401, "key", code="invalid_api_key"), 401, "authentication_error", None),
        (QueueFullError("full"), 429, "rate_limit_error", "queue_full"),
        (GrammarError("too large"), 400, "invalid_request_error", "grammar_limit"),
        (NonFiniteError("NaN"), 500, "internal_server_error", "non_finite"),
        (LethalRequestError("died"), 500, "internal_server_error", "lethal_request"),
        (EngineDeadError("gone"), 503, "service_unavailable_error", "engine_dead"),
        (WorkerDiedError("worker[0,0]"), 503, "service_unavailable_error", "engine_dead"),
        (HTTPException(404), 404, "not_found_error", "not_found"),
        (CapacityError("no room"), 500, "internal_server_error", "internal_error"),
        (StagecoachError("?"), 500, "internal_server_error", "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_server_error", "internal_error"),
    ],
)
def test_the_table(error: Exception, status: int, kind: str, code: str | None) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.error.type) == (status, kind)
    assert code in (None, failure.error.code)
    assert "secret" not in failure.body.decode()
    assert json.loads(failure.body)["error"]["message"]
