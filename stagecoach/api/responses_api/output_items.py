"""The items of a response while they grow: reasoning, messages and calls, and their events.

Text that follows text of its kind joins its item; anything else begins a new one. Both depend
only on the order of the tokens, and a whole response is written in the same way with its events
thrown away: so it is the same as a streamed one, however the tokens came.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stagecoach.api.answers import new_id
from stagecoach.api.chat_api.answer import AnswerPiece, ChatAnswer, Kind
from stagecoach.api.logprobs import TokenLogprob, chat_logprobs
from stagecoach.api.responses_api.objects import (
    ContentPart,
    ItemStatus,
    OutputItem,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseReasoningText,
    ResponseReasoningTextDeltaEvent,
    ResponseReasoningTextDoneEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
    StreamEvent,
)
from stagecoach.outputs import CompletionOutput
from stagecoach.text.message_stream import ToolCallDelta
from stagecoach.text.tokenizer import Tokenizer

# Gives the number of the next event.
Numbers = Callable[[], int]

_ID_PREFIXES: dict[Kind, str] = {"reasoning": "rs_", "content": "msg_", "call": "fc_"}


class ContentLogprobs:
    """Log-probabilities of the tokens whose text is content, each handed out once."""

    def __init__(
        self, completion: CompletionOutput, answer: ChatAnswer, tokenizer: Tokenizer
    ) -> None:
        self._completion = completion
        self._answer = answer
        self._tokenizer = tokenizer
        self._num_taken = 0

    def take(self, num_tokens: int | None = None) -> list[TokenLogprob]:
        """Those among the first `num_tokens` of the answer, or all; none if not asked for."""
        entries = self._completion.logprobs
        if entries is None:
            return []
        places = self._answer.content_tokens
        start = self._num_taken
        while self._num_taken < len(places) and (
            num_tokens is None or places[self._num_taken] < num_tokens
        ):
            self._num_taken += 1
        taken = places[start : self._num_taken]
        return chat_logprobs(self._tokenizer, (entries[place] for place in taken)).content


class OutputItems:
    """The output of one response, up to now."""

    def __init__(self, logprobs: ContentLogprobs, numbers: Numbers) -> None:
        self._logprobs = logprobs
        self._numbers = numbers
        self._items: list[_Item] = []
        self._calls: list[_Item] = []

    @property
    def items(self) -> list[OutputItem]:
        return [item.object() for item in self._items]

    def write(self, pieces: Iterable[AnswerPiece]) -> Iterator[StreamEvent]:
        """Add what is new; yields the events that say so."""
        for piece in pieces:
            if piece.call is not None:
                yield from self._write_call(piece.call)
                continue
            last = self._items[-1] if self._items else None
            if last is None or last.kind != piece.kind:
                yield from self._begin(piece.kind)
            is_content = piece.kind == "content"
            logprobs = self._logprobs.take(piece.num_tokens) if is_content else []
            yield self._items[-1].write(piece.text, logprobs)

    def end(self, *, is_cut: bool) -> Iterator[StreamEvent]:
        """Nothing follows; with `is_cut`, what is open is not whole."""
        last = self._items[-1] if self._items else None
        rest = self._logprobs.take()
        if rest and last is not None and last.kind == "content":
            # Tokens of a stop string, which is no text.
            yield last.write("", rest)
        if not is_cut and (last is None or last.kind == "reasoning"):
            # It answered, with an empty text.
            yield from self._begin("content")
        for item in self._items:
            if item.status == "in_progress":
                yield from item.end("incomplete" if is_cut else "completed")

    def break_off(self) -> None:
        """Nothing follows, and nobody is told of the items."""
        for item in self._items:
            if item.status == "in_progress":
                item.status = "incomplete"

    def _write_call(self, delta: ToolCallDelta) -> Iterator[StreamEvent]:
        if delta.index == len(self._calls):
            # Only the newest call can go on.
            for call in self._calls[-1:]:
                yield from call.end("completed")
            yield from self._begin("call", delta)
            self._calls.append(self._items[-1])
        if delta.arguments:
            yield self._calls[delta.index].write(delta.arguments, [])

    def _begin(self, kind: Kind, call: ToolCallDelta | None = None) -> Iterator[StreamEvent]:
        last = self._items[-1] if self._items else None
        # Arguments of a call may follow a stray text, so that only text is sure to have ended.
        if last is not None and last.kind != "call":
            yield from last.end("completed")
        self._items.append(_Item(kind, len(self._items), self._numbers, call))
        yield from self._items[-1].begin()


class _Item:
    """One of them: a text, which is a part of it or a call's arguments."""

    def __init__(
        self, kind: Kind, index: int, numbers: Numbers, call: ToolCallDelta | None
    ) -> None:
        self.kind = kind
        self.status: ItemStatus = "in_progress"
        self._id = new_id(_ID_PREFIXES[kind])
        self._index = index
        self._numbers = numbers
        self._call = call
        self._has_part = False
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def object(self) -> OutputItem:
        if self._call is not None:
            return ResponseFunctionToolCall(
                id=self._id,
                call_id=self._call.id or "",
                name=self._call.name or "",
                arguments=self._text,
                status=self.status,
            )
        if self.kind == "reasoning":
            thoughts = [ResponseReasoningText(text=self._text)] if self._has_part else []
            return ResponseReasoningItem(id=self._id, content=thoughts, status=self.status)
        texts = [ResponseOutputText(text=self._text, logprobs=[*self._logprobs])]
        content = texts if self._has_part else []
        return ResponseOutputMessage(id=self._id, content=content, status=self.status)

    def begin(self) -> Iterator[StreamEvent]:
        yield ResponseOutputItemAddedEvent(
            sequence_number=self._numbers(), output_index=self._index, item=self.object()
        )
        if self._call is None:
            self._has_part = True
            yield ResponseContentPartAddedEvent(**self._place(), part=self._part())

    def write(self, text: str, logprobs: list[TokenLogprob]) -> StreamEvent:
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        if self.kind == "call":
            return ResponseFunctionCallArgumentsDeltaEvent(**self._place(), delta=text)
        if self.kind == "reasoning":
            return ResponseReasoningTextDeltaEvent(**self._place(), delta=text)
        return ResponseTextDeltaEvent(**self._place(), delta=text, logprobs=logprobs)

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        self.status = status
        text = self._text
        if self._call is not None:
            yield ResponseFunctionCallArgumentsDoneEvent(
                **self._place(), name=self._call.name or "", arguments=text
            )
        elif self.kind == "reasoning":
            yield ResponseReasoningTextDoneEvent(**self._place(), text=text)
        else:
            yield ResponseTextDoneEvent(**self._place(), text=text, logprobs=[*self._logprobs])
        if self._call is None:
            yield ResponseContentPartDoneEvent(**self._place(), part=self._part())
        yield ResponseOutputItemDoneEvent(
            sequence_number=self._numbers(), output_index=self._index, item=self.object()
        )

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _part(self) -> ContentPart:
        if self.kind == "reasoning":
            return ResponseReasoningText(text=self._text)
        return ResponseOutputText(text=self._text, logprobs=[*self._logprobs])

    def _place(self) -> dict[str, Any]:
        """What an event within this item begins with."""
        return {
            "sequence_number": self._numbers(),
            "output_index": self._index,
            "item_id": self._id,
        }
