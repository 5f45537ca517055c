"""/v1/responses through the client that people use, over an engine that says what a test wants."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from stagecoach.errors import WorkerDiedError
from stagecoach.request import FinishReason, TokenLogprobs
from tests.cpu.api.asgi import Answer, call, exchange
from tests.cpu.api.chat_api.test_route import CALLS, WEATHER, answer_tokens
from tests.cpu.api.conftest import Server
from tests.cpu.api.openai_client import async_openai_client, openai_client
from tests.cpu.api.responses_api.event_check import checked_response, replay, without_names
from tests.cpu.api.scripted import ScriptedEngine, scripted_server
from tests.cpu.api.test_lifecycle import until

Scripted = tuple[Server, ScriptedEngine]

RESPONSES = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "strict": None, **WEATHER["function"]}
ALL_CHANNELS = {"reasoning_content": "well …", "content": "See 🙂", "tool_calls": CALLS}
PLACES = [{"place": "Oslo", "days": 3}, {"place": "Graz"}]


@pytest.fixture(scope="module")
def scripted(model_folder: Path) -> Iterator[Scripted]:
    with scripted_server(model_folder) as pair:
        yield pair


@pytest.fixture
def server(scripted: Scripted) -> Server:
    return scripted[0]


@pytest.fixture
def engine(scripted: Scripted) -> ScriptedEngine:
    return scripted[1]


@pytest.fixture(scope="module")
def silent(model_folder: Path) -> Iterator[Scripted]:
    """An engine that says nothing by itself."""
    with scripted_server(model_folder) as pair:
        yield pair


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def respond(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.post(RESPONSES, **({"input": "hi"} | fields))
    assert answer.status == 200, answer.body
    return checked_response(answer.json)


def stream(server: Server, **fields: Any) -> list[Any]:
    answer = server.post(RESPONSES, **({"input": "hi", "stream": True} | fields))
    assert answer.status == 200, answer.body
    return answer.events


def trickle(silent: Scripted, token_ids: list[int], *, size: int = 1, **fields: Any) -> Answer:
    """An answer in steps of `size` tokens, each of which finds its reader waiting."""
    server, engine = silent

    async def go() -> Answer:
        body = {"input": "hi"} | fields
        task = asyncio.create_task(call(server.app, "POST", RESPONSES, body))
        await until(lambda: engine.open)
        [request_id] = engine.open
        for start in range(0, len(token_ids), size):
            # A stop string may have ended it.
            if request_id in engine.open:
                piece = tuple(token_ids[start : start + size])
                is_last = start + size >= len(token_ids)
                engine.tell(
                    request_id,
                    token_ids=piece,
                    logprobs=tuple(_logprobs(token_id) for token_id in piece),
                    **({"finish_reason": FinishReason.STOP} if is_last else {}),
                )
            for _ in range(10):
                await asyncio.sleep(0)
        return await task

    return server.run(go())


def _logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, (token_id, 97), (-0.5, -2.0))


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_an_answer_of_all_kinds(server: Server, engine: ScriptedEngine) -> None:
    token_ids = answer_tokens(engine, ALL_CHANNELS)
    engine.say(token_ids)
    response = respond(server, tools=[TOOL], metadata={"k": "v"}, user="me", store=True)
    assert (response["status"], response["error"]) == ("completed", None)
    assert kinds(response) == ["reasoning", "message", "function_call", "function_call"]
    thoughts, message, *calls = response["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "well …"}]
    assert thoughts["summary"] == []
    assert message["content"][0]["text"] == "See 🙂" and message["role"] == "assistant"
    assert [json.loads(call["arguments"]) for call in calls] == PLACES
    assert [call["name"] for call in calls] == ["weather"] * 2
    assert all(item["status"] == "completed" for item in response["output"])
    names = [item["id"] for item in response["output"]] + [call["call_id"] for call in calls]
    assert len(set(names)) == 6
    prompt, _ = engine.submitted[-1]
    assert response["usage"] == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(token_ids),
        "output_tokens_details": {"reasoning_tokens": len(engine.tokenizer.encode("well …"))},
        "total_tokens": len(prompt) + len(token_ids),
    }
    assert (response["metadata"], response["user"]) == ({"k": "v"}, "me")
    assert response["tools"][0]["parameters"] == TOOL["parameters"]
    # It is not kept, and says so.
    assert response["store"] is False


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_the_whole_response_however_tokens_come(
    server: Server, engine: ScriptedEngine, silent: Scripted, size: int
) -> None:
    token_ids = answer_tokens(silent[1], ALL_CHANNELS)
    fields: dict[str, Any] = {"tools": [TOOL], "instructions": "be brief"}
    events = trickle(silent, token_ids, size=size, **fields, stream=True).events
    assert (len(events) > 35) == (size < 3)
    known = replay(events)
    assert known.end is not None
    engine.say(token_ids)
    assert without_names(known.end) == without_names(respond(server, **fields))


def test_reasoning_text_and_calls_are_told_in_their_order(silent: Scripted) -> None:
    message = {"reasoning_content": "ab", "content": "cd", "tool_calls": CALLS[1:]}
    events = trickle(silent, answer_tokens(silent[1], message), tools=[TOOL], stream=True).events
    told = [event["type"].removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added", "{0}.delta", "{0}.delta", "{0}.done"]
    text += ["content_part.done", "output_item.done"]
    arguments = len([kind for kind in told if kind == "function_call_arguments.delta"])
    assert arguments > 3
    assert told == [
        "created",
        "in_progress",
        *(kind.format("reasoning_text") for kind in text),
        *(kind.format("output_text") for kind in text),
        "output_item.added",
        *["function_call_arguments.delta"] * arguments,
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_an_answer_that_is_cut_loses_no_text_and_leaks_no_marker(
    server: Server, engine: ScriptedEngine
) -> None:
    token_ids = answer_tokens(engine, ALL_CHANNELS)
    for length in range(1, len(token_ids), 5):
        engine.say(token_ids[:length], size=2, reason="length")
        known = replay(stream(server, tools=[TOOL], max_output_tokens=length))
        assert known.end is not None
        assert known.end["incomplete_details"] == {"reason": "max_output_tokens"}
        assert known.end["usage"]["output_tokens"] == length
        *whole, last = known.end["output"] or [{"status": "incomplete", "type": None}]
        assert last["status"] == "incomplete"
        assert all(item["status"] == "completed" for item in whole)
        texts = {"reasoning": "well …", "message": "See 🙂"}
        for item in known.end["output"]:
            if item["type"] in texts:
                assert texts[item["type"]].startswith(item["content"][0]["text"].rstrip("\ufffd"))
            elif item is last:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(item["arguments"] + "!")


def test_an_answer_without_a_text_is_a_message_all_the_same(
    server: Server, engine: ScriptedEngine
) -> None:
    for message in ({"content": ""}, {"reasoning_content": "hm", "content": ""}):
        engine.say(answer_tokens(engine, message))
        known = replay(stream(server))
        assert known.end is not None and kinds(known.end)[-1] == "message"
        assert known.items[-1]["content"][0]["text"] == ""
        assert without_names(known.end) == without_names(respond(server))


def test_without_parallel_calls_the_answer_ends_before_the_second(
    server: Server, engine: ScriptedEngine
) -> None:
    engine.say(answer_tokens(engine, {"content": "", "tool_calls": CALLS}))
    response = respond(server, tools=[TOOL], parallel_tool_calls=False)
    assert response["status"] == "completed"
    [call_item] = [item for item in response["output"] if item["type"] == "function_call"]
    assert json.loads(call_item["arguments"]) == PLACES[0]


def test_the_client_of_openai(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say(answer_tokens(engine, ALL_CHANNELS))
    response = client.responses.create(model="small", input="hi", tools=[TOOL])  # type: ignore[list-item]
    assert response.output_text == "See 🙂"
    events = list(client.responses.create(model="small", input="hi", stream=True))
    final = events[-1]
    assert final.type == "response.completed" and final.response.output_text == "See 🙂"
    with client.responses.stream(model="small", input="hi") as streamed:
        texts = [event.delta for event in streamed if event.type == "response.output_text.delta"]
        assert "".join(texts) == "See 🙂" == streamed.get_final_response().output_text


class Place(BaseModel):
    place: str
    days: int


def test_the_client_of_openai_parses_what_it_asked_for(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    engine.say(answer_tokens(engine, {"content": json.dumps(PLACES[0])}), size=2)
    response = client.responses.parse(model="small", input="hi", text_format=Place)
    assert response.output_parsed == Place(place="Oslo", days=3)
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema"
    with client.responses.stream(model="small", input="hi", text_format=Place) as streamed:
        assert streamed.get_final_response().output_parsed == Place(place="Oslo", days=3)


def test_the_client_of_openai_calls_tools(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say(answer_tokens(engine, {"content": "", "tool_calls": CALLS[:1]}))
    tool = openai.pydantic_function_tool(Place, name="weather")["function"]
    offered: Any = {"type": "function", **tool}
    response = client.responses.parse(model="small", input="hi", tools=[offered])
    [called] = [item for item in response.output if item.type == "function_call"]
    assert called.parsed_arguments == PLACES[0]
    # What came back may be sent again, as objects of the client.
    history: Any = [{"role": "user", "content": "hi"}, *response.output]
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "rain"}
    engine.say(answer_tokens(engine, {"content": "It rains."}))
    again = client.responses.create(model="small", input=[*history, result], tools=[offered])
    assert again.output_text == "It rains."


def test_the_asynchronous_client_of_openai(server: Server, engine: ScriptedEngine) -> None:
    engine.say(answer_tokens(engine, {"reasoning_content": "hm", "content": "hello"}))

    async def go() -> None:
        async with async_openai_client(server) as client:
            response = await client.responses.create(model="small", input="hi")
            assert response.output_text == "hello"
            async with client.responses.stream(model="small", input="hi") as streamed:
                final = await streamed.get_final_response()
            assert final.output_text == "hello"
            with pytest.raises(openai.NotFoundError, match="not kept"):
                await client.responses.retrieve(response.id)

    server.run(go())


def test_fields_reach_the_engine(server: Server, engine: ScriptedEngine) -> None:
    engine.say(answer_tokens(engine, {"content": "x"}))
    response = respond(
        server,
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=11,
        stop=["STOP"],
        n=1,
        truncation="disabled",
        background=False,
        include=["reasoning.encrypted_content"],
        service_tier="auto",
    )
    _, params = engine.submitted[-1]
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
    assert (params.top_k, params.seed, params.logprobs) == (3, 11, None)
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (
        0.5,
        0.9,
        7,
    )


def test_effort_and_format_reach_the_prompt(server: Server, engine: ScriptedEngine) -> None:
    engine.say(answer_tokens(engine, {"content": "{}"}))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    json_schema = {"name": "a", "schema": schema, "strict": True}
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "none", "summary": "auto"}}, {"reasoning_effort": "none"}),
        ({"chat_template_kwargs": {"thinking": False}}, {"reasoning_effort": "none"}),
        ({"text": {"format": {"type": "text"}}}, {}),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"text": {"format": {"type": "json_schema", **json_schema}, "verbosity": "medium"}},
            {"response_format": {"type": "json_schema", "json_schema": json_schema}},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
            },
        ),
        (
            {"tools": [TOOL], "tool_choice": "none"},
            {"tools": [WEATHER], "tool_choice": "none"},
        ),
    ]
    for fields, chat_fields in asked:
        respond(server, **fields)
        messages = [{"role": "user", "content": "hi"}]
        answer = server.post("/v1/chat/completions", messages=messages, **chat_fields)
        assert answer.status == 200, answer.body
        assert engine.submitted[-2] == engine.submitted[-1], fields


def test_logprobs_are_of_the_tokens_of_the_message(silent: Scripted) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    _, engine = silent
    token_ids = answer_tokens(engine, {"reasoning_content": "hm", "content": "See 🙂 STOP it"})
    answer = trickle(silent, token_ids, **fields)
    response = checked_response(answer.json)
    assert response["top_logprobs"] == engine.submitted[-1][1].logprobs == 2
    entries = response["output"][1]["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "See 🙂 STOP it"
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -2.0]
    known = replay(trickle(silent, token_ids, **fields, stream=True).events)
    assert known.items[1]["content"][0]["logprobs"] == entries
    # The tokens that end it belong to it, though their text does not.
    cut = replay(trickle(silent, token_ids, **fields, stream=True, stop="STOP").events)
    assert cut.items[1]["content"][0]["text"] == "See 🙂 "
    assert cut.items[1]["content"][0]["logprobs"] == entries[: len("See 🙂 STOP".encode())]


def test_an_engine_that_dies_ends_the_stream_with_an_error(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):
        token_ids = answer_tokens(engine, {"reasoning_content": "hm", "content": "never whole"})

        async def go() -> list[Any]:
            task = asyncio.create_task(
                call(server.app, "POST", RESPONSES, {"input": "hi", "stream": True})
            )
            await until(lambda: engine.open)
            [request_id] = engine.open
            engine.tell(request_id, token_ids=tuple(token_ids[:-12]))
            await asyncio.sleep(0.01)
            engine.die(WorkerDiedError("stage 0 was killed"))
            return (await task).events

        events = server.run(go())
        known = replay(events)
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert known.error is not None and known.error["code"] == "engine_dead"
        assert known.end is not None and "stage 0 was killed" in known.end["error"]["message"]
        assert known.end["output"][-1]["status"] == "incomplete"
        assert known.end["usage"]["output_tokens"] == len(token_ids) - 12
        # Before the first event, an error is a status.
        answer = server.post(RESPONSES, input="hi", stream=True)
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")


def test_who_goes_is_not_answered_on(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go(body: bytes) -> None:
            async with exchange(server.app, "POST", RESPONSES, body) as state:
                await until(lambda: engine.open)
                if b"stream" in body:
                    [request_id] = engine.open
                    engine.tell(request_id, token_ids=(97,))
                    assert await state.next_body() is not None

        for number, fields in enumerate([{}, {"stream": True}], start=1):
            server.run(go(json.dumps({"input": "hi"} | fields).encode()))
            assert engine.num_aborted == number and not engine.open


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
    ],
)
def test_nothing_is_kept(server: Server, method: str, path: str) -> None:
    answer = server.call(method, path)
    assert answer.status == 404
    assert "resp_1" in answer.error["message"] and "not kept" in answer.error["message"]


def test_a_model_that_is_not_served(server: Server) -> None:
    answer = server.post(RESPONSES, input="hi", model="other")
    assert (answer.status, answer.error["param"]) == (404, "model")
