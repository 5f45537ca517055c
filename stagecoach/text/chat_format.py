"""The K3 chat format: messages to prompt tokens, in XTML.

A prompt is a list of segments. Structural markers are special tokens; everything else, attribute
values and tool results included, is ordinary text and is encoded segment by segment, so nothing
that a user writes can become a marker. `xtml_parser` reads answers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagecoach.errors import RequestError
from stagecoach.text.tokenizer import Tokenizer
from stagecoach.text.xtml import CLOSE, END_OF_MESSAGE, OPEN, SEP, escape_attribute

THINKING_EFFORTS = ("low", "medium", "high", "max")
_TOOL_CHOICES = {"required": "MUST call tools", "none": "MUST NOT call any tools"}

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt that is encoded on its own."""

    text: str
    is_special: bool = False
    is_assistant: bool = False  # what the model writes, so what training learns


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | str | None = None,
    thinking: bool = True,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Render a conversation, in the form of OpenAI's messages, to prompt tokens.

    Raises:
        RequestError: names the argument that cannot be written.
    """
    segments = render_segments(
        messages,
        tools=tools,
        thinking_effort=thinking_effort,
        tool_choice=tool_choice,
        response_format=response_format,
        thinking=thinking,
        add_generation_prompt=add_generation_prompt,
    )
    return [token_id for segment in segments for token_id in encode_segment(tokenizer, segment)]


def encode_segment(tokenizer: Tokenizer, segment: Segment) -> list[int]:
    """The token ids of one segment."""
    if segment.is_special:
        return [tokenizer.special_id(segment.text)]
    return tokenizer.encode(segment.text)


def render_segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | str | None = None,
    thinking: bool = True,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Render a conversation to segments.

    Order: declared tools, thinking effort, the conversation, tool choice, response format, and
    the opening of the assistant's answer.
    """
    segments: list[Segment] = []
    if tools:
        segments += _system_message("tool-declare", _tool_declaration(tools))
    if thinking and thinking_effort is not None:
        segments += _system_message("thinking-effort", _thinking_effort_body(thinking_effort))
    segments += _conversation(messages, thinking=thinking)
    if tool_choice not in (None, "auto", *_TOOL_CHOICES):
        raise RequestError("tool_choice", f"{tool_choice!r} cannot be written in a prompt")
    if tool_choice in _TOOL_CHOICES:
        segments += _system_message("tool-choice", _tool_choice_body(tool_choice))
    response_format_body = _response_format_body(response_format)
    if response_format_body:
        segments += _system_message("response-format", response_format_body)
    if add_generation_prompt:
        segments += _open("message", role="assistant")
        segments += _open("think" if thinking else "response")
    return segments


def answer_segments(message: Message, *, thinking: bool = True) -> list[Segment]:
    """An assistant message without the opening that the generation prompt already holds."""
    channels = _assistant_channels(message, thinking=thinking)
    opening = _open("think" if thinking else "response")
    segments = _message([], channels[len(opening) :])
    return [Segment(segment.text, segment.is_special, is_assistant=True) for segment in segments]


def segments_text(segments: Sequence[Segment]) -> str:
    """The text of `segments` with special tokens by name, for people to read."""
    return "".join(segment.text for segment in segments)


def _open(tag: str, **attributes: object) -> list[Segment]:
    segments = [Segment(OPEN, is_special=True), Segment(tag)]
    for key, value in attributes.items():
        escaped = escape_attribute(value)
        segments += [Segment(f" {key}"), Segment('="'), Segment(escaped), Segment('"')]
    segments.append(Segment(SEP, is_special=True))
    return [segment for segment in segments if segment.text]


def _close(tag: str) -> list[Segment]:
    return [Segment(CLOSE, is_special=True), Segment(tag), Segment(SEP, is_special=True)]


def _text(text: str) -> list[Segment]:
    return [Segment(text)] if text else []


def _message(opening: list[Segment], content: list[Segment]) -> list[Segment]:
    return [*opening, *content, *_close("message"), Segment(END_OF_MESSAGE, is_special=True)]


def _system_message(message_type: str, body: str) -> list[Segment]:
    return _message(_open("message", role="system", type=message_type), _text(body))


def _conversation(messages: Sequence[Message], *, thinking: bool) -> Iterator[Segment]:
    for message in _with_tool_results_in_call_order(messages):
        role = message["role"]
        if role == "assistant":
            opening = _open("message", **_role_and_name(message))
            yield from opening
            for segment in _message([], _assistant_channels(message, thinking=thinking)):
                yield Segment(segment.text, segment.is_special, is_assistant=True)
        elif role == "tool":
            opening = _open("message", role="tool", tool=message["tool"], index=message["index"])
            yield from _message(opening, _content(message))
        elif role == "system" and message.get("tools"):
            body = _late_tool_declaration(message["tools"])
            yield from _system_message("tool-declare", body)
        elif role in ("system", "user"):
            yield from _message(_open("message", **_role_and_name(message)), _content(message))
        else:
            raise RequestError("messages", f"unknown role {role!r}")


