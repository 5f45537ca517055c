"""Items of the input are the conversation that a chat request would have been."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.api.chat_api.test_route import CALLS, WEATHER, answer_tokens
from tests.cpu.api.conftest import Server
from tests.cpu.api.scripted import ScriptedEngine, scripted_server

TOOL: dict[str, Any] = {"type": "function", **WEATHER["function"]}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def scripted(model_folder: Path) -> Iterator[tuple[Server, ScriptedEngine]]:
    with scripted_server(model_folder) as pair:
        pair[1].say(answer_tokens(pair[1], {"content": "x"}))
        yield pair


def said(text: str) -> dict[str, Any]:
    """A message as a response has it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    return item | {"content": [part]}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def called(number: int, arguments: str) -> dict[str, Any]:
    item = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}"}
    return item | {"name": "weather", "arguments": arguments, "status": "completed"}


def result(number: int, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


CHAT_CALLS = [
    {"id": f"call_{number}", "type": "function", **call} for number, call in enumerate(CALLS)
]
ARGUMENTS = [call["function"]["arguments"] for call in CALLS]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [USER]),
        ([USER], [USER]),
        ([{"type": "message", **USER}], [USER]),
        ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [USER]),
        (
            [{"role": "developer", "content": "be brief"}, USER],
            [{"role": "developer", "content": "be brief"}, USER],
        ),
        (
            [USER, said("a"), said("b"), USER],
            [USER, *({"role": "assistant", "content": text} for text in "ab"), USER],
        ),
        (
            [USER, thought("hm"), said("hello"), USER],
            [USER, {"role": "assistant", "reasoning_content": "hm", "content": "hello"}, USER],
        ),
        (
            # Another model's, of whose thoughts only a summary is told.
            [
                USER,
                thought("") | {"content": None, "summary": [{"type": "summary_text", "text": "s"}]},
                said("hello"),
                USER,
            ],
            [USER, {"role": "assistant", "reasoning_content": "s", "content": "hello"}, USER],
        ),
        (
            [
                USER,
                thought("hm"),
                said("I look."),
                *(called(number, text) for number, text in enumerate(ARGUMENTS)),
                result(1, "sun"),
                result(0, [{"type": "input_text", "text": "rain"}]),
            ],
            [
                USER,
                {
                    "role": "assistant",
                    "reasoning_content": "hm",
                    "content": "I look.",
                    "tool_calls": CHAT_CALLS,
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
                {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
            ],
        ),
        (
            # What is said behind a call does not take it from its result.
            [USER, called(0, ARGUMENTS[0]), thought("hm"), said("so"), result(0, "rain")],
            [
                USER,
                {
                    "role": "assistant",
                    "reasoning_content": "hm",
                    "content": "so",
                    "tool_calls": CHAT_CALLS[:1],
                },
                {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
            ],
        ),
    ],
)
def test_the_prompt_is_that_of_the_chat(
    scripted: tuple[Server, ScriptedEngine], items: Any, messages: list[Any]
) -> None:
    server, engine = scripted
    for instructions in (None, "be kind"):
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        asked = [
            server.post("/v1/responses", input=items, instructions=instructions, tools=[TOOL]),
            server.post("/v1/chat/completions", messages=system + messages, tools=[WEATHER]),
        ]
        assert [answer.status for answer in asked] == [200, 200], asked
        assert engine.submitted[-2] == engine.submitted[-1]


def test_what_was_answered_may_be_sent_again(scripted: tuple[Server, ScriptedEngine]) -> None:
    """The prompt goes on exactly where the answer to it ended."""
    server, engine = scripted
    message = {"reasoning_content": "well", "content": "I look.", "tool_calls": CALLS}
    tokens = answer_tokens(engine, message)
    engine.say(tokens)
    fields = {"tools": [TOOL]}
    output = server.post("/v1/responses", input="hi", **fields).json["output"]
    first, _ = engine.submitted[-1]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
        for item in output
        if item["type"] == "function_call"
    ]
    answer = server.post("/v1/responses", input=[USER, *output, *results], **fields)
    assert answer.status == 200, answer.body
    second, _ = engine.submitted[-1]
    assert list(second[: len(first) + len(tokens)]) == [*first, *tokens]


@pytest.mark.parametrize(
    ("items", "word", "param"),
    [
        ([], "at least one", "input"),
        ([USER, {"type": "item_reference", "id": "msg_1"}], "item 1 refers", "input"),
        ([{"type": "web_search_call", "id": "w"}], "'web_search_call'", "input"),
        ([{"type": 7}], "valid string", "input[0].type"),
        ([7], "input[0]", "input[0]"),
        ([{"type": "message", "role": "tool", "content": "x"}], "role", "input[0].role"),
        (
            [{"type": "function_call", "call_id": "c", "name": "f"}],
            "required",
            "input[0].arguments",
        ),
        ([{"type": "function_call_output", "output": "x"}], "required", "input[0].call_id"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            "'input_image'",
            "input",
        ),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "needs a text", "input"),
        ([USER, {**USER, "content": [{"text": "x"}]}], "required", "input[1].content[0].type"),
        ([result(0, "rain")], "belongs to no tool call", "input"),
    ],
)
def test_items_that_are_refused(
    scripted: tuple[Server, ScriptedEngine], items: Any, word: str, param: str
) -> None:
    answer = scripted[0].post("/v1/responses", input=items)
    assert answer.status == 400
    assert (answer.error["param"], answer.error["type"]) == (param, "invalid_request_error")
    assert word in answer.error["message"]
