"""Server-sent events as an OpenAI-compatible server writes them.

Owns the way from the bytes of a response to JSON objects, whatever the cuts between the bytes.
Knows no field of those objects but `error`.
"""

import json
from collections.abc import Iterator
from typing import Any

from stagecoach.errors import ServerError

_DONE = b"[DONE]"


class EventDecoder:
    """One response's events: bytes in, objects out.

    `is_done` is True once the stream said that it is complete.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self.is_done = False

    def push(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """The events that end in `chunk`.

        Raises:
            ServerError: an event is no JSON object, or it is the server's error.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            event = self._take(line.removesuffix(b"\r"))
            if event is not None:
                yield event

    def _take(self, line: bytes) -> dict[str, Any] | None:
        # Comments, an event's name and its id say nothing here.
        if line:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data" and value == _DONE:
                self.is_done = True
            elif name == b"data":
                self._data.append(value)
            return None
        data, self._data = b"\n".join(self._data), []
        return _object(data) if data else None


def _object(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ServerError(f"an event is no JSON object: {data[:200]!r}")
    if event.get("error"):
        raise ServerError(error_text(event))
    return event


def error_text(body: object) -> str:
    """What an error's body says, in OpenAI's shape or any other."""
    error = body.get("error") if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error
    return str(error)[:500]


def response_error(status: int, body: bytes) -> ServerError:
    """The error of a response whose status is not 200."""
    try:
        text = error_text(json.loads(body))
    except ValueError:
        text = body[:500].decode(errors="replace").strip()
    return ServerError(f"HTTP status {status}: {text}")
