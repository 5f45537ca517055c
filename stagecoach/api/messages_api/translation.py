"""From Anthropic's form of a request to that of a chat completion.

Owns what roles, blocks and options of one protocol are in the other, and which field of the one
an error about the other's is about. Knows neither tokens nor events.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from stagecoach.api.chat_api.request import (
    CalledFunction,
    CallOfTool,
    ChatCompletionRequest,
    ChatMessage,
    ChosenFunction,
    ContentPart,
    NamedToolChoice,
    Tool,
    ToolFunction,
)
from stagecoach.api.messages_api.input_blocks import (
    AnyMessage,
    AssistantTurn,
    TextParam,
    Texts,
    ThinkingParam,
    ToolResultParam,
    ToolUseParam,
)
from stagecoach.api.messages_api.request import (
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    ToolChoiceParam,
)
from stagecoach.api.structured_output import JsonSchemaFormat, ResponseFormat
from stagecoach.errors import RequestError

# A line for the accounting of Anthropic's servers, in front of the system prompt of some agents.
# It differs from request to request, so that no two prompts would share a prefix.
_ACCOUNTING = re.compile(r"\Ax-anthropic-[\w-]+:[^\n]*\n?")

# Marks the result of a tool that failed: the chat formats have no field for it.
_ERROR_PREFIX = "Error: "

_EFFORTS = {"xhigh": "max"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# Fields of a chat completion, and what the client wrote instead.
_WRITTEN = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}

_TOOL_FIELD = re.compile(r"\A(tools\[\d+\])\.function\.parameters")


def chat_request(body: CountTokensRequest, *, max_model_len: int) -> ChatCompletionRequest:
    """The same as a chat completion.

    Args:
        body: a `MessagesRequest`, or one whose tokens are only counted.
        max_model_len: most tokens of prompt and answer; clients that do not know the model ask
            for more.

    Raises:
        RequestError: a result belongs to no call.
    """
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*_system(body), *_conversation(body.messages)],
    }
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    fields |= _tool_choice(body.tool_choice)
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"thinking": body.thinking.type != "disabled"}
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None:
        fields["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if body.format is not None:
        schema = JsonSchemaFormat.model_validate({"name": "output", "schema": body.format.schema_})
        fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_completion_tokens": min(body.max_tokens, max_model_len),
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return ChatCompletionRequest(**fields)


def as_written(chat: ChatCompletionRequest, error: RequestError) -> RequestError:
    """An error about `chat`, about the field that the client of this protocol wrote."""
    error = chat.as_written(error)
    field = _WRITTEN.get(error.field, error.field)
    return error.about(_TOOL_FIELD.sub(r"\1.input_schema", field))


@contextlib.contextmanager
def errors_as_written(chat: ChatCompletionRequest) -> Iterator[None]:
    """Whatever is refused within is refused as `as_written`."""
    try:
        yield
    except RequestError as error:
        raise as_written(chat, error) from None


def _system(body: CountTokensRequest) -> Iterator[ChatMessage]:
    blocks = [_ACCOUNTING.sub("", text) for text in _texts(body.system)]
    kept = [text for text in blocks if text]
    if kept:
        yield ChatMessage(role="system", content=_content(kept))


def _conversation(messages: Sequence[AnyMessage]) -> Iterator[ChatMessage]:
    """Messages of the assistant that follow each other are one turn, as to Anthropic."""
    answer: list[Any] = []
    call_ids: set[str] = set()
    for number, message in enumerate(messages):
        if isinstance(message, AssistantTurn):
            answer += _blocks(message.content)
            continue
        if answer:
            yield _answer(answer)
            call_ids = {block.id for block in answer if isinstance(block, ToolUseParam)}
            answer = []
        yield from _turn(message.role, _blocks(message.content), f"messages[{number}]", call_ids)


def _answer(blocks: Sequence[Any]) -> ChatMessage:
    texts = [block.text for block in blocks if isinstance(block, TextParam)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingParam)]
    calls = [
        CallOfTool(
            id=block.id,
            type="function",
            function=CalledFunction(name=block.name, arguments=block.input),
        )
        for block in blocks
        if isinstance(block, ToolUseParam)
    ]
    return ChatMessage(
        role="assistant",
        content=_content(texts) if texts or not calls else None,
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _turn(
    role: Literal["user", "system"], blocks: Sequence[Any], path: str, call_ids: set[str]
) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own; the texts between two of them are one."""
    for is_result, group in itertools.groupby(
        enumerate(blocks), key=lambda item: isinstance(item[1], ToolResultParam)
    ):
        if not is_result:
            yield ChatMessage(role=role, content=_content([block.text for _, block in group]))
            continue
        for number, block in group:
            if block.tool_use_id not in call_ids:
                raise RequestError(
                    f"{path}.content[{number}].tool_use_id",
                    f"{block.tool_use_id!r:.80} is no call of the assistant's turn before it",
                )
            yield _result(block)
    if not blocks:
        yield ChatMessage(role=role, content="")


def _result(block: ToolResultParam) -> ChatMessage:
    texts = _texts(block.content)
    if block.is_error:
        texts.insert(0, _ERROR_PREFIX)
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_content(texts))


def _tool(tool: CustomTool) -> Tool:
    given: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    for name in ("description", "strict"):
        if getattr(tool, name) is not None:
            given[name] = getattr(tool, name)
    return Tool(type="function", function=ToolFunction(**given))


def _tool_choice(choice: ToolChoiceParam | None) -> dict[str, Any]:
    if choice is None:
        return {}
    fields: dict[str, Any] = {}
    if choice.type == "tool":
        chosen = ChosenFunction(name=choice.name or "")
        fields["tool_choice"] = NamedToolChoice(type="function", function=chosen)
    else:
        fields["tool_choice"] = _TOOL_CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _blocks(content: str | list[Any]) -> list[Any]:
    return [TextParam(type="text", text=content)] if isinstance(content, str) else content


def _texts(content: Texts | None) -> list[str]:
    return [block.text for block in _blocks(content or [])]


def _content(texts: list[str]) -> str | list[ContentPart]:
    if len(texts) < 2:
        return "".join(texts)
    return [ContentPart(type="text", text=text) for text in texts]
