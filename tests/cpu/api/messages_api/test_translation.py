"""What a request of Anthropic's form is as a conversation: its prompt, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stagecoach.api.error_body import HttpError, failure_of
from stagecoach.api.messages_api.request import CountTokensRequest, MessagesRequest
from stagecoach.api.messages_api.translation import chat_request, errors_as_written
from stagecoach.errors import RequestError
from tests.cpu.api.chat_api.test_route import WEATHER, answer_tokens
from tests.cpu.api.conftest import Server
from tests.cpu.api.messages_api.conftest import Scripted

HI: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {
    "name": "weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}
LENGTH = 512


def translated(**fields: Any) -> Any:
    body = MessagesRequest.parse(json.dumps(HI | fields).encode())
    return chat_request(body, max_model_len=LENGTH)


def dumped(**fields: Any) -> dict[str, Any]:
    """The chat request, as OpenAI's clients would have written it."""
    return translated(**fields).model_dump(exclude_unset=True, exclude_none=True, by_alias=True)


def test_a_conversation_of_texts() -> None:
    fields = {
        "system": [
            {"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief"},
        ],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
            {"role": "system", "content": "now in German"},
            {"role": "user", "content": [{"type": "text", "text": "go "}] * 2},
        ],
    }
    assert dumped(**fields)["messages"] == [
        {
            "role": "system",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        },
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "now in German"},
        {"role": "user", "content": [{"type": "text", "text": "go "}] * 2},
    ]


def test_thoughts_calls_and_their_results() -> None:
    def use(call_id: str, **value: Any) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id, "name": "weather", "input": value}

    def result(call_id: str, **fields: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": call_id, **fields}

    told = dumped(
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "well ", "signature": "unsigned"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "thinking", "thinking": "now"},
                    {"type": "text", "text": "I look."},
                    use("a", place="Oslo", days=3),
                ],
            },
            # Two in a row are one turn.
            {"role": "assistant", "content": [use("b")]},
            {
                "role": "user",
                "content": [
                    result("b", content=[{"type": "text", "text": "x"}] * 2),
                    result("a", content="no such place", is_error=True),
                    {"type": "text", "text": "go"},
                    {"type": "text", "text": " on"},
                ],
            },
            {"role": "user", "content": [result("a")]},
        ]
    )["messages"]
    assert told[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "well now",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "weather", "arguments": {"place": "Oslo", "days": 3}},
            },
            {"id": "b", "type": "function", "function": {"name": "weather", "arguments": {}}},
        ],
    }
    texts = [{"type": "text", "text": "x"}] * 2
    error = [{"type": "text", "text": "Error: "}, {"type": "text", "text": "no such place"}]
    words = [{"type": "text", "text": "go"}, {"type": "text", "text": " on"}]
    assert told[2:] == [
        {"role": "tool", "tool_call_id": "b", "content": texts},
        {"role": "tool", "tool_call_id": "a", "content": error},
        {"role": "user", "content": words},
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]


def test_options() -> None:
    told = dumped(
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        tools=[TOOL | {"type": "custom", "strict": True}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2000, "display": "summarized"},
        output_config={"effort": "xhigh", "format": {"type": "json_schema", "schema": {"a": 1}}},
    )
    del told["messages"]
    assert told == {
        "max_completion_tokens": 5,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "tools": [{"type": "function", "function": WEATHER["function"] | {"strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"thinking": True},
        "reasoning_effort": "max",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": {"a": 1}},
        },
    }


@pytest.mark.parametrize(
    ("choice", "said"), [("auto", "auto"), ("any", "required"), ("none", "none")]
)
def test_tool_choices(choice: str, said: str) -> None:
    assert translated(tools=[TOOL], tool_choice={"type": choice}).tool_choice == said


@pytest.mark.parametrize(
    ("kind", "is_thinking"),
    [("enabled", True), ("adaptive", True), ("between_tools", True), ("disabled", False)],
)
def test_thinking(kind: str, is_thinking: bool) -> None:
    assert translated(thinking={"type": kind}).chat_template_kwargs == {"thinking": is_thinking}


def test_the_older_name_of_the_format() -> None:
    told = dumped(output_format={"type": "json_schema", "schema": {}})
    assert told["response_format"]["json_schema"] == {"name": "output", "schema": {}}


def test_nobody_asks_for_more_tokens_than_there_are() -> None:
    assert translated(max_tokens=100_000).max_completion_tokens == LENGTH


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ([{"type": "text", "text": "x-anthropic-billing-header: v=1; cch=a1;"}], None),
        ("x-anthropic-billing-header: v=1; cch=a1;\nBe brief.", "Be brief."),
        ("Say x-anthropic-billing-header: v", "Say x-anthropic-billing-header: v"),
        ("", None),
        ([], None),
    ],
)
def test_the_accounting_of_agents_is_no_instruction(system: Any, kept: str | None) -> None:
    said = [m.content for m in translated(system=system).messages if m.role == "system"]
    assert said == ([] if kept is None else [kept])


