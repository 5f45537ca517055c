"""/v1/messages through the anthropic package, over an engine that says what a test wants.

The package checks every object and event against its own types.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent, ToolUseBlock
from pydantic import BaseModel, TypeAdapter

from stagecoach.api.messages_api import route
from stagecoach.errors import EngineDeadError, RequestError
from stagecoach.request import FinishReason
from tests.cpu.api.anthropic_client import anthropic_client, async_anthropic_client
from tests.cpu.api.asgi import exchange
from tests.cpu.api.chat_api.test_route import CALLS, answer_tokens
from tests.cpu.api.conftest import MODEL, Server
from tests.cpu.api.messages_api.conftest import Scripted
from tests.cpu.api.messages_api.test_translation import TOOL
from tests.cpu.api.scripted import ScriptedEngine, scripted_server

HI: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "hi"}],
}
ALL_CHANNELS = {"reasoning_content": "well …", "content": "I look. 🙂", "tool_calls": CALLS}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def said(message: Message) -> list[Any]:
    """Its content, without what is random of it."""
    return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]


def streamed(client: anthropic.Anthropic, **fields: Any) -> Message:
    with client.messages.stream(**HI | fields) as stream:
        return stream.get_final_message()


def test_the_models_are_listed_for_this_client_too(
    scripted: Scripted, client: anthropic.Anthropic
) -> None:
    names = scripted[0].get("/v1/models").json["data"]
    models = list(client.models.list())
    assert [model.id for model in models] == [item["id"] for item in names]
    model = client.models.retrieve(MODEL)
    assert model == models[0] and model.display_name == MODEL
    assert model.created_at.timestamp() == names[0]["created"]
    assert model.max_input_tokens == names[0]["max_model_len"] - 1


def test_a_message_of_all_blocks(scripted: Scripted, client: anthropic.Anthropic) -> None:
    engine = scripted[1]
    token_ids = answer_tokens(engine, ALL_CHANNELS)
    engine.say(token_ids)
    message = client.messages.create(**HI, tools=[TOOL])
    thinking, text, first, second = message.content
    assert thinking.type == "thinking" and thinking.thinking == "well …" and thinking.signature
    assert text.type == "text" and text.text == "I look. 🙂"
    assert isinstance(first, ToolUseBlock) and isinstance(second, ToolUseBlock)
    assert first.name == second.name == "weather" and first.id != second.id
    assert (first.input, second.input) == ({"place": "Oslo", "days": 3}, {"place": "Graz"})
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "tool_use")
    assert message.usage.input_tokens == len(engine.submitted[-1][0])
    assert message.usage.output_tokens == len(token_ids)
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == len(
        engine.tokenizer.encode("well …")
    )


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_the_whole_message_however_tokens_come(
    scripted: Scripted, client: anthropic.Anthropic, size: int
) -> None:
    engine = scripted[1]
    engine.say(answer_tokens(engine, ALL_CHANNELS), size=size, is_gradual=True)
    whole = client.messages.create(**HI, tools=[TOOL])
    told = streamed(client, tools=[TOOL])
    assert said(told) == said(whole)
    assert told.usage.to_dict() == whole.usage.to_dict()
    assert (told.stop_reason, told.role, told.type) == ("tool_use", "assistant", "message")


def test_the_events_of_a_stream(scripted: Scripted) -> None:
    server, engine = scripted
    engine.say(answer_tokens(engine, ALL_CHANNELS), size=1000)
    events = server.post("/v1/messages", **HI, stream=True).events
    assert [event["type"] for event in events] == [
        "message_start",
        *["content_block_start", *["content_block_delta"] * 2, "content_block_stop"],
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    for event in events:
        EVENT.validate_python(event)
    assert events[0]["message"]["content"] == []
    assert [
        event["delta"]["type"] for event in events if event["type"] == "content_block_delta"
    ] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
        "input_json_delta",
    ]


def test_an_answer_that_is_cut_is_the_same_in_both_ways(
    scripted: Scripted, client: anthropic.Anthropic
) -> None:
    engine = scripted[1]
    token_ids = answer_tokens(engine, ALL_CHANNELS)
    for length in range(1, len(token_ids), 13):
        engine.say(token_ids[:length], reason="length", size=5)
        whole = client.messages.create(**HI | {"max_tokens": length})
        told = streamed(client, max_tokens=length)
        assert whole.stop_reason == told.stop_reason == "max_tokens"
        assert said(told) == said(whole)
        assert whole.usage.output_tokens == told.usage.output_tokens == length
        for block, full in zip(whole.content, ("well …", "I look. 🙂", "", ""), strict=False):
            text = getattr(block, "thinking", getattr(block, "text", ""))
            # A character that was cut is told as one that is none.
            assert full.startswith(text.removesuffix("\ufffd"))


@pytest.mark.parametrize(
    ("message", "fields", "reason"),
    [
        ({"content": "yes"}, {}, "end_turn"),
        ({"content": ""}, {}, "end_turn"),
        ({"content": "", "tool_calls": CALLS}, {}, "tool_use"),
        ({"content": "a STOP b"}, {"stop_sequences": ["nix", "STOP"]}, "stop_sequence"),
    ],
)
def test_why_an_answer_ended(
    scripted: Scripted,
    client: anthropic.Anthropic,
    message: dict[str, Any],
    fields: dict[str, Any],
    reason: str,
) -> None:
    engine = scripted[1]
    engine.say(answer_tokens(engine, message))
    for answer in (client.messages.create(**HI | fields), streamed(client, **fields)):
        assert answer.stop_reason == reason
        assert answer.stop_sequence == ("STOP" if reason == "stop_sequence" else None)
    if reason == "stop_sequence":
        assert [block["text"] for block in said(answer)] == ["a "]


def test_the_models_length_is_another_end_than_max_tokens(
    scripted: Scripted, client: anthropic.Anthropic
) -> None:
    engine = scripted[1]
    engine.say(answer_tokens(engine, {"content": "yes"})[:-3], reason="length")
    assert client.messages.create(**HI).stop_reason == "model_context_window_exceeded"


def test_without_parallel_use_there_is_one_call(
    scripted: Scripted, client: anthropic.Anthropic
) -> None:
    engine = scripted[1]
    token_ids = answer_tokens(engine, {"content": "", "tool_calls": CALLS})
    engine.say(token_ids)
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    for answer in (
        client.messages.create(**HI, tools=[TOOL], tool_choice=choice),
        streamed(client, tools=[TOOL], tool_choice=choice),
    ):
        assert [block["input"] for block in said(answer)] == [{"place": "Oslo", "days": 3}]
        assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
        assert answer.usage.output_tokens < len(token_ids)


def test_a_loop_of_tools(scripted: Scripted, client: anthropic.Anthropic) -> None:
    """The package runs the tools, and learns by itself to send whole conversations."""
    engine = scripted[1]
    calls = []

    @anthropic.beta_tool
    def weather(place: str, days: int) -> str:
        """The weather of a place."""
        calls.append((place, days))
        engine.say(answer_tokens(engine, {"content": "It rains."}))
        return "rain"

    engine.say(answer_tokens(engine, {"content": "", "tool_calls": CALLS[:1]}))
    last = client.beta.messages.tool_runner(**HI, tools=[weather]).until_done()
    assert calls == [("Oslo", 3)]
    assert [block.model_dump()["text"] for block in last.content] == ["It rains."]
    prompt = engine.tokenizer.decode_bytes(engine.submitted[-1][0]).decode()
    assert prompt.count("rain<|close|>message") == 1


class City(BaseModel):
    name: str
    size: int


def test_structured_output(scripted: Scripted, client: anthropic.Anthropic) -> None:
    engine = scripted[1]
    engine.say(answer_tokens(engine, {"content": '{"name": "Graz", "size": 3}'}))
    expected = City(name="Graz", size=3)
    assert client.messages.parse(**HI, output_format=City).parsed_output == expected
    constraint = engine.submitted[-1][1].structured_outputs
    assert constraint is not None and constraint.grammar is not None
    assert '"size"' in constraint.grammar
    with client.messages.stream(**HI, output_format=City) as stream:
        assert stream.get_final_message().parsed_output == expected
    format_: Any = {"type": "json_schema", "schema": City.model_json_schema()}
    client.messages.create(**HI, output_config={"format": format_})
    assert engine.submitted[-1][1].structured_outputs is not None


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_must_come(
    scripted: Scripted, client: anthropic.Anthropic, choice: Any
) -> None:
    engine = scripted[1]
    engine.say(answer_tokens(engine, {"content": "", "tool_calls": CALLS[:1]}))
    answer = client.messages.create(**HI, tools=[TOOL], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    constraint = engine.submitted[-1][1].structured_outputs
    assert constraint is not None and "weather" in (constraint.grammar or "")


def test_the_usage_says_what_the_cache_spared(scripted: Scripted) -> None:
    server, engine = scripted
    token_ids = answer_tokens(engine, {"content": "yes"})
    engine.listen()

    async def talk() -> list[Any]:
        body = json.dumps(HI | {"stream": True}).encode()
        pieces = []
        async with exchange(server.app, "POST", "/v1/messages", body) as state:
            [request_id] = await _opened(engine)
            engine.tell(request_id, token_ids=tuple(token_ids[:-1]), num_cached_tokens=16)
            engine.tell(
                request_id,
                token_ids=tuple(token_ids[-1:]),
                num_cached_tokens=16,
                finish_reason=FinishReason.STOP,
            )
            while (piece := await state.next_body()) is not None:
                pieces.append(piece)
        return pieces

    events = _events(server.run(talk()))
    num_prompt = len(engine.submitted[-1][0])
    for usage in (events[0]["message"]["usage"], events[-2]["usage"]):
        assert usage["input_tokens"] == num_prompt - 16
        assert usage["cache_read_input_tokens"] == 16
        assert usage["cache_creation_input_tokens"] == 0
    assert events[-2]["usage"]["output_tokens"] == len(token_ids)


def test_a_silent_stream_says_that_it_lives(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, engine = scripted
    monkeypatch.setattr(route, "PING_SECONDS", 0.02)
    token_ids = answer_tokens(engine, {"content": "yes"})
    engine.listen()

    async def talk() -> list[Any]:
        body = json.dumps(HI | {"stream": True}).encode()
        pieces = []
        async with exchange(server.app, "POST", "/v1/messages", body) as state:
            [request_id] = await _opened(engine)
            # Nothing has come yet: the message opens all the same.
            pieces += [await state.next_body(), await state.next_body()]
            engine.tell(
                request_id,
                token_ids=tuple(token_ids),
                num_cached_tokens=16,
                finish_reason=FinishReason.STOP,
            )
            while (piece := await state.next_body()) is not None:
                pieces.append(piece)
        return pieces

    events = _events(server.run(talk()))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    num_prompt = len(engine.submitted[-1][0])
    assert events[0]["message"]["usage"]["input_tokens"] == num_prompt
    # What the cache spared is known only now.
    assert events[-2]["usage"]["input_tokens"] == num_prompt - 16


def test_what_is_refused_behind_the_opening_is_about_a_field_of_the_client(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, engine = scripted
    monkeypatch.setattr(route, "PING_SECONDS", 0.02)
    engine.listen()
    schema = {"type": "json_schema", "schema": {"type": "object"}}

    async def talk() -> list[Any]:
        body = json.dumps(HI | {"stream": True, "output_config": {"format": schema}}).encode()
        async with exchange(server.app, "POST", "/v1/messages", body) as state:
            [request_id] = await _opened(engine)
            pieces = [await state.next_body()]
            engine.open.pop(request_id)(RequestError("structured_outputs", "not this"))
            while (piece := await state.next_body()) is not None:
                pieces.append(piece)
        return pieces

    event = _events(server.run(talk()))[-1]
    assert event["error"]["message"] == "output_config.format: not this"


async def _opened(engine: ScriptedEngine) -> list[int]:
    for _ in range(500):
        if engine.open:
            return list(engine.open)
        await asyncio.sleep(0.01)
    raise AssertionError("no request came")


def _events(pieces: list[Any]) -> list[Any]:
    blocks = b"".join(pieces).decode().split("\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in blocks if block]


@pytest.mark.parametrize("when", ["queued", "in_stream", "whole"])
def test_a_client_that_goes_ends_its_request(scripted: Scripted, when: str) -> None:
    server, engine = scripted
    token_ids = tuple(answer_tokens(engine, {"content": "yes"})[:-3])
    engine.listen()
    num_aborted = engine.num_aborted

    async def go() -> None:
        async with async_anthropic_client(server) as client:
            task = asyncio.create_task(_read(client, stream=when != "whole"))
            [request_id] = await _opened(engine)
            if when == "in_stream":
                engine.tell(request_id, token_ids=token_ids)
                await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            for _ in range(500):
                if not engine.open:
                    return
                await asyncio.sleep(0.01)

    async def _read(client: anthropic.AsyncAnthropic, *, stream: bool) -> None:
        if not stream:
            await client.messages.create(**HI)
            return
        async with client.messages.stream(**HI) as events:
            async for _ in events:
                continue

    server.run(go())
    assert not engine.open and engine.num_aborted == num_aborted + 1


def test_async_clients(scripted: Scripted) -> None:
    server, engine = scripted
    engine.say(answer_tokens(engine, ALL_CHANNELS))

    async def talk() -> tuple[Message, Message, int]:
        async with async_anthropic_client(server) as client:
            whole = await client.messages.create(**HI)
            async with client.messages.stream(**HI) as stream:
                told = await stream.get_final_message()
            counted = await client.messages.count_tokens(model=MODEL, messages=HI["messages"])
            return whole, told, counted.input_tokens

    whole, told, num_tokens = server.run(talk())
    assert said(whole) == said(told)
    assert num_tokens == whole.usage.input_tokens


def test_an_agents_request(scripted: Scripted) -> None:
    """As coding agents send it: beta paths and headers, cache marks, fields of tomorrow."""
    server, engine = scripted
    engine.say(answer_tokens(engine, {"content": "yes"}))
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = HI | {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a1;"},
            {"type": "text", "text": "You are an agent.", **mark},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **mark}]}],
        "tools": [TOOL | mark | {"eager_input_streaming": True}],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "someone"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "service_tier": "auto",
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x-1,y-2", "x-api-key": "k"}
    answer = server.call("POST", "/v1/messages?beta=true", body, headers)
    assert answer.status == 200, answer.body
    assert [event["type"] for event in answer.events][-1] == "message_stop"
    prompt = engine.tokenizer.decode_bytes(engine.submitted[-1][0]).decode()
    assert "You are an agent." in prompt and "cch=" not in prompt


def test_counting_needs_no_engine(model_folder: Any) -> None:
    with scripted_server(model_folder, is_loaded=False) as (server, _):
        answer = server.post("/v1/messages/count_tokens", messages=HI["messages"])
        assert answer.status == 200 and answer.json["input_tokens"] > 0
        refused = server.post("/v1/messages", **HI)
        assert (refused.status, refused.error["type"]) == (503, "overloaded_error")
        assert refused.headers["retry-after"]


@pytest.fixture(scope="module")
def strict(model_folder: Any) -> Iterator[Scripted]:
    """A server with a key and little room."""
    with scripted_server(
        model_folder, api_keys=("secret",), max_body_bytes=2000, max_queue_requests=1
    ) as scripted:
        yield scripted


def test_both_headers_carry_a_key(strict: Scripted) -> None:
    server, engine = strict
    engine.say(answer_tokens(engine, {"content": "yes"}))
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert server.call("POST", "/v1/messages", HI, headers).status == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Basic secret"}):
        answer = server.call("POST", "/v1/messages", HI, headers)
        assert answer.status == 401
        assert ErrorResponse.model_validate(answer.json).error.type == "authentication_error"
        assert answer.json["request_id"] == answer.headers["request-id"]


def test_errors_are_the_packages(strict: Scripted) -> None:
    server, engine = strict
    engine.say(answer_tokens(engine, {"content": "yes"}))
    with anthropic_client(server, api_key="secret") as client:
        message = client.messages.create(**HI)
        assert message._request_id
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**HI | {"max_tokens": 0})
        assert refused.value.type == "invalid_request_error"
        assert refused.value.api_message == "max_tokens: must be at least 1, not 0"
        assert refused.value.request_id
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(**HI | {"model": "claude"})
        assert unknown.value.type == "not_found_error"
        with pytest.raises(anthropic.RequestTooLargeError):
            client.messages.create(**HI, system="x" * 3000)
        with pytest.raises(anthropic.NotFoundError):
            client.post("/v1/messages/batches", body={}, cast_to=object)
        engine.listen()
        _fill(server, engine, client)


def _fill(server: Server, engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    """Take all places; the next is told to come again, as the package does."""

    async def full() -> None:
        body = json.dumps(HI).encode()
        headers = {"x-api-key": "secret"}
        async with (
            exchange(server.app, "POST", "/v1/messages", body, headers),
            exchange(server.app, "POST", "/v1/messages", body, headers),
            exchange(server.app, "POST", "/v1/messages", body, headers),
            async_anthropic_client(server) as other,
        ):
            while len(engine.open) < 3:
                await asyncio.sleep(0.01)
            with pytest.raises(anthropic.OverloadedError) as refused:
                await other.with_options(api_key="secret").messages.create(**HI)
            assert refused.value.status_code == 529
            assert refused.value.type == "overloaded_error"
            assert refused.value.response.headers["retry-after"]

    server.run(full())


def test_an_error_within_a_stream_is_an_event(model_folder: Any) -> None:
    with scripted_server(model_folder) as (server, engine), anthropic_client(server) as client:
        token_ids = tuple(answer_tokens(engine, {"content": "yes"})[:-3])

        async def talk() -> list[Any]:
            body = json.dumps(HI | {"stream": True}).encode()
            pieces = []
            async with exchange(server.app, "POST", "/v1/messages", body) as state:
                [request_id] = await _opened(engine)
                engine.tell(request_id, token_ids=token_ids)
                pieces.append(await state.next_body())
                engine.die(EngineDeadError("gone"))
                while (piece := await state.next_body()) is not None:
                    pieces.append(piece)
            return pieces

        pieces = server.run(talk())
        # Clients go by the name of the event.
        assert pieces[-1].startswith(b"event: error\n")
        events = _events(pieces)
        assert events[0]["type"] == "message_start"
        told = ErrorResponse.model_validate(events[-1])
        assert told.error.type == "api_error" and "gone" in told.error.message
        assert told.request_id
        # The next asks an engine that is gone, and gets a status.
        with pytest.raises(anthropic.InternalServerError) as dead:
            client.messages.create(**HI)
        assert dead.value.status_code == 503


def test_the_next_turn_finds_this_one_in_the_cache(server: Server) -> None:
    """Over a real engine: the counts are of what it did."""
    messages = [{"role": "user", "content": "what is there to find in a cache?"}]
    fields = {"model": MODEL, "max_tokens": 4, "thinking": {"type": "disabled"}}
    first = server.post("/v1/messages", **fields, messages=messages).json
    again = server.post("/v1/messages", **fields, messages=messages).json
    longer = [*messages, {"role": "assistant", "content": "nothing"}, messages[0]]
    second = server.post("/v1/messages", **fields, messages=longer).json
    counted = [
        server.post("/v1/messages/count_tokens", messages=asked, thinking={"type": "disabled"}).json
        for asked in (messages, messages, longer)
    ]
    for answer, count in zip((first, again, second), counted, strict=True):
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count["input_tokens"]
        assert usage["output_tokens"] <= 4
    assert again["usage"]["cache_read_input_tokens"] > 0
    assert second["usage"]["cache_read_input_tokens"] > 0
