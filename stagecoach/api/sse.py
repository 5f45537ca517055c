"""Server-sent events, and noticing that the client has gone.

Owns the frame of an event and the life of a response whose length nobody knows. An event is
made when the one before has been taken, so a slow reader holds nothing but what is written.
Knows nothing of what events say.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stagecoach.api.error_body import failure_of

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event, with a name where its protocol has names; `data` is JSON, without line breaks."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"


def named_frames(events: Iterable[msgspec.Struct]) -> bytes:
    """Several events, each under the tag of its struct."""
    return b"".join(
        frame(msgspec.json.encode(event), str(event.__struct_config__.tag)) for event in events
    )


async def until_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, cancelled when the client goes. The body has been read.

    Raises:
        ClientDisconnect: it went.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _end(task, gone)


async def stream(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """A response of `events`. It begins with the first of them: until then, what is raised still
    becomes a status.

    Raises:
        ClientDisconnect: the client went before the first event.
    """
    try:
        first = await until_disconnected(request, _next(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


class EventStream(Response):
    """Sends framed events until there are no more, or the client goes.

    An error is one more event, the last: no [DONE] follows it.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        # No super().__init__: it would count the length of a body.
        self.status_code = 200
        self.background = None
        # A proxy that collects events before it hands them on makes streams pointless.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait((sender, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(sender, gone)
        if not sender.cancelled():
            sender.result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events):
            await send(_body(self._first))
            try:
                async for event in self._events:
                    await send(_body(event))
            except Exception as error:  # noqa: BLE001 - the edge: the table tells it or logs it
                await send(_body(frame(failure_of(error).body)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