def test_a_turn_with_tools_renders_as_in_a_chat(scripted: Scripted) -> None:
    """The same prompt, token by token; so both protocols share cached prefixes."""
    server, engine = scripted
    engine.say(answer_tokens(engine, {"content": "rain"}))
    call = {"name": "weather", "arguments": '{"place": "Oslo"}'}
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning_content": "well",
            "content": "I look.",
            "tool_calls": [{"id": "a", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "user", "content": "and now?"},
    ]
    server.post("/v1/chat/completions", messages=chat, tools=[WEATHER])
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"place": "Oslo"}}
    thinking = {"type": "thinking", "thinking": "well", "signature": "unsigned"}
    text = {"type": "text", "text": "I look."}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
        {"type": "text", "text": "and now?"},
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [thinking, text, use]},
        {"role": "user", "content": results},
    ]
    answer = server.post(
        "/v1/messages", messages=messages, tools=[TOOL], max_tokens=50, system="be brief"
    )
    assert answer.status == 200, answer.body
    [first, second] = [prompt for prompt, _ in engine.submitted[-2:]]
    assert list(first) == list(second)


def test_what_the_prompt_is_made_of_is_counted(scripted: Scripted) -> None:
    server, engine = scripted
    engine.say(answer_tokens(engine, {"content": "rain"}))
    for fields in (
        {},
        {"system": "be brief"},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "low"}},
    ):
        asked = {"messages": HI["messages"], **fields}
        counted = server.post("/v1/messages/count_tokens", **asked).json
        server.post("/v1/messages", **asked, max_tokens=50)
        assert counted == {"input_tokens": len(engine.submitted[-1][0])}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def says(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, HI["messages"][0]]}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "integer"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": ["hi"]}, "messages[0]", "a role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0]", "'tool'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "list of blocks"),
    ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages", "continued"),
    (says("hi"), "messages[0].content[0]", "a type"),
    (says(IMAGE), "messages[0].content[0]", "'image'"),
    (says({"type": "document"}), "messages[0].content[0]", "'document'"),
    (says(USE), "messages[0].content[0]", "'tool_use'"),
    (says(RESULT, role="assistant"), "messages[0].content[0]", "'tool_result'"),
    (says({"type": "server_tool_use"}, role="assistant"), "messages[0].content[0]", "server_tool"),
    (says({"type": "text", "text": 5}), "messages[0].content[0].text", "string"),
    (says(USE | {"input": "{}"}, role="assistant"), "messages[0].content[0].input", ""),
    (says(RESULT | {"content": [IMAGE]}), "messages[0].content[0].content[0]", "'image'"),
    (says(RESULT), "messages[0].content[0].tool_use_id", "'a' is no call"),
    ({"system": [IMAGE]}, "system[0]", "'image'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]", "web_search"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "required"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "'g'"),
    ({"thinking": {"type": "on"}}, "thinking.type", "'enabled'"),
    ({"stop_sequences": "END"}, "stop_sequences", "array"),
    ({"stop_sequences": [""]}, "stop_sequences", "empty"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"temperature": "1"}, "temperature", "number"),
    ({"output_config": {"effort": "minimal"}}, "output_config.effort", "'low'"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "json_schema"),
    ({"mcp_servers": [{}]}, "mcp_servers", "not implemented"),
    ({"container": "c"}, "container", "not implemented"),
    ({"thread": {"type": "create"}}, "thread", "all of its messages"),
]


@pytest.mark.parametrize(("fields", "field", "word"), WRONG)
def test_a_wrong_field_is_named(
    scripted: Scripted, fields: dict[str, Any], field: str, word: str
) -> None:
    server: Server = scripted[0]
    answer = server.post("/v1/messages", **HI | fields)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"].startswith(f"{field}: "), answer.error
    assert word in answer.error["message"]


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ("prompt", "messages"),
        ("structured_outputs", "output_config.format"),
        ("max_tokens", "max_tokens"),
        ("top_k", "top_k"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_about_a_field_of_the_client(
    scripted: Scripted, said: str, field: str, stream: bool
) -> None:
    server, engine = scripted
    engine.refusal = RequestError(said, "not this")
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    answer = server.post("/v1/messages", **HI, stream=stream, output_config={"format": schema})
    assert answer.status == 400
    assert answer.error["message"] == f"{field}: not this"


def test_null_fields_count_as_absent() -> None:
    nulls = dict.fromkeys([*MessagesRequest.model_fields, *MessagesRequest.refused])
    body = MessagesRequest.parse(json.dumps(nulls | HI).encode())
    chat = chat_request(body, max_model_len=LENGTH)
    assert chat.params() == translated().params()
    assert chat.messages == translated().messages


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "text", "content", "name", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=100)
@given(st.data())
def test_any_value_in_any_field_is_taken_or_refused(data: st.DataObject) -> None:
    """Nothing but what becomes a 400 leaves the parser and the translation."""
    kind = data.draw(st.sampled_from([MessagesRequest, CountTokensRequest]))
    name = data.draw(st.sampled_from(sorted({*kind.model_fields, *kind.refused, "new"})))
    try:
        body = kind.parse(json.dumps(HI | {name: data.draw(_JSON)}).encode())
        chat = chat_request(body, max_model_len=LENGTH)
        with errors_as_written(chat):
            chat.check()
            chat.params()
    except (RequestError, ValidationError, HttpError) as error:
        failure = failure_of(error)
        assert failure.status == 400
        assert "\n" not in failure.error.message
