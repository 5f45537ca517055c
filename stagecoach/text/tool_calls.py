"""Tool calls in an XTML answer: typed arguments become one JSON text while they arrive.

Owns what is inside the tools channel. Strings, objects and arrays are told piece by piece; a
number or a word waits for its end, because only then it is known to be one. Nothing that cannot
be told as an argument is lost: it is content.
"""

import json
import re
from typing import Protocol

from stagecoach.text.message_stream import MessageWriter

_SCALAR_BEGINNING = re.compile(
    r"-?((0|[1-9]\d*)(\.\d*)?((?<=\d)[eE][+-]?\d*)?)?"
    r"|t(r(ue?)?)?|f(a(l(se?)?)?)?|n(u(ll?)?)?",
    re.ASCII,
)


class ToolCallParser:
    """Turns the tags and texts of the tools channel into calls.

    A tag that cannot stand inside the open one ends it, as does the end of the message.
    """

    def __init__(self, writer: MessageWriter) -> None:
        self._writer = writer
        self._is_open = False
        self._separator = "{"  # before the next argument
        self._closer = "{}"  # what ends the arguments; nothing does once they are one block
        self._value: _Value | None = None

    def open(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "call":
            self.end()
            self._begin_call(attributes.get("tool"))
            return
        self._end_value()
        if not self._is_open:
            return
        if tag == "argument" and "key" in attributes and self._closer != "":
            key = json.dumps(attributes["key"], ensure_ascii=False)
            self._writer.arguments(f"{self._separator}{key}: ")
            self._separator, self._closer = ", ", "}"
            is_string = attributes.get("type", "string") == "string"
            self._value = _StringValue() if is_string else _TypedValue()
            self._writer.arguments(self._value.push(""))
        elif tag == "json" and self._closer == "{}":
            self._value = _WholeObject()
            self._closer = ""

    def text(self, text: str) -> None:
        if self._value is None:
            self._writer.stray(text)
            return
        self._writer.arguments(self._value.push(text))
        if self._value.surplus:
            self._writer.stray(self._value.surplus)
            self._value.surplus = ""

    def close(self, tag: str) -> None:
        self._end_value()
        if tag == "call":
            self.end()

    def end(self) -> None:
        """The open call is whole."""
        self._end_value()
        if self._is_open:
            self._writer.arguments(self._closer)
        self._is_open = False

    def cut(self) -> None:
        """No token follows: the open call stays unfinished."""
        if self._value is not None:
            self._writer.arguments(self._value.cut())

    def _begin_call(self, name: str | None) -> None:
        self._is_open = bool(name)
        self._separator, self._closer = "{", "{}"
        if name:
            self._writer.begin_call(name)

    def _end_value(self) -> None:
        if self._value is not None:
            self._writer.arguments(self._value.end())
        self._value = None


class _Value(Protocol):
    """A value while it arrives; each method returns the next piece of its JSON."""

    surplus: str  # text behind a value that was complete already

    def push(self, text: str) -> str: ...

    def end(self) -> str: ...

    def cut(self) -> str: ...


class _StringValue:
    """Raw text, told as a JSON string."""

    def __init__(self) -> None:
        self.surplus = ""
        self._quote = '"'

    def push(self, text: str) -> str:
        quote, self._quote = self._quote, ""
        return quote + _escaped(text)

    def end(self) -> str:
        return '"'

    def cut(self) -> str:
        return ""


class _WholeObject:
    """All arguments as one JSON text, told as it is."""

    def __init__(self) -> None:
        self.surplus = ""
        self._closer = "{}"

    def push(self, text: str) -> str:
        if text:
            self._closer = ""
        return text

    def end(self) -> str:
        return self._closer

    def cut(self) -> str:
        return ""


class _TypedValue:
    """A JSON value; what turns out to be none is told as a string of the same text.

    An object or array is told as it arrives, up to the bracket that ends it, so one that is
    malformed inside stays so.
    """

    def __init__(self) -> None:
        self.surplus = ""
        self._held: list[str] = []  # of a value that is no object and no array
        self._depth: int | None = None  # of brackets, once it is one; 0 when it is complete
        self._is_in_string = False
        self._is_escaped = False

    def push(self, text: str) -> str:
        if self._depth is None and not self._held:
            text = text.lstrip()
            if not text:
                return ""
            if text[0] in "{[":
                self._depth = 1
                return text[0] + self._nested(text[1:])
        if self._depth is None:
            self._held.append(text)
            return ""
        return self._nested(text)

    def end(self) -> str:
        if self._depth is not None:
            return ""
        text = "".join(self._held)
        return text.rstrip() if _is_json(text) else f'"{_escaped(text)}"'

    def cut(self) -> str:
        text = "".join(self._held)
        return text if _SCALAR_BEGINNING.fullmatch(text) else f'"{_escaped(text)}'

    def _nested(self, text: str) -> str:
        if self._depth == 0:
            self.surplus = text
            return ""
        assert self._depth is not None
        for position, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = char == "\\"
                self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.surplus = text[position + 1 :]
                    return text[: position + 1]
        return text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_json(text: str) -> bool:
    """Whether `text` is one; NaN and Infinity, which Python reads, are none."""
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
