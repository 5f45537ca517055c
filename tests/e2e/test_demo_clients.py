"""Clients of the bundled model and its draft: answers obey, and numbers are the engine's."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import openai
import pytest
from pydantic import BaseModel

from stagecoach import LLM, SamplingParams
from stagecoach.request import TokenLogprobs
from tests.e2e.server_process import ServerProcess

TOLERANCE = 1e-4  # float32, in batches of other shapes
QUESTION = "Mia has 14 apples. She buys 3 boxes with 6 apples each. How many apples does Mia have?"


class Answer(BaseModel):
    kind: Literal["number", "word"]
    value: Literal[14, 18, 32]
    is_sure: bool


class PublishCard(BaseModel):
    """Publish a card."""

    id: int
    size: Literal["small", "large"]


class DeleteCard(BaseModel):
    """Delete a card."""

    id: int


@pytest.fixture
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pydantic_model_is_filled(client: openai.OpenAI, temperature: float) -> None:
    """The model has never seen JSON; drafts are verified under the grammar."""
    answer = client.chat.completions.parse(
        model="demo",
        messages=user(QUESTION),
        response_format=Answer,
        temperature=temperature,
        seed=1,
        n=2,
        max_completion_tokens=300,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Answer)


def test_forced_calls_come_and_obey(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(PublishCard), openai.pydantic_function_tool(DeleteCard)]
    fields: dict[str, Any] = {"model": "demo", "tools": tools, "max_completion_tokens": 300}
    for text, seed in (("Could you publish the card with id 69259; size small?", 1), ("Hi", 2)):
        for choice in ("required", {"type": "function", "function": {"name": "DeleteCard"}}):
            answer = client.chat.completions.parse(
                **fields, messages=user(text), tool_choice=choice, seed=seed, temperature=0.5
            )
            [told] = answer.choices
            is_named = choice != "required"
            assert told.finish_reason == ("stop" if is_named else "tool_calls")
            calls = told.message.tool_calls
            assert calls
            for call in calls:
                assert isinstance(call.function.parsed_arguments, PublishCard | DeleteCard)
                assert not is_named or call.function.name == "DeleteCard"


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "demo",
        "messages": user("Could you publish the card with id 69259; size small?"),
        "tools": [openai.pydantic_function_tool(PublishCard)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_completion_tokens": 300,
    }
    [whole] = client.chat.completions.create(**fields).choices
    with client.chat.completions.stream(**fields) as stream:
        [streamed] = stream.get_final_completion().choices
    assert whole.message.tool_calls and streamed.message.tool_calls
    [call], [other] = whole.message.tool_calls, streamed.message.tool_calls
    assert json.loads(call.function.arguments) == {"id": 69259, "size": "small"}
    assert call.function.arguments == other.function.arguments
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"


def test_many_forms_at_once(demo_server: ServerProcess) -> None:
    async def everybody() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            return await asyncio.gather(
                *(
                    client.completions.create(
                        model="demo",
                        prompt=QUESTION,
                        max_tokens=20,
                        seed=number,
                        extra_body={"structured_outputs": {"choice": [f"a{number}", f"b{number}"]}},
                    )
                    for number in range(8)
                )
            )

    for number, answer in enumerate(asyncio.run(everybody())):
        assert answer.choices[0].text in (f"a{number}", f"b{number}")
        assert answer.choices[0].finish_reason == "stop"


def test_logprobs_of_drafts_are_those_without(
    client: openai.OpenAI, demo_server: ServerProcess, demo_llm: LLM
) -> None:
    """Field bugs of the kind F11, in both forms of the answer, whole and streamed."""
    before = httpx2.get(f"{demo_server.url}/server_info").json()["stats"]["speculation"]
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=2)
    [output] = demo_llm.generate(["The list of"], params, use_tqdm=False)
    expected = output.outputs[0].logprobs
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(prompt="The list of", logprobs=2, **fields)
    streamed = client.completions.create(prompt="The list of", logprobs=2, stream=True, **fields)
    told = text.choices[0].logprobs
    assert told is not None and expected is not None
    assert_same(expected, told.token_logprobs or [], told.top_logprobs or [])
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert_same(
        expected,
        [value for piece in pieces if piece for value in piece.token_logprobs or []],
        [value for piece in pieces if piece for value in piece.top_logprobs or []],
    )
    [turn] = [demo_llm.chat(user(QUESTION), params)]
    expected = turn.request.outputs[0].logprobs
    chat = client.chat.completions.create(
        messages=user(QUESTION), logprobs=True, top_logprobs=2, **fields
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content and expected is not None
    speculation = httpx2.get(f"{demo_server.url}/server_info").json()["stats"]["speculation"]
    assert speculation["num_accepted_tokens"] > before["num_accepted_tokens"]
    assert_same(
        expected,
        [entry.logprob for entry in content],
        [{top.token: top.logprob for top in entry.top_logprobs} for entry in content],
    )


def assert_same(
    expected: list[TokenLogprobs], logprobs: list[Any], tops: list[dict[str, float]]
) -> None:
    assert len(expected) == len(logprobs) == len(tops) > 0
    for entry, logprob, top in zip(expected, logprobs, tops, strict=True):
        assert logprob == pytest.approx(entry.logprob, abs=TOLERANCE)
        likeliest = sorted(top.values(), reverse=True)[:2]
        assert likeliest == pytest.approx(list(entry.top_logprobs), abs=TOLERANCE)
