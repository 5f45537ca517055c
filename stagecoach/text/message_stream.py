"""An assistant's answer as it arrives: what a parser of tokens says, piece by piece.

Owns the shape of deltas and of the message that they add up to, and the writer behind every
parser, which also looks for stop strings. `chat.make_parser` chooses the parser of a model.
Knows no chat format and no HTTP.
"""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from stagecoach.text.detokenizer import StopMatch
from stagecoach.text.stop_strings import StopFilter


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of one tool call; the first of a call has its id and name, later ones None."""

    index: int  # of the call within the message, from 0
    id: str | None
    name: str | None
    arguments: str  # the next piece of the JSON text


class MessageDelta(NamedTuple):
    """What became certain of a message; concatenated, deltas give the whole message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. `arguments` is JSON text, as the model gave it if it is malformed."""

    name: str
    arguments: str
    # Ids are made at random where the format has none, so that they say nothing of equality.
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """An assistant's answer, split into its channels."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class MessageParser(Protocol):
    """Parses one completion; however its tokens are split into pushes, the message is the same.

    Stop strings are looked for in reasoning and content as the client reads them, never in
    markers or tool calls; a caller leaves them to the parser and gives the engine none.

    Attributes:
        stop_match: set once a stop string is found; the caller ends the request and cuts its
            tokens there. Nothing is said beyond it.
        num_reasoning_tokens: tokens whose text is reasoning; markers are not among them.
        content_tokens: which of the tokens read, counted from 0, have a text that is content.
    """

    @property
    def stop_match(self) -> StopMatch | None: ...

    @property
    def num_reasoning_tokens(self) -> int: ...

    @property
    def content_tokens(self) -> Sequence[int]: ...

    def push(self, token_ids: Iterable[int]) -> MessageDelta:
        """Read tokens; return what is now certain. Begun markers and characters are held back."""
        ...

    def finish(self) -> MessageDelta:
        """Return the rest: no token will follow.

        A marker that was cut off is dropped; the arguments of a call that was cut off stay
        unfinished JSON, so that nobody takes them for the whole.
        """
        ...


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends an answer before its end: fields as of SamplingParams."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0  # a stop string that ends in an earlier token is text


NO_STOPS = StopRules()


class MessageBuilder:
    """Adds up deltas."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def add(self, delta: MessageDelta) -> None:
        self._reasoning.append(delta.reasoning)
        self._content.append(delta.content)
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.index == len(self._calls), f"call {call.index} is told out of order"
                self._calls.append((call.name, call.id or "", []))
            self._calls[call.index][2].append(call.arguments)

    def message(self) -> ParsedMessage:
        """The message up to now."""
        calls = (ToolCall(name, "".join(pieces), id_) for name, id_, pieces in self._calls)
        return ParsedMessage("".join(self._reasoning), "".join(self._content), tuple(calls))


def parse_whole(parser: MessageParser, token_ids: Sequence[int]) -> ParsedMessage:
    """The message of a completion that is there as a whole."""
    builder = MessageBuilder()
    builder.add(parser.push(token_ids))
    builder.add(parser.finish())
    return builder.message()


def new_tool_call_id() -> str:
    """An id for a call whose format gives it none; unique among all messages."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class MessageWriter:
    """Collects what a parser found, until it is taken as one delta.

    Attributes:
        num_tokens: tokens read up to now; the parser counts them here.
        stop_match: as of MessageParser; whatever comes later is ignored.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.stop_match: StopMatch | None = None
        self._min_tokens = 0
        # One for both: the text in which a stop string may lie ends where the channel does.
        self._filter = StopFilter(())
        self._is_reasoning = False
        self._is_stray_begun = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._num_calls = 0
        self._calls: list[tuple[int, str | None, str | None, list[str]]] = []

    def begin_answer(self, rules: StopRules) -> None:
        """What was written up to now is the prompt's: only its tool calls belong to the answer.

        Raises:
            ValueError: a stop string is empty.
        """
        self.num_tokens = 0
        self._min_tokens = rules.min_tokens
        self._filter = StopFilter(rules.stop, is_stop_kept=rules.include_stop_str_in_output)
        self._reasoning, self._content = [], []

    def reasoning(self, text: str) -> None:
        self._write(text, is_reasoning=True)

    def content(self, text: str) -> None:
        self._write(text, is_reasoning=False)

    def stray(self, text: str) -> None:
        """Text where the format has none: content, but for the blanks that it opens with."""
        text = text if self._is_stray_begun else text.lstrip()
        if text:
            self._is_stray_begun = True
            self.content(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        if self.stop_match is None:
            self._calls.append((self._num_calls, call_id or new_tool_call_id(), name, []))
            self._num_calls += 1

    def arguments(self, text: str) -> None:
        """The next piece of the newest call's arguments."""
        if not text or self.stop_match is not None:
            return
        index = self._num_calls - 1
        if not self._calls or self._calls[-1][0] != index:
            self._calls.append((index, None, None, []))
        self._calls[-1][3].append(text)

    def end_text(self) -> None:
        """A marker ends the text before it: what was held back is no stop string."""
        self._is_stray_begun = False
        self._out(self._filter.finish())

    def take(self) -> MessageDelta:
        """All that was collected since the last time."""
        calls = tuple(
            ToolCallDelta(index, call_id, name, "".join(pieces))
            for index, call_id, name, pieces in self._calls
        )
        delta = MessageDelta("".join(self._reasoning), "".join(self._content), calls)
        self._reasoning, self._content, self._calls = [], [], []
        return delta

    def _write(self, text: str, *, is_reasoning: bool) -> None:
        if self.stop_match is not None:
            return
        if is_reasoning != self._is_reasoning:
            self._out(self._filter.finish())
            self._is_reasoning = is_reasoning
        self._out(self._filter.push(text, may_stop=self.num_tokens >= self._min_tokens))
        if self._filter.stop is not None:
            self.stop_match = StopMatch(self._filter.stop, self.num_tokens)

    def _out(self, text: str) -> None:
        if text:
            (self._reasoning if self._is_reasoning else self._content).append(text)
