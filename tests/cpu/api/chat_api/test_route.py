"""/v1/chat/completions over a real engine whose model is made to write what a test wants.

The parsers have tests of their own; here is what becomes of their messages.
"""

import asyncio
import json
from typing import Any

import pytest

from stagecoach.request import FinishReason
from stagecoach.text.chat_format import answer_segments, encode_segment
from tests.cpu.api import asgi
from tests.cpu.api.conftest import Server
from tests.cpu.api.scripted import ScriptedEngine, scripted_server
from tests.small_engine import ONLY_LETTERS

LETTER_BIAS = {str(token_id): bias for token_id, bias in ONLY_LETTERS.items()}
MESSAGES = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALLS = [
    {"function": {"name": "weather", "arguments": '{"place": "Oslo", "days": 3}'}},
    {"function": {"name": "weather", "arguments": '{"place": "Graz"}'}},
]


def answer_tokens(engine: ScriptedEngine, message: dict[str, Any]) -> list[int]:
    """What a model writes that answers with this message."""
    return [
        token_id
        for segment in answer_segments(message)
        for token_id in encode_segment(engine.tokenizer, segment)
    ]


def merged(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that the deltas of a stream add up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function" and call["id"] and call["function"]["name"]
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"][
                        "arguments"
                    ]
    return message


def test_the_engine_gets_the_rendered_conversation(server: Server) -> None:
    rendered = server.post("/tokenize", messages=MESSAGES).json
    body = server.post(
        "/v1/chat/completions", messages=MESSAGES, max_tokens=5, logit_bias=LETTER_BIAS, seed=1
    ).json
    assert body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == rendered["count"]
    assert body["usage"]["completion_tokens"] == 5
    # The answer begins in the thinking channel and never leaves it.
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["reasoning_content"]) == 5
    assert choice["message"]["content"] == ""


def test_without_thinking_the_answer_is_content(server: Server) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 5, "logit_bias": LETTER_BIAS, "seed": 1}
    for option in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking": False}}):
        body = server.post("/v1/chat/completions", **fields, **option).json
        [choice] = body["choices"]
        assert len(choice["message"]["content"]) == 5
        assert choice["message"]["reasoning_content"] is None
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_the_answer_may_be_as_long_as_the_model(server: Server) -> None:
    messages = [{"role": "user", "content": "x" * 400}]
    body = server.post("/v1/chat/completions", messages=messages, ignore_eos=True, seed=1).json
    assert body["usage"]["total_tokens"] == 512 and body["usage"]["completion_tokens"] > 16
    assert body["choices"][0]["finish_reason"] == "length"


def test_reasoning_effort_reaches_the_prompt(server: Server) -> None:
    prompts = [
        server.post("/tokenize", messages=MESSAGES, chat_template_kwargs=options).json["tokens"]
        for options in ({}, {"thinking_effort": "low"})
    ]
    fields = {"messages": MESSAGES, "max_tokens": 1}
    usage = server.post("/v1/chat/completions", **fields, reasoning_effort="low").json["usage"]
    assert usage["prompt_tokens"] == len(prompts[1]) > len(prompts[0])


def test_tools_and_their_choice_reach_the_prompt(server: Server) -> None:
    counts = [
        server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, **fields).json[
            "usage"
        ]["prompt_tokens"]
        for fields in (
            {"tool_choice": "none"},
            {"tools": []},
            {"tools": [WEATHER], "tool_choice": "auto"},
            {"tools": [WEATHER], "tool_choice": "none"},
        )
    ]
    assert counts[0] == counts[1] < counts[2] < counts[3]


def test_a_developer_speaks_as_the_system(server: Server) -> None:
    tokens = [
        server.post("/tokenize", messages=[{"role": role, "content": "be brief"}]).json["tokens"]
        for role in ("system", "developer", "user")
    ]
    assert tokens[0] == tokens[1] != tokens[2]


def test_parts_of_text_are_one_text(server: Server) -> None:
    parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    texts = [
        server.post("/tokenize", messages=[{"role": "user", "content": content}]).json["tokens"]
        for content in ("be brief", parts)
    ]
    # Letters are tokens here, so that pieces encode as the whole.
    assert texts[0] == texts[1]


