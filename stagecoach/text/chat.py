"""Which chat format a model has: its messages to prompt tokens, its answer to a message.

The one place that asks for the model's type. Kimi-K3 has XTML, in `chat_format` and
`xtml_parser`; others have the template of their checkpoint, in `chat_template` and
`marker_parser`.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stagecoach.errors import RequestError
from stagecoach.text import chat_format
from stagecoach.text.marker_parser import MarkerParser
from stagecoach.text.message_stream import MessageParser, ParsedMessage, StopRules, parse_whole
from stagecoach.text.tokenizer import Tokenizer
from stagecoach.text.xtml_parser import XtmlParser

_XTML_MODELS = ("kimi_k3",)
_XTML_OPTIONS = frozenset(inspect.signature(chat_format.render).parameters)
# What a request may ask of a prompt that is no variable of a template.
_PROMPT_OPTIONS = ("tool_choice", "response_format", "thinking_effort")
_UNREADABLE_FIELDS = ("audio", "function_call")


def is_xtml(model_type: str) -> bool:
    """Whether the model's chat format is XTML; others have the template of their checkpoint."""
    return model_type in _XTML_MODELS


def render_messages(
    model_type: str,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """Prompt token ids of a conversation, in the form of OpenAI's messages.

    Args:
        model_type: of the model's config.
        tokenizer: of the checkpoint.
        messages: each with a role and its content, which is text or parts of text.
        tools: what the model may call.
        options: of Kimi-K3, those of `chat_format.render`; of others, `tool_choice` "auto" or
            "none", `add_generation_prompt`, `thinking`, `thinking_effort` if the checkpoint's
            template reads `reasoning_effort`, and whatever else it reads.

    Raises:
        RequestError: names the field that the format cannot write.
    """
    _check_messages(messages)
    if is_xtml(model_type):
        for name in options:
            if name not in _XTML_OPTIONS:
                raise RequestError(name, f"no option of the chat format of {model_type}")
        return chat_format.render(tokenizer, messages, tools=tools, **options)
    if tokenizer.chat_template is None:
        raise RequestError(
            "messages",
            f"the checkpoint has no chat template, and no chat format of model_type {model_type} "
            "is known; give the prompt as text or token ids",
        )
    variables = _template_variables(options, tokenizer.chat_template.variables)
    # What cannot be said of the tools is said by not naming any.
    variables["tools"] = None if options.get("tool_choice") == "none" else tools or None
    return tokenizer.chat_template.render(tokenizer, _with_joined_parts(messages), **variables)


def make_parser(
    model_type: str,
    tokenizer: Tokenizer,
    *,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool = True,
    stop: Iterable[str] = (),
    include_stop_str_in_output: bool = False,
    min_tokens: int = 0,
) -> MessageParser:
    """A parser of one completion of a prompt that `render_messages` made.

    Args:
        model_type: of the model's config.
        tokenizer: of the checkpoint.
        prompt_token_ids: they say where the answer begins.
        skip_special_tokens: leave out special tokens that are no markers of the format.
        stop: stop strings, looked for in reasoning and content; fields as of SamplingParams.
        include_stop_str_in_output: keep the one that is found.
        min_tokens: a stop string that ends in an earlier token is text.

    Raises:
        ValueError: a stop string is empty.
    """
    rules = StopRules(tuple(stop), include_stop_str_in_output, min_tokens)
    if is_xtml(model_type):
        return XtmlParser(
            tokenizer,
            prompt_token_ids=prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            rules=rules,
        )
    return MarkerParser(
        tokenizer,
        prompt_token_ids=prompt_token_ids,
        eos_token_ids=tokenizer.eos_token_ids,
        skip_special_tokens=skip_special_tokens,
        rules=rules,
    )


def parse_answer(
    model_type: str,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    prompt_token_ids: Sequence[int],
    stop: Iterable[str] = (),
    include_stop_str_in_output: bool = False,
    min_tokens: int = 0,
) -> ParsedMessage:
    """The message of a whole completion; arguments and errors as of `make_parser`."""
    parser = make_parser(
        model_type,
        tokenizer,
        prompt_token_ids=prompt_token_ids,
        stop=stop,
        include_stop_str_in_output=include_stop_str_in_output,
        min_tokens=min_tokens,
    )
    return parse_whole(parser, token_ids)


def _template_variables(options: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """`options` under the names that a template has for them, of the variables that it reads."""
    _check_template_options(options, known)
    variables = {key: value for key, value in options.items() if key not in _PROMPT_OPTIONS}
    variables.setdefault("add_generation_prompt", True)
    if options.get("thinking_effort") is not None:
        variables["reasoning_effort"] = options["thinking_effort"]
    if "thinking" in variables and "thinking" not in known:
        variables["enable_thinking"] = variables["thinking"]
    return variables


def _check_template_options(options: Mapping[str, Any], known: frozenset[str]) -> None:
    accepted: dict[str, tuple[Any, ...]] = {
        "tool_choice": (None, "auto", "none"),
        "response_format": (None, "text", {"type": "text"}),
    }
    if "reasoning_effort" not in known:
        accepted["thinking_effort"] = (None,)
    for name, values in accepted.items():
        if options.get(name) not in values:
            raise RequestError(
                name, f"the model's chat template has no words for {options[name]!r:.60}"
            )
    for name in ("messages", "documents"):
        if name in options:
            raise RequestError(name, "no option of a chat template")


def _with_joined_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Templates differ in what they do with parts; all of them take text."""
    return [
        {**message, "content": "".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str)
        else dict(message)
        for message in messages
    ]


def _check_messages(messages: object) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(
            "messages", f"must be a list of objects with role and content, not {messages!r:.60}"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                "messages",
                f"message {number} must be an object with a role and its content, "
                f"not {message!r:.60}",
            )
        for field in _UNREADABLE_FIELDS:
            if message.get(field) is not None:
                raise RequestError("messages", f"message {number}: {field} is not supported")
        _check_content(number, message.get("content"))
        _check_tool_calls(number, message.get("tool_calls"))


def _check_content(number: int, content: object) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            "messages", f"message {number}: content must be text or parts, not {content!r:.60}"
        )
    for part in content:
        if not isinstance(part, Mapping):
            raise RequestError(
                "messages",
                f"message {number}: a part of content must be an object, not {part!r:.60}",
            )
        kind = part.get("type", "text")
        if kind != "text":
            raise RequestError(
                "messages",
                f"message {number}: content of type {kind!r} is not supported, only text",
            )
        if not isinstance(part.get("text"), str):
            raise RequestError("messages", f"message {number}: a text part has no text")


def _check_tool_calls(number: int, calls: object) -> None:
    if calls is None:
        return
    if isinstance(calls, str | bytes) or not isinstance(calls, Sequence):
        raise RequestError("messages", f"message {number}: tool_calls must be a list")
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError("messages", f"message {number}: a tool call has no function name")
        if not isinstance(function.get("arguments"), str | Mapping | None):
            raise RequestError(
                "messages", f"message {number}: the arguments of a tool call must be JSON text"
            )
