"""A client that calls the application in the same event loop, one message at a time.

Unlike a client library it can read slowly, go in the middle, and send what no library would.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

LIMIT_SECONDS = 20.0


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Of a stream; the last is the text [DONE] if it ended well."""
        return events_of(self.body)


def events_of(body: bytes) -> list[Any]:
    """Those of a stream; one that has a name has it as its type, too."""
    events: list[Any] = []
    for block in body.decode().split("\n\n"):
        if not block:
            continue
        name, _, data = block.rpartition("\n")
        assert data.startswith("data: ") and "\n" not in name, block
        text = data.removeprefix("data: ")
        events.append(text if text == "[DONE]" else json.loads(text))
        assert not name or name == f"event: {events[-1]['type']}", block
    return events


class Exchange:
    """One request under way."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.has_gone = asyncio.Event()
        self.room = asyncio.Semaphore(0)
        self.is_slow = False
        self._has_ended = False

    async def next_body(self) -> bytes | None:
        """The next piece of the body, or None at its end."""
        while not self._has_ended:
            message = await asyncio.wait_for(self.messages.get(), LIMIT_SECONDS)
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {key.decode(): value.decode() for key, value in message["headers"]}
                continue
            if self.is_slow:
                self.room.release()
            self._has_ended = not message.get("more_body", False)
            body: bytes = message.get("body", b"")
            if body:
                return body
        return None

    def go(self) -> None:
        """Close the connection; what is sent from now on is lost."""
        self.has_gone.set()
        self.is_slow = False
        self.room.release()


App = Callable[..., Awaitable[None]]


@asynccontextmanager
async def exchange(
    app: App,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    *,
    is_slow: bool = False,
    is_cut: bool = False,
) -> AsyncIterator[Exchange]:
    """Begin a request; leaving closes the connection and waits for the application.

    Args:
        is_cut: the connection closes before the body has ended.
        is_slow: each piece of the body waits to be read before the next may be sent.
    """
    state = Exchange()
    state.is_slow = is_slow
    bodies = [body]
    fields = {"content-type": "application/json"} if body else {}
    fields |= {"content-length": str(len(body))} | (headers or {})

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": is_cut}
        await state.has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        state.messages.put_nowait(message)
        if state.is_slow and message["type"] == "http.response.body":
            await state.room.acquire()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path.partition("?")[0]),
        "raw_path": path.partition("?")[0].encode(),
        "query_string": path.partition("?")[2].encode(),
        "root_path": "",
        "headers": [(key.encode(), value.encode()) for key, value in fields.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    task = asyncio.ensure_future(app(scope, receive, send))
    try:
        yield state
    finally:
        state.go()
        await asyncio.wait_for(task, LIMIT_SECONDS)


async def call(
    app: App,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request and its whole answer; a body that is no bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    async with exchange(app, method, path, data, headers) as state:
        pieces = []
        while (piece := await state.next_body()) is not None:
            pieces.append(piece)
        assert state.status is not None
        return Answer(state.status, state.headers, b"".join(pieces))
