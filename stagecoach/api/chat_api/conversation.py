"""From the fields of a chat request to the prompt of a model, and the grammar of its answer.

Owns what those fields mean to the chat format, and which of them it cannot honour. The format
itself is in `text/`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stagecoach.api.chat_api.request import ChatCompletionRequest, ChatMessage, Tool
from stagecoach.api.engine_service import EngineService
from stagecoach.errors import RequestError
from stagecoach.request import StructuredOutputsParams
from stagecoach.text.answer_grammar import answer_grammar
from stagecoach.text.chat import is_xtml, render_messages


class RenderedChat(NamedTuple):
    """A prompt, and how much of it the next turn will repeat."""

    token_ids: list[int]
    checkpoint_position: int | None  # None: not known to be a prefix of the next prompt


def render_chat(service: EngineService, body: ChatCompletionRequest) -> RenderedChat:
    """The prompt of a chat request.

    Raises:
        RequestError: names the field that cannot be written, or honoured.
    """
    options = _format_options(body)
    last_turn = options | {"add_generation_prompt": False}
    # What follows the messages, as the opening of an answer, the next turn may not repeat.
    if is_xtml(service.config.model.model_type):
        options |= _wishes(body)
    elif body.tool_choice == "none":
        options["tool_choice"] = last_turn["tool_choice"] = "none"
    token_ids = render(service, body.messages, body.tools, options)
    shared = render(service, body.messages, body.tools, last_turn)
    is_shared = 0 < len(shared) < len(token_ids) and token_ids[: len(shared)] == shared
    return RenderedChat(token_ids, len(shared) if is_shared else None)


def render(
    service: EngineService,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    options: Mapping[str, Any],
) -> list[int]:
    """Token ids of a conversation; `options` are those of the model's chat format.

    Raises:
        RequestError: names the field that cannot be written.
    """
    try:
        return render_messages(
            service.config.model.model_type,
            service.tokenizer,
            [_as_dict(number, message) for number, message in enumerate(messages)],
            _tools_as_dicts(tools),
            **options,
        )
    except RequestError as error:
        if error.field == "thinking_effort":
            raise RequestError("reasoning_effort", error.reason) from None
        if error.field in options:
            raise RequestError("chat_template_kwargs", str(error)) from None
        raise


def answer_params(
    service: EngineService, body: ChatCompletionRequest, prompt_token_ids: Sequence[int]
) -> StructuredOutputsParams | None:
    """The grammar of the whole answer to that prompt; None if it may be anything.

    Raises:
        RequestError: names the field that no grammar can be written for.
    """
    content = body.content_params()
    if content is None and not body.tools:
        return None
    choice = body.tool_choice or "auto"
    grammar = answer_grammar(
        service.config.model.model_type,
        service.tokenizer,
        prompt_token_ids=prompt_token_ids,
        content=content,
        tools=_tools_as_dicts(body.tools),
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    return None if grammar is None else StructuredOutputsParams(grammar=grammar)


def _wishes(body: ChatCompletionRequest) -> dict[str, Any]:
    """What XTML has words for: it is asked of the model behind the messages."""
    wishes: dict[str, Any] = {}
    if body.response_format is not None:
        wishes["response_format"] = body.response_format.for_prompt
    if body.must_call:
        wishes["tool_choice"] = "required"
    elif body.tool_choice == "none" and body.tools:
        wishes["tool_choice"] = "none"
    return wishes


def _format_options(body: ChatCompletionRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    for name in ("add_generation_prompt", "tool_choice", "response_format", "messages", "tools"):
        if name in options:
            raise RequestError("chat_template_kwargs", f"{name} is not one of them")
    effort = body.reasoning_effort
    if effort == "none":
        options["thinking"] = False
    elif effort is not None:
        options["thinking_effort"] = effort
    return options


def _tools_as_dicts(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None


def _as_dict(number: int, message: ChatMessage) -> dict[str, Any]:
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise RequestError(
                    "messages",
                    f"message {number}: content of type {part.type[:40]!r} is not implemented"
                    if part.type != "text"
                    else f"message {number}: a part of type text needs a text",
                )
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"
    return fields
