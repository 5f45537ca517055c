"""A chat completion while it arrives: the parser's deltas, kept until somebody takes them.

Stands where plain text has a detokenizer, so that stop strings end the request at once, however
slow its reader is. Knows no HTTP.
"""

from collections.abc import Iterable

from stagecoach.text.detokenizer import StopMatch
from stagecoach.text.message_stream import MessageDelta, MessageParser, ToolCallDelta


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
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, _Call] = {}
        self.has_tool_calls = False

    @property
    def stop_match(self) -> StopMatch | None:
        return self._second_call or self._parser.stop_match

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    def push(self, token_ids: Iterable[int]) -> str:
        """Read tokens; returns the content that became certain."""
        if not self._has_one_call:
            return self._keep(self._parser.push(token_ids))
        # One at a time: the last that counts is the one with which the second call begins.
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
        calls = tuple(
            ToolCallDelta(index, call.id, call.name, "".join(call.arguments))
            for index, call in self._calls.items()
        )
        delta = MessageDelta("".join(self._reasoning), "".join(self._content), calls)
        self._reasoning, self._content, self._calls = [], [], {}
        return delta

    def _keep(self, delta: MessageDelta) -> str:
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if delta.content:
            self._content.append(delta.content)
        for piece in delta.tool_calls:
            if self._has_one_call and piece.index > 0:
                self._second_call = StopMatch("", self._num_tokens)
                break
            self.has_tool_calls = True
            call = self._calls.setdefault(piece.index, _Call())
            call.id = call.id or piece.id
            call.name = call.name or piece.name
            call.arguments.append(piece.arguments)
        return delta.content


class _Call:
    def __init__(self) -> None:
        self.id: str | None = None
        self.name: str | None = None
        self.arguments: list[str] = []
