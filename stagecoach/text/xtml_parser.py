"""A K3 answer in XTML, token by token: which channel a text belongs to.

    think ── response ── tools          each opens and closes by a tag

Models leave out tags, so a channel that opens ends the one before it, and text between channels
is content. The message ends with its own tag or with any token that ends a turn.
"""

from collections.abc import Iterable, Sequence

from stagecoach.text.detokenizer import StopMatch, TokenBytes
from stagecoach.text.message_stream import NO_STOPS, MessageDelta, MessageWriter, StopRules
from stagecoach.text.tokenizer import END_TOKEN_NAMES
from stagecoach.text.tool_calls import ToolCallParser
from stagecoach.text.xtml import CHANNELS, Event, XtmlReader, parse_attributes


class XtmlParser:
    """A MessageParser for K3.

    The prompt says where the answer begins: what follows its last message is read first, and of
    that only the tool calls are told, because a call that the prompt opens is the answer's.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        rules: StopRules = NO_STOPS,
    ) -> None:
        self.num_reasoning_tokens = 0
        self.content_tokens: list[int] = []
        self._reader = XtmlReader(tokenizer, skip_special_tokens=skip_special_tokens)
        self._writer = MessageWriter()
        self._calls = ToolCallParser(self._writer)
        self._channel: str | None = None
        self._is_ended = False
        for token_id in _opening_of_answer(tokenizer, prompt_token_ids):
            self._read(token_id)
        self._is_ended = False
        self.num_reasoning_tokens = 0
        self.content_tokens.clear()
        self._writer.begin_answer(rules)

    @property
    def stop_match(self) -> StopMatch | None:
        return self._writer.stop_match

    @property
    def channel(self) -> str | None:
        """The channel that is open."""
        return self._channel

    def push(self, token_ids: Iterable[int]) -> MessageDelta:
        """See MessageParser."""
        for token_id in token_ids:
            if self._is_ended or self._writer.stop_match is not None:
                break
            self._writer.num_tokens += 1
            self._read(token_id)
        return self._writer.take()

    def finish(self) -> MessageDelta:
        """See MessageParser."""
        if not self._is_ended:
            for event in self._reader.finish():
                self._apply(event)
            self._calls.cut()
            self._writer.end_text()
            self._is_ended = True
        return self._writer.take()

    def _read(self, token_id: int) -> None:
        for event in self._reader.read(token_id):
            self._apply(event)

    def _apply(self, event: Event) -> None:
        if event.kind == "text":
            self._text(event)
            return
        self._writer.end_text()
        if event.kind == "end" or (event.kind == "close" and event.tag == "message"):
            self._calls.end()
            self._channel = None
            self._is_ended = True
        elif event.kind == "open" and event.tag in CHANNELS:
            self._calls.end()
            self._channel = event.tag
        elif event.kind == "close" and event.tag == self._channel:
            self._calls.end()
            self._channel = None
        elif event.kind == "open" and (event.tag == "call" or self._channel == "tools"):
            self._channel = "tools"
            self._calls.open(event.tag, parse_attributes(event.text))
        elif self._channel == "tools":
            self._calls.close(event.tag)

    def _text(self, event: Event) -> None:
        if self._channel == "think":
            self.num_reasoning_tokens += event.num_tokens
            self._writer.reasoning(event.text)
        elif self._channel == "response":
            # What a marker proves to be text ended before it.
            end = self._writer.num_tokens - self._reader.is_at_marker
            self.content_tokens.extend(range(end - event.num_tokens, end))
            self._writer.content(event.text)
        elif self._channel == "tools":
            self._calls.text(event.text)
        else:
            self._writer.stray(event.text)


def _opening_of_answer(tokenizer: TokenBytes, prompt_token_ids: Sequence[int]) -> Sequence[int]:
    """What the prompt holds behind its last whole message."""
    for start in range(len(prompt_token_ids), 0, -1):
        if tokenizer.special_name(prompt_token_ids[start - 1]) in END_TOKEN_NAMES:
            return prompt_token_ids[start:]
    return prompt_token_ids
