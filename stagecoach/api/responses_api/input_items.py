"""Items of a request's input, and the conversation that they are.

Owns their form and how they become messages of a chat: what the model said in one turn
(reasoning, text and calls, each an item of its own) is one message. Knows no prompt.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from stagecoach.errors import RequestError

_FORM = ConfigDict(strict=True, extra="ignore", frozen=True)


class InputPart(BaseModel):
    """A piece of text; parts of other types are not implemented."""

    model_config = _FORM

    type: str
    text: str | None = None


# Told apart by what they are, so that an error speaks of the one that was sent.
Text = Annotated[
    Annotated[str, Tag("Text")] | Annotated[list[InputPart], Tag("Parts")],
    Discriminator(lambda value: "Text" if isinstance(value, str) else "Parts"),
]


class InputMessage(BaseModel):
    """What somebody said; an answer may come back as it was given."""

    model_config = _FORM

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class InputReasoning(BaseModel):
    """What the model thought; without content its summary is taken for it."""

    model_config = _FORM

    type: Literal["reasoning"]
    content: list[InputPart] | None = None
    summary: list[InputPart] | None = None


class InputFunctionCall(BaseModel):
    """A call that the model made."""

    model_config = _FORM

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, Field(description="JSON.")]


class InputFunctionCallOutput(BaseModel):
    """What came of a call."""

    model_config = _FORM

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class OtherItem(BaseModel):
    """An item that is not implemented."""

    model_config = _FORM

    type: str


_CLASSES = {
    None: "InputMessage",
    "message": "InputMessage",
    "reasoning": "InputReasoning",
    "function_call": "InputFunctionCall",
    "function_call_output": "InputFunctionCallOutput",
}


def _class_of(item: object) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", 0)
    return _CLASSES.get(kind, "OtherItem") if isinstance(kind, str | None) else "OtherItem"


InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[InputReasoning, Tag("InputReasoning")]
    | Annotated[InputFunctionCall, Tag("InputFunctionCall")]
    | Annotated[InputFunctionCallOutput, Tag("InputFunctionCallOutput")]
    | Annotated[OtherItem, Tag("OtherItem")],
    Discriminator(_class_of),
]


def messages_of(given: str | list[InputItem], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation, as messages of /v1/chat/completions.

    Raises:
        RequestError: the input is empty or holds what is not implemented.
    """
    conversation = _Conversation()
    if instructions is not None:
        conversation.add({"role": "system", "content": instructions})
    if isinstance(given, str):
        conversation.add({"role": "user", "content": given})
    elif not given:
        raise RequestError("input", "must hold at least one item")
    else:
        for number, item in enumerate(given):
            _add(conversation, item, f"item {number}")
    return conversation.messages


def _add(conversation: "_Conversation", item: InputItem, place: str) -> None:
    match item:
        case InputMessage(role="assistant"):
            conversation.say(_text(item.content, place))
        case InputMessage():
            conversation.add({"role": item.role, "content": _text(item.content, place)})
        case InputReasoning():
            conversation.think(_text(item.content or item.summary or [], place))
        case InputFunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            conversation.call({"id": item.call_id, "type": "function", "function": function})
        case InputFunctionCallOutput():
            content = _text(item.output, place)
            conversation.add({"role": "tool", "tool_call_id": item.call_id, "content": content})
        case OtherItem(type="item_reference"):
            raise RequestError("input", f"{place} refers to another; none is kept here: send it")
        case _:
            raise RequestError(
                "input", f"{place}: an item of type {item.type[:60]!r} is not implemented"
            )


_TEXT_TYPES = ("input_text", "output_text", "reasoning_text", "summary_text")


def _text(content: Text, place: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXT_TYPES:
            raise RequestError(
                "input", f"{place}: content of type {part.type[:60]!r} is not implemented"
            )
        if part.text is None:
            raise RequestError("input", f"{place}: a part of type {part.type} needs a text")
    return "".join(part.text or "" for part in content)


class _Conversation:
    """Messages, the last of which may be a turn of the model that goes on."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None

    def add(self, message: dict[str, Any]) -> None:
        self._turn = None
        self.messages.append(message)

    def think(self, text: str) -> None:
        turn = self._text_turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def say(self, text: str) -> None:
        turn = self._text_turn()
        turn["content"] = turn.get("content", "") + text

    def call(self, call: dict[str, Any]) -> None:
        self._open_turn().setdefault("tool_calls", []).append(call)

    def _text_turn(self) -> dict[str, Any]:
        """What follows a text is another turn; what follows calls is not, for their outputs
        are looked for behind the turn that made them."""
        turn = self._turn
        if turn is not None and "content" in turn and "tool_calls" not in turn:
            self._turn = None
        return self._open_turn()

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn
