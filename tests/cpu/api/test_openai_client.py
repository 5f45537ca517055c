"""The `openai` package over a socket, with an engine that says what a test wants."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from stagecoach.errors import EngineDeadError, RequestError
from tests.cpu.api.chat_api.test_route import CALLS, MESSAGES, WEATHER, answer_tokens
from tests.cpu.api.conftest import Server
from tests.cpu.api.loopback import listening, until
from tests.cpu.api.scripted import ScriptedEngine, scripted_server

LETTERS = [97, 98, 99]


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """The weather of a place."""

    place: str
    days: int


PERSON = {"content": '{"name": "Ann", "age": 3}'}
GET_WEATHER = {"function": {"name": "GetWeather", "arguments": '{"place": "Oslo", "days": 3}'}}
TOOLS: list[Any] = [WEATHER]


class Talk:
    """A served engine, and the way to speak to it."""

    def __init__(self, server: Server, engine: ScriptedEngine) -> None:
        self.engine = engine
        self._server = server

    def ask(self, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
        """Run `work` with a client; what it returns."""

        async def whole() -> Any:
            async with (
                listening(self._server.app) as url,
                openai.AsyncOpenAI(
                    base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20
                ) as client,
            ):
                return await work(client)

        return self._server.run(whole())

    def ask_sync(self, work: Callable[[openai.OpenAI], Any]) -> Any:
        """The same with the client that blocks."""

        async def whole() -> Any:
            async with listening(self._server.app) as url:
                with openai.OpenAI(
                    base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20
                ) as client:
                    return await asyncio.to_thread(work, client)

        return self._server.run(whole())

    def say(self, message: dict[str, Any], size: int = 3) -> None:
        self.engine.say(answer_tokens(self.engine, message), size=size)

    @property
    def grammar(self) -> str | None:
        """What the last request must obey."""
        constraint = self.engine.submitted[-1][1].structured_outputs
        return None if constraint is None else constraint.grammar


@pytest.fixture
def talk(model_folder: Path) -> Iterator[Talk]:
    with scripted_server(model_folder) as (server, engine):
        yield Talk(server, engine)


def test_a_pydantic_model_comes_back(talk: Talk) -> None:
    talk.say(PERSON | {"reasoning_content": "who?"})
    fields: dict[str, Any] = {"model": "small", "messages": MESSAGES, "response_format": Person}

    async def whole(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.parse(**fields)

    for answer in (
        talk.ask(whole),
        talk.ask_sync(lambda client: client.chat.completions.parse(**fields)),
    ):
        [choice] = answer.choices
        assert choice.message.parsed == Person(name="Ann", age=3)
        assert choice.message.reasoning_content == "who?"
        assert choice.finish_reason == "stop"
        assert talk.grammar is not None


def test_a_pydantic_model_is_streamed(talk: Talk) -> None:
    talk.say(PERSON, size=1)
    fields: dict[str, Any] = {"model": "small", "messages": MESSAGES, "response_format": Person}

    async def streamed(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_completion()

    def streamed_sync(client: openai.OpenAI) -> Any:
        with client.chat.completions.stream(**fields) as stream:
            return [event.type for event in stream], stream.get_final_completion()

    for kinds, final in (talk.ask(streamed), talk.ask_sync(streamed_sync)):
        assert final.choices[0].message.parsed == Person(name="Ann", age=3)
        assert kinds.count("content.done") == 1 and "content.delta" in kinds


def test_a_named_function_is_called_with_parsed_arguments(talk: Talk) -> None:
    talk.say({"content": "", "tool_calls": [GET_WEATHER]})

    async def whole(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.parse(
            model="small",
            messages=MESSAGES,  # type: ignore[arg-type]
            tools=[openai.pydantic_function_tool(GetWeather)],
            tool_choice={"type": "function", "function": {"name": "GetWeather"}},
        )

    [choice] = talk.ask(whole).choices
    assert choice.finish_reason == "stop" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.function.parsed_arguments == GetWeather(place="Oslo", days=3)
    assert talk.grammar is not None and "GetWeather" in talk.grammar


@pytest.mark.parametrize("size", [1, 1000])
def test_several_calls_are_streamed(talk: Talk, size: int) -> None:
    talk.say({"content": "I look.", "tool_calls": CALLS}, size=size)

    async def streamed(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(
            model="small",
            messages=MESSAGES,  # type: ignore[arg-type]
            tools=TOOLS,
            tool_choice="required",
        ) as stream:
            done = [
                (event.index, json.loads(event.arguments))
                async for event in stream
                if event.type == "tool_calls.function.arguments.done"
            ]
            return done, await stream.get_final_completion()

    done, final = talk.ask(streamed)
    expected = [{"place": "Oslo", "days": 3}, {"place": "Graz"}]
    assert done == list(enumerate(expected))
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == expected


def test_the_results_of_calls_go_back(talk: Talk) -> None:
    """The second turn of a conversation with tools, as the documentation of the client has it."""
    talk.say({"content": "", "tool_calls": CALLS})

    async def turns(client: openai.AsyncOpenAI) -> Any:
        messages: list[Any] = [*MESSAGES]
        first = await client.chat.completions.create(model="small", messages=messages, tools=TOOLS)
        message = first.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        talk.say({"content": "It is sunny."})
        return await client.chat.completions.create(model="small", messages=messages, tools=TOOLS)

    answer = talk.ask(turns)
    assert answer.choices[0].message.content == "It is sunny."
    prompt = talk.engine.tokenizer.decode_bytes(talk.engine.submitted[-1][0]).decode()
    assert prompt.count("sunny") == 2 and "Oslo" in prompt


def test_vllms_field_of_completions(talk: Talk) -> None:
    talk.engine.say(LETTERS)

    async def whole(client: openai.AsyncOpenAI) -> Any:
        return await client.completions.create(
            model="small", prompt="a", extra_body={"structured_outputs": {"choice": ["abc", "b"]}}
        )

    assert talk.ask(whole).choices[0].text == "abc"
    assert talk.engine.submitted[-1][1].structured_outputs.choice == ("abc", "b")


def test_headers_can_be_read(talk: Talk) -> None:
    talk.say({"content": "hello"})

    async def raw(client: openai.AsyncOpenAI) -> Any:
        response = await client.chat.completions.with_raw_response.create(
            model="small",
            messages=MESSAGES,  # type: ignore[arg-type]
            extra_headers={"x-request-id": "mine"},
        )
        return response.headers, response.parse(), response.request_id

    headers, answer, request_id = talk.ask(raw)
    assert headers["x-request-id"] == request_id == "mine"
    assert answer.choices[0].message.content == "hello"


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_the_engine_refuses_is_a_bad_request(talk: Talk, stream: bool) -> None:
    talk.engine.refusal = RequestError("structured_outputs", "too large")

    async def whole(client: openai.AsyncOpenAI) -> None:
        await client.chat.completions.create(
            model="small",
            messages=MESSAGES,  # type: ignore[arg-type]
            response_format={"type": "json_object"},
            stream=stream,
        )

    with pytest.raises(openai.BadRequestError) as caught:
        talk.ask(whole)
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_value")


def test_a_stream_that_breaks_raises(talk: Talk) -> None:
    async def streamed(client: openai.AsyncOpenAI) -> list[str]:
        stream = await begin(client)
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)
            if len(texts) == 1:
                talk.engine.die(EngineDeadError("a worker is gone"))
        return texts

    async def begin(client: openai.AsyncOpenAI) -> Any:
        asking = asyncio.create_task(streaming_answer(client))
        await until(lambda: talk.engine.open)
        talk.engine.tell(1, token_ids=tuple(LETTERS))
        return await asking

    with pytest.raises(openai.APIError, match="a worker is gone"):
        talk.ask(streamed)


async def streaming_answer(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(
        model="small",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        reasoning_effort="none",
        **options,
    )


def test_a_stream_that_is_left_aborts_all_its_choices(talk: Talk) -> None:
    """Field bugs of the kind G01: the choices of one request end with it."""
    engine = talk.engine

    async def left(client: openai.AsyncOpenAI) -> None:
        asking = asyncio.create_task(
            streaming_answer(client, n=3, extra_body={"skip_reading_prefix_cache": True})
        )
        await until(lambda: len(engine.open) == 3)
        engine.tell(2, token_ids=tuple(LETTERS))
        stream = await asking
        async for chunk in stream:
            if chunk.choices[0].delta.content == "abc":
                break
        assert chunk.choices[0].index == 1
        await stream.close()
        await until(lambda: not engine.open)

    talk.ask(left)
    assert sorted(engine.aborted) == [1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_cancelled_call_aborts_while_it_waits(talk: Talk, stream: bool, n: int) -> None:
    """Nothing has been answered: the request is in a queue, or in its prefill."""
    engine = talk.engine

    async def cancelled(client: openai.AsyncOpenAI) -> None:
        asking = asyncio.create_task(
            client.chat.completions.create(  # type: ignore[call-overload]
                model="small", messages=MESSAGES, stream=stream, n=n
            )
        )
        await until(lambda: engine.open)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not engine.open)

    talk.ask(cancelled)
    # Those behind the first, which the prefix cache lets wait for it, were never submitted.
    assert set(engine.aborted) == set(range(1, n + 1))
    assert len(engine.submitted) == 1
