"""XTML: the markers of K3's chat format, and a stream of tokens as text and tags.

A tag is `<|open|>` or `<|close|>`, a name with attributes, and `<|sep|>`. Markers are special
tokens; the same characters in ordinary tokens are text. Knows no channel and no tool.
"""

import codecs
import re
from typing import Literal, NamedTuple

from stagecoach.text.detokenizer import TokenBytes, bytes_of
from stagecoach.text.tokenizer import END_TOKEN_NAMES

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"

CHANNELS = ("think", "response", "tools")
TAGS = ("message", *CHANNELS, "call", "argument", "json")

_MARKERS = (OPEN, CLOSE, SEP, *END_TOKEN_NAMES)
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')

# What may follow what in a tag; a value, which takes anything up to its quote, is not listed.
_NEXT = {
    ("start", " "): "start",
    ("start", "word"): "name",
    ("name", "word"): "name",
    ("name", " "): "gap",
    ("gap", " "): "gap",
    ("gap", "word"): "key",
    ("key", "word"): "key",
    ("key", "="): "equals",
    ("equals", '"'): "value",
    ("value", '"'): "after",
    ("after", " "): "gap",
}
_MAY_END = ("name", "gap", "after")


def escape_attribute(value: object) -> str:
    """An attribute's value as a tag holds it."""
    return str(value).replace("&", "&amp;").replace('"', "&quot;")


def parse_attributes(text: str) -> dict[str, str]:
    """The attributes of a tag, unescaped."""
    return {
        key: value.replace("&quot;", '"').replace("&amp;", "&")
        for key, value in _ATTRIBUTE.findall(text)
    }


class Event(NamedTuple):
    """What a token completed. `text` is text, or the inside of a tag."""

    kind: Literal["text", "open", "close", "end"]
    text: str = ""
    num_tokens: int = 0  # ordinary tokens that gave the text

    @property
    def tag(self) -> str:
        """The name of the tag."""
        return self.text.split(maxsplit=1)[0]


class XtmlReader:
    """Reads tokens one by one; only a tag, while it may still become one, is held back.

    What opens like a tag but is none is text; a tag that is cut off by another marker, or for
    want of tokens, is dropped. Work is linear in the bytes.

    Attributes:
        is_at_marker: whether the token read last is one.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tag: _BegunTag | None = None
        self.is_at_marker = False

    def read(self, token_id: int) -> list[Event]:
        """What `token_id` completes."""
        name = self._tokenizer.special_name(token_id)
        self.is_at_marker = name in _MARKERS
        if name in _MARKERS:
            return self._marker(name)
        data = bytes_of(self._tokenizer, token_id, skip_special_tokens=self._skip_special_tokens)
        # A special token that is no marker is never reasoning or content to count.
        return self._text(self._decoder.decode(data), num_tokens=int(name is None))

    def finish(self) -> list[Event]:
        """What is left when no token follows."""
        events = self._flush()
        self._tag = None
        return events

    def _marker(self, name: str) -> list[Event]:
        events = self._flush()
        if name == SEP:
            tag, self._tag = self._tag, None
            if tag is not None:
                events.append(tag.end())
            return events
        self._tag = None
        if name in END_TOKEN_NAMES:
            events.append(Event("end"))
        else:
            self._tag = _BegunTag("open" if name == OPEN else "close")
        return events

    def _flush(self) -> list[Event]:
        """A marker ends the text, so a begun character is no character."""
        rest = self._decoder.decode(b"", final=True)
        return self._text(rest, num_tokens=0) if rest else []

    def _text(self, text: str, *, num_tokens: int) -> list[Event]:
        if self._tag is None:
            return [Event("text", text, num_tokens)]
        self._tag.push(text, num_tokens)
        if self._tag.is_possible:
            return []
        tag, self._tag = self._tag, None
        return [tag.as_text()]


class _BegunTag:
    """The inside of a tag that is not ended yet."""

    def __init__(self, kind: Literal["open", "close"]) -> None:
        self.is_possible = True
        self._kind = kind
        self._state = "start"
        self._name = ""
        self._pieces: list[str] = []
        self._num_tokens = 0

    def push(self, text: str, num_tokens: int) -> None:
        self._pieces.append(text)
        self._num_tokens += num_tokens
        for char in text:
            self._step(char)
            if not self.is_possible:
                return

    def end(self) -> Event:
        """The event of the whole tag, or of the text that it is."""
        if self._name not in TAGS or self._state not in _MAY_END:
            return self.as_text()
        return Event(self._kind, "".join(self._pieces).strip())

    def as_text(self) -> Event:
        return Event("text", "".join(self._pieces), self._num_tokens)

    def _step(self, char: str) -> None:
        if self._state == "value" and char != '"':
            return
        kind = "word" if char.isalnum() or char in "_-" else " " if char.isspace() else char
        state = _NEXT.get((self._state, kind))
        if state is None:
            self.is_possible = False
            return
        if state == "name":
            self._name += char
            self.is_possible = any(tag.startswith(self._name) for tag in TAGS)
        elif state == "gap":
            self.is_possible = self._name in TAGS
        self._state = state