def test_the_next_turn_finds_this_one_in_the_cache(server: Server) -> None:
    fields = {"max_tokens": 2, "cache_salt": "turns", "reasoning_effort": "none", "seed": 1}
    fields |= {"logit_bias": LETTER_BIAS}
    first = server.post("/v1/chat/completions", messages=MESSAGES, **fields).json
    answer = first["choices"][0]["message"]["content"]
    longer = [*MESSAGES, {"role": "assistant", "content": answer}, MESSAGES[0]]
    second = server.post("/v1/chat/completions", messages=longer, **fields).json
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["usage"]["prompt_tokens"]


def test_a_wish_behind_the_messages_is_not_in_the_way_of_the_next_turn(server: Server) -> None:
    """The next prompt repeats the messages and not what was asked of this one answer."""
    fields = {"max_tokens": 2, "cache_salt": "wishes"}
    form = {"type": "json_object"}
    server.post("/v1/chat/completions", messages=MESSAGES, response_format=form, **fields)
    longer = [*MESSAGES, {"role": "assistant", "content": "{}"}, MESSAGES[0]]
    second = server.post("/v1/chat/completions", messages=longer, **fields).json
    options = {"add_generation_prompt": False}
    shared = server.post("/tokenize", messages=MESSAGES, chat_template_kwargs=options).json
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": shared["count"]}