def _role_and_name(message: Message) -> dict[str, str]:
    attributes = {"role": message["role"]}
    if message.get("name"):
        attributes["name"] = message["name"]
    return attributes


def _content(message: Message) -> list[Segment]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return _text(content)
    segments = []
    for part in content:
        if part.get("type", "text") != "text":
            raise RequestError(
                "messages", f"content of type {part['type']!r} is not supported, only text"
            )
        segments += _text(part["text"])
    return segments


def _assistant_channels(message: Message, *, thinking: bool) -> list[Segment]:
    segments: list[Segment] = []
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        segments += [*_open("think"), *_text(reasoning if reasoning.strip() else "")]
        segments += _close("think")
    segments += [*_open("response"), *_content(message), *_close("response")]
    tool_calls = message.get("tool_calls")
    if tool_calls:
        segments += _open("tools")
        for index, call in enumerate(tool_calls, start=1):
            segments += _call(_function(call), index)
        segments += _close("tools")
    return segments


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return call.get("function", call)


def _call(function: Mapping[str, Any], index: int) -> list[Segment]:
    segments = _open("call", tool=function["name"], index=index)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    if isinstance(arguments, str):
        segments += [*_open("json", type="object"), *_text(arguments), *_close("json")]
    else:
        for key, value in (arguments or {}).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            segments += _open("argument", key=key, type=_type_name(value))
            segments += [*_text(text), *_close("argument")]
    return [*segments, *_close("call")]


def _object_or_text(arguments: str) -> dict[str, Any] | str:
    """The JSON object in `arguments`; text that is no JSON is handed on as it is."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
    if not isinstance(value, dict):
        raise RequestError("messages", "the arguments of a tool call must be a JSON object")
    return value


def _type_name(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _with_tool_results_in_call_order(messages: Sequence[Message]) -> Iterator[Message]:
    """Give every tool result its tool and index, and put each run of results in call order.

    A run whose ids do not all belong to calls of the last assistant message keeps its order.
    """
    calls: Sequence[Mapping[str, Any]] = ()
    num_results = 0
    run: list[Message] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            run.append(message)
            continue
        for result, name in _ordered_run(run, calls):
            num_results += 1
            name = name or result.get("tool") or result.get("name")
            if not name and num_results <= len(calls):
                name = _function(calls[num_results - 1])["name"]
            if not name:
                raise RequestError(
                    "messages", "a tool result belongs to no tool call and names none"
                )
            yield {**result, "tool": name, "index": num_results}
        run = []
        if message is None:
            return
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or ()
            num_results = 0
        yield message


def _ordered_run(
    run: list[Message], calls: Sequence[Mapping[str, Any]]
) -> list[tuple[Message, str | None]]:
    place: dict[str, tuple[int, str]] = {}
    for position, call in enumerate(calls):
        if call.get("id") is not None:
            place.setdefault(str(call["id"]), (position, _function(call)["name"]))
    ids = [str(result.get("tool_call_id", result.get("id"))) for result in run]
    if not all(call_id in place for call_id in ids):
        return [(result, None) for result in run]
    order = sorted(range(len(run)), key=lambda index: place[ids[index]][0])
    return [(run[index], place[ids[index]][1]) for index in order]


def _compact_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


# The sentences below are part of the format: the published model was trained with exactly these.


def _tool_declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    return (
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
        f"```json\n{_compact_json(tools)}\n```"
    )


def _late_tool_declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    return (
        "## New Tools Available\n"
        "The system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        "Here are the specs for the extended tools.\n\n"
        f"```json\n{_compact_json(tools)}\n```"
    )


def _thinking_effort_body(effort: str) -> str:
    if effort not in THINKING_EFFORTS:
        raise RequestError(
            "thinking_effort", f"{effort!r} is none of {', '.join(THINKING_EFFORTS)}"
        )
    return (
        "`thinking_effort` guides on how much to think in your thinking channel "
        "(not including the response channel), supported values include "
        "`low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`."
    )


def _tool_choice_body(tool_choice: str) -> str:
    return (
        f"The system is invoked with `tool_choice={tool_choice}`.\n"
        f"You {_TOOL_CHOICES[tool_choice]} in the next message."
    )


def _response_format_body(response_format: Mapping[str, Any] | str | None) -> str:
    if isinstance(response_format, str) or response_format is None:
        response_format = {"type": response_format or "text"}
    format_type = response_format.get("type")
    if format_type == "text":
        return ""
    if format_type not in ("json_object", "json_schema"):
        raise RequestError("response_format", f"unknown type {format_type!r}")
    body = (
        f"The system is invoked with `response_format={format_type}`.\n"
        "Your response must be raw JSON data without markdown code blocks (```json) "
        "or any additional formatting."
    )
    if format_type == "json_object":
        return body
    schema = response_format.get("json_schema")
    if not isinstance(schema, Mapping):
        raise RequestError("response_format", "json_schema needs a schema")
    schema = schema.get("schema", schema)
    return (
        f"{body}\nThe JSON data must match the following schema:\n"
        f"```json\n{_compact_json(schema)}\n```"
    )
