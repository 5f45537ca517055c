"""Answers of models whose every marker is one special token: think tags, sections of tool calls.

    <think> … </think> content <|tool_calls_section_begin|>
        <|tool_call_begin|> functions.NAME:INDEX <|tool_call_argument_begin|> JSON <|tool_call_end|>

A model that lacks a marker never writes it; with none of them, an answer is its text.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from stagecoach.text.detokenizer import StopMatch, TokenBytes, bytes_of
from stagecoach.text.message_stream import NO_STOPS, MessageDelta, MessageWriter, StopRules

# What each marker begins.
_PLACES: dict[str, Literal["content", "reasoning", "section", "header", "arguments"]] = {
    "<think>": "reasoning",
    "</think>": "content",
    "<|tool_calls_section_begin|>": "section",
    "<|tool_call_begin|>": "header",
    "<|tool_call_argument_begin|>": "arguments",
    "<|tool_call_end|>": "section",
    "<|tool_calls_section_end|>": "content",
}
_HEADER = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?")


class MarkerParser:
    """A MessageParser. The id of a call is the whole of its header, as the format has it.

    Attributes:
        place: what the next token is part of.
        has_reasoned: whether reasoning began, in the prompt's part of the answer too.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        prompt_token_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        rules: StopRules = NO_STOPS,
    ) -> None:
        self.num_reasoning_tokens = 0
        self.content_tokens: list[int] = []
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._writer = MessageWriter()
        self.place: str = "content"
        self.has_reasoned = False
        self._header: list[str] = []
        self._is_call_open = False
        self._has_arguments = False
        for token_id in _after_last(prompt_token_ids, eos_token_ids):
            self._read(token_id)
        self.num_reasoning_tokens = 0
        self.content_tokens.clear()
        self._writer.begin_answer(rules)

    @property
    def stop_match(self) -> StopMatch | None:
        return self._writer.stop_match

    def push(self, token_ids: Iterable[int]) -> MessageDelta:
        """See MessageParser."""
        for token_id in token_ids:
            if self._writer.stop_match is not None:
                break
            self._writer.num_tokens += 1
            self._read(token_id)
        return self._writer.take()

    def finish(self) -> MessageDelta:
        """See MessageParser."""
        self._text(self._decoder.decode(b"", final=True))
        self._writer.end_text()
        return self._writer.take()

    def _read(self, token_id: int) -> None:
        name = self._tokenizer.special_name(token_id)
        if name in _PLACES:
            self._text(self._decoder.decode(b"", final=True))
            self._writer.end_text()
            self._enter(_PLACES[name])
            return
        data = bytes_of(self._tokenizer, token_id, skip_special_tokens=self._skip_special_tokens)
        if name is None and self.place == "reasoning":
            self.num_reasoning_tokens += 1
        elif name is None and self.place == "content":
            self.content_tokens.append(self._writer.num_tokens - 1)
        self._text(self._decoder.decode(data))

    def _text(self, text: str) -> None:
        if self.place == "reasoning":
            self._writer.reasoning(text)
        elif self.place == "content":
            self._writer.content(text)
        elif self.place == "header":
            self._header.append(text)
        elif self._is_call_open and text:
            self._has_arguments = True
            self._writer.arguments(text)
        else:
            self._writer.stray(text)

    def _enter(self, place: str) -> None:
        header, self._header = "".join(self._header), []
        if self._is_call_open and not self._has_arguments:
            self._writer.arguments("{}")
        self._is_call_open = self._has_arguments = False
        match = _HEADER.fullmatch(header.strip())
        if place == "arguments" and match is not None:
            self._writer.begin_call(match["name"], header.strip())
            self._is_call_open = True
        else:
            # A header that no arguments follow names no call.
            self._writer.stray(header)
            self._writer.end_text()
        self.place = place
        self.has_reasoned |= place == "reasoning"


def _after_last(token_ids: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    """The part of `token_ids` behind the last that is one of `ends`."""
    for start in range(len(token_ids), 0, -1):
        if token_ids[start - 1] in ends:
            return token_ids[start:]
    return token_ids