def test_logprobs_have_bytes_and_alternatives(server: Server) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 4, "seed": 1, "logit_bias": LETTER_BIAS}
    fields |= {"logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"thinking": False}}
    [choice] = server.post("/v1/chat/completions", **fields).json["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    events = server.post("/v1/chat/completions", **fields, stream=True).events
    streamed = [
        entry["token"]
        for event in events[:-1]
        if event["choices"][0]["logprobs"] is not None
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == [entry["token"] for entry in entries]


def test_the_first_piece_of_each_choice_opens_its_message(server: Server) -> None:
    events = server.post(
        "/v1/chat/completions", messages=MESSAGES, max_tokens=3, n=2, stream=True, ignore_eos=True
    ).events
    for index in range(2):
        pieces = [
            event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index
        ]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert pieces[-1]["delta"] == {} and pieces[-1]["finish_reason"] == "length"
        assert all(piece["finish_reason"] is None for piece in pieces[:-1])


def test_a_message_of_all_channels(model_folder: Any) -> None:
    message = {"reasoning_content": "well …", "content": "I look.", "tool_calls": CALLS}
    with scripted_server(model_folder) as (server, engine):
        token_ids = answer_tokens(engine, message)
        engine.say(token_ids)
        answer = server.post("/v1/chat/completions", messages=MESSAGES, tools=[WEATHER])
        [choice] = answer.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        told = choice["message"]
        assert told["content"] == "I look."
        assert told["reasoning_content"] == told["reasoning"] == "well …"
        calls = told["tool_calls"]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [
            {"place": "Oslo", "days": 3},
            {"place": "Graz"},
        ]
        assert {(call["type"], call["function"]["name"]) for call in calls} == {
            ("function", "weather")
        }
        assert len({call["id"] for call in calls}) == 2
        usage = answer.json["usage"]
        assert usage["completion_tokens"] == len(token_ids)
        num_reasoning = len(engine.tokenizer.encode("well …"))
        assert usage["completion_tokens_details"]["reasoning_tokens"] == num_reasoning


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_the_whole_message_however_tokens_come(model_folder: Any, size: int) -> None:
    message = {"reasoning_content": "hm", "content": "See 🙂", "tool_calls": CALLS}
    with scripted_server(model_folder) as (server, engine):
        token_ids = answer_tokens(engine, message)
        engine.say(token_ids, size=size, is_gradual=True)
        events = server.post(
            "/v1/chat/completions", messages=MESSAGES, tools=[WEATHER], stream=True
        ).events
        assert events[-1] == "[DONE]"
        told = merged(events)
        assert (told["reasoning_content"], told["content"]) == ("hm", "See 🙂")
        assert [json.loads(call["arguments"]) for call in told["tool_calls"]] == [
            {"place": "Oslo", "days": 3},
            {"place": "Graz"},
        ]
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 1000])
def test_without_parallel_calls_the_answer_ends_before_the_second(
    model_folder: Any, size: int
) -> None:
    message = {"content": "", "tool_calls": CALLS}
    with scripted_server(model_folder) as (server, engine):
        token_ids = answer_tokens(engine, message)
        engine.say(token_ids, size=size)
        fields = {"messages": MESSAGES, "tools": [WEATHER], "parallel_tool_calls": False}
        body = server.post("/v1/chat/completions", **fields).json
        [choice] = body["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["place"] == "Oslo"
        assert body["usage"]["completion_tokens"] < len(token_ids)
        told = merged(server.post("/v1/chat/completions", **fields, stream=True).events)
        assert len(told["tool_calls"]) == 1


def test_a_stop_string_is_looked_for_in_what_the_client_reads(model_folder: Any) -> None:
    message = {"reasoning_content": "think", "content": "a response STOP here"}
    with scripted_server(model_folder) as (server, engine):
        engine.say(answer_tokens(engine, message), size=1)
        # A marker's name is no text.
        fields = {"messages": MESSAGES, "stop": ["STOP", "think<"]}
        body = server.post("/v1/chat/completions", **fields).json
        [choice] = body["choices"]
        assert choice["message"]["content"] == "a response "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
        assert engine.num_aborted == 1


def test_an_answer_that_is_cut_loses_no_text_and_leaks_no_marker(model_folder: Any) -> None:
    message = {"reasoning_content": "thinking", "content": "an answer", "tool_calls": CALLS}
    with scripted_server(model_folder) as (server, engine):
        token_ids = answer_tokens(engine, message)
        for length in range(1, len(token_ids), 3):
            engine.say(token_ids[:length], reason="length")
            [choice] = server.post("/v1/chat/completions", messages=MESSAGES).json["choices"]
            assert choice["finish_reason"] == "length"
            told = choice["message"]
            assert "thinking".startswith(told["reasoning_content"] or "")
            assert "an answer".startswith(told["content"] or "")


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")]
)
def test_the_finish_reason_of_calls_is_openais(model_folder: Any, choice: Any, reason: str) -> None:
    """A named function was expected: its answer has just stopped. Cut calls are cut."""
    with scripted_server(model_folder) as (server, engine):
        token_ids = answer_tokens(engine, {"content": "", "tool_calls": CALLS})
        fields = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice}
        engine.say(token_ids)
        [told] = server.post("/v1/chat/completions", **fields).json["choices"]
        assert told["finish_reason"] == reason and len(told["message"]["tool_calls"]) == 2
        events = server.post("/v1/chat/completions", **fields, stream=True).events
        assert events[-2]["choices"][0]["finish_reason"] == reason
        engine.say(token_ids[:-9], reason="length")
        [told] = server.post("/v1/chat/completions", **fields).json["choices"]
        assert told["finish_reason"] == "length" and told["message"]["tool_calls"]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("options", [{}, {"parallel_tool_calls": False}, {"stop": ["I l", "raz"]}])
def test_each_token_has_its_logprobs_also_those_of_calls(
    model_folder: Any, size: int, options: dict[str, Any]
) -> None:
    """Stops count: in reasoning and content, and where a second call begins; not in calls."""
    message = {"reasoning_content": "hm", "content": "See", "tool_calls": CALLS}
    if "stop" in options:
        message["content"] = "I look there"
    with scripted_server(model_folder) as (server, engine):
        engine.say(answer_tokens(engine, message), size=size)
        fields: dict[str, Any] = {"messages": MESSAGES, "tools": [WEATHER], "logprobs": True}
        fields |= options
        body = server.post("/v1/chat/completions", **fields).json
        [choice] = body["choices"]
        num_tokens = body["usage"]["completion_tokens"]
        assert len(choice["logprobs"]["content"]) == num_tokens
        events = server.post(
            "/v1/chat/completions",
            **fields,
            stream=True,
            stream_options={"include_usage": True},
        ).events
        pieces = [event["choices"][0]["logprobs"] for event in events[:-2]]
        streamed = [entry for piece in pieces if piece for entry in piece["content"]]
        assert streamed == choice["logprobs"]["content"]
        assert events[-2]["usage"]["completion_tokens"] == num_tokens
        if "stop" in options:
            assert choice["stop_reason"] == "I l" and "tool_calls" not in choice["message"]


