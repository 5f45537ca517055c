"""The content of a message while it grows: its blocks, one after the other, and their events.

Text that follows text of its kind joins its block; anything else begins a new one. What is said
behind a call comes behind all calls, so that no call is interrupted. Both depend only on the
order of the tokens, and a whole message is put together from its events: so it is the same as a
streamed one, however the tokens came.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from stagecoach.api.chat_api.answer import ChatAnswer, Kind
from stagecoach.api.messages_api.objects import (
    AnsweredText,
    AnsweredThinking,
    AnsweredToolUse,
    BlockDelta,
    BlockDeltaEvent,
    BlockStart,
    BlockStop,
    ContentBlock,
    ContentEvent,
    InputJsonDelta,
    SignatureDelta,
    TextDelta,
    ThinkingDelta,
)

# Clients leave thoughts with an empty signature out of the next request, and the model would
# miss them. There is nothing that a signature could prove to a server that renders any prompt.
SIGNATURE = "unsigned"

# How Anthropic tells clients to wrap an input that is no JSON.
_INVALID_INPUT = "INVALID_JSON"


class ContentWriter:
    """The blocks of one answer, as events."""

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer
        self._kind: Kind | None = None  # of the block that is open
        self._index = -1
        self._late: list[tuple[Kind, str]] = []

    def next(self, *, is_last: bool) -> Iterator[ContentEvent]:
        """What is new since the last time; with `is_last` the answer has ended."""
        for piece in self._answer.take_pieces():
            if piece.call is not None and piece.call.id is not None:
                yield from self._begin(
                    "call",
                    AnsweredToolUse(id=piece.call.id, name=piece.call.name or "", input={}),
                )
            elif self._kind == "call" and piece.kind != "call":
                self._late.append((piece.kind, piece.text))
                continue
            yield from self._write(piece.kind, piece.text)
        if is_last:
            yield from self._end()
            self._kind = None
            for kind, text in self._late:
                yield from self._write(kind, text)
            yield from self._end()

    def _write(self, kind: Kind, text: str) -> Iterator[ContentEvent]:
        if kind != self._kind:
            is_thinking = kind == "reasoning"
            yield from self._begin(
                kind,
                AnsweredThinking(thinking="", signature="")
                if is_thinking
                else AnsweredText(text=""),
            )
        if text:
            yield BlockDeltaEvent(index=self._index, delta=_delta(kind, text))

    def _begin(self, kind: Kind, block: ContentBlock) -> Iterator[ContentEvent]:
        yield from self._end()
        self._kind = kind
        self._index += 1
        yield BlockStart(index=self._index, content_block=block)

    def _end(self) -> Iterator[ContentEvent]:
        if self._kind == "reasoning":
            yield BlockDeltaEvent(index=self._index, delta=SignatureDelta(signature=SIGNATURE))
        if self._kind is not None:
            yield BlockStop(index=self._index)


def whole_content(events: Iterable[ContentEvent]) -> list[ContentBlock]:
    """The blocks that all events of a message add up to."""
    blocks: list[ContentBlock] = []
    texts: list[list[str]] = []
    for event in events:
        if isinstance(event, BlockStart):
            blocks.append(event.content_block)
            texts.append([])
        elif isinstance(event, BlockDeltaEvent):
            texts[event.index].append(_text_of(event.delta))
    return [_filled(block, "".join(parts)) for block, parts in zip(blocks, texts, strict=True)]


def _delta(kind: Kind, text: str) -> BlockDelta:
    if kind == "reasoning":
        return ThinkingDelta(thinking=text)
    return InputJsonDelta(partial_json=text) if kind == "call" else TextDelta(text=text)


def _text_of(delta: BlockDelta) -> str:
    match delta:
        case TextDelta():
            return delta.text
        case ThinkingDelta():
            return delta.thinking
        case InputJsonDelta():
            return delta.partial_json
        case SignatureDelta():
            return ""


def _filled(block: ContentBlock, text: str) -> ContentBlock:
    match block:
        case AnsweredText():
            return AnsweredText(text=text)
        case AnsweredThinking():
            return AnsweredThinking(thinking=text, signature=SIGNATURE)
        case AnsweredToolUse():
            return AnsweredToolUse(id=block.id, name=block.name, input=_input(text))


def _input(arguments: str) -> dict[str, Any]:
    """The object that a call's arguments are; if they were cut off, what is certain of it.

    Clients read the pieces of a stream by the same rule.
    """
    if not arguments.strip():
        return {}
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {_INVALID_INPUT: arguments}
