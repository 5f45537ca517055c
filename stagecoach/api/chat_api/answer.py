"""A chat completion while it arrives: the parser's deltas, kept until somebody takes them.

Stands where plain text has a detokenizer, so that stop strings end the request at once, however
slow its reader is. Knows no HTTP.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from stagecoach.text.detokenizer import StopMatch
from stagecoach.text.message_stream import MessageDelta, MessageParser, ToolCallDelta

Kind = Literal["reasoning", "content", "call"]


class AnswerPiece(NamedTuple):
    """The next text of an answer, all of it reasoning, content, or one call's arguments."""

    kind: Kind
    text: str
    num_tokens: int  # tokens of the answer that had been read when it was certain
    call: ToolCallDelta | None = None  # with the same text


class ChatAnswer:
    """The message of one completion.

    Attributes:
        has_tool_calls: whether it has any up to now.
    """

    def __init__(self, parser: MessageParser, *, has_one_call: bool = False) -> None:
        """With `has_one_call` the answer ends where a second tool call begins."""
        self._parser = parser
        self._has_one_call = has_one_call
        self._num_tokens = 0
        self._second_call: StopMatch | None = None
        self._runs: list[_Run] = []
        self.has_tool_calls = False

    @property
    def stop_match(self) -> StopMatch | None:
        return self._second_call or self._parser.stop_match

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    @property
    def content_tokens(self) -> Sequence[int]:
        """Which of the tokens, counted from 0, have a text that is content."""
        return self._parser.content_tokens

    def push(self, token_ids: Iterable[int]) -> str:
        """Read tokens; returns the content that became certain."""
        # One at a time, so that the order of what they say is theirs, however they come.
        pieces = []
        for token_id in token_ids:
            if self.stop_match is not None:
                break
            self._num_tokens += 1
            pieces.append(self._keep(self._parser.push((token_id,))))
        return "".join(pieces)

    def finish(self) -> str:
        """No token will follow; returns the rest of the content."""
        return "" if self.stop_match is not None else self._keep(self._parser.finish())

    def take(self) -> MessageDelta:
        """All that came since the last time, as one delta."""
        reasoning = content = ""
        calls: dict[int, ToolCallDelta] = {}
        for piece in self.take_pieces():
            if piece.kind == "reasoning":
                reasoning += piece.text
            elif piece.kind == "content":
                content += piece.text
            elif piece.call is not None:
                begun = calls.get(piece.call.index)
                calls[piece.call.index] = (
                    piece.call
                    if begun is None
                    else dataclasses.replace(begun, arguments=begun.arguments + piece.text)
                )
        return MessageDelta(reasoning, content, tuple(calls.values()))

    def take_pieces(self) -> list[AnswerPiece]:
        """The same in its order, which does not depend on how the tokens came."""
        runs, self._runs = self._runs, []
        return [run.piece() for run in runs]

    def _keep(self, delta: MessageDelta) -> str:
        if delta.reasoning:
            self._run("reasoning").texts.append(delta.reasoning)
        if delta.content:
            self._run("content").texts.append(delta.content)
        for piece in delta.tool_calls:
            if self._has_one_call and piece.index > 0:
                self._second_call = StopMatch("", self._num_tokens)
                break
            self.has_tool_calls = True
            self._run("call", piece).texts.append(piece.arguments)
        return delta.content

    def _run(self, kind: Kind, call: ToolCallDelta | None = None) -> "_Run":
        """The newest run, if it is of this kind and this call, or a new one."""
        last = self._runs[-1] if self._runs else None
        if last is None or last.kind != kind or (call and last.call_index != call.index):
            last = _Run(kind, call)
            self._runs.append(last)
        last.num_tokens = self._num_tokens
        return last


class _Run:
    """A piece that still grows."""

    def __init__(self, kind: Kind, call: ToolCallDelta | None) -> None:
        self.kind = kind
        self.call_index = None if call is None else call.index
        self.num_tokens = 0
        self.texts: list[str] = []
        self._call = call

    def piece(self) -> AnswerPiece:
        text = "".join(self.texts)
        call = self._call and dataclasses.replace(self._call, arguments=text)
        return AnswerPiece(self.kind, text, self.num_tokens, call)