def test_a_stop_string_in_arguments_is_no_stop(model_folder: Any) -> None:
    with scripted_server(model_folder) as (server, engine):
        engine.say(answer_tokens(engine, {"content": "Now", "tool_calls": CALLS}))
        fields = {"messages": MESSAGES, "tools": [WEATHER], "stop": ["Graz", "tools"]}
        [choice] = server.post("/v1/chat/completions", **fields).json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        arguments = [
            json.loads(c["function"]["arguments"]) for c in choice["message"]["tool_calls"]
        ]
        assert arguments[1] == {"place": "Graz"}


@pytest.mark.parametrize("size", [1, 1000])
def test_each_of_n_choices_has_its_calls(model_folder: Any, size: int) -> None:
    """Field bugs of the kind H10: streams at once share nothing, and no delta is empty."""
    with scripted_server(model_folder) as (server, engine):
        message = {"reasoning_content": "hm", "content": "", "tool_calls": CALLS}
        engine.say(answer_tokens(engine, message), size=size)
        fields = {"messages": MESSAGES, "tools": [WEATHER], "n": 3}
        body = server.post("/v1/chat/completions", **fields).json
        choices = body["choices"]
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 * len("hm")}
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
        assert len(ids) == 6
        events = server.post("/v1/chat/completions", **fields, stream=True).events
        for index in range(3):
            told = merged(events, index)
            assert [json.loads(call["arguments"])["place"] for call in told["tool_calls"]] == [
                "Oslo",
                "Graz",
            ]
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert all(call["function"].get("name") or call["function"]["arguments"] for call in calls)


def test_streams_at_once_do_not_mix(model_folder: Any) -> None:
    """Field bugs of the kind H10: their tokens come by turns."""
    places = ("Oslo", "Graz", "Rome")
    body = json.dumps({"messages": MESSAGES, "tools": [WEATHER], "stream": True}).encode()
    with scripted_server(model_folder, max_queue_requests=2) as (server, engine):
        answers = [
            answer_tokens(
                engine,
                {
                    "reasoning_content": place,
                    "content": "",
                    "tool_calls": [
                        {"function": {"name": "weather", "arguments": json.dumps({"place": text})}}
                        for text in (place, f"{place} again")
                    ],
                },
            )
            for place in places
        ]

        async def ask_all() -> list[asgi.Answer]:
            asked = [
                asyncio.create_task(asgi.call(server.app, "POST", "/v1/chat/completions", body))
                for _ in places
            ]
            while len(engine.open) < len(places):
                await asyncio.sleep(0.01)
            by_request = dict(zip(sorted(engine.open), answers, strict=True))
            for number in range(max(map(len, answers))):
                for request_id, token_ids in by_request.items():
                    news: dict[str, Any] = {"token_ids": tuple(token_ids[number : number + 1])}
                    if number == len(token_ids) - 1:
                        news["finish_reason"] = FinishReason.STOP
                    if request_id in engine.open:
                        engine.tell(request_id, **news)
                await asyncio.sleep(0)
            return await asyncio.gather(*asked)

        streams = [answer.events for answer in server.run(ask_all())]
    assert all(len(events) > len("Oslo") for events in streams)
    messages = [merged(events) for events in streams]
    told = [
        (
            message["reasoning_content"],
            *(json.loads(item["arguments"])["place"] for item in message["tool_calls"]),
        )
        for message in messages
    ]
    assert sorted(told) == sorted((place, place, f"{place} again") for place in places)
