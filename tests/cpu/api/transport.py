"""Client libraries in this process: their HTTP, handed to the application piece by piece.

Unlike a library's own ASGI transport these hand on what has come of an answer while the rest is
still to come, and close the connection where the client does.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager

import httpx2

from tests.cpu.api.asgi import App, Exchange, exchange
from tests.cpu.api.conftest import Server

_Opening = AbstractAsyncContextManager[Exchange]


class AsyncAppTransport(httpx2.AsyncBaseTransport):
    """For a client that runs in the application's event loop."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        opening = _opened(self._app, request, await request.aread())
        state = await opening.__aenter__()
        stream = _AsyncBody(opening, state)
        try:
            await stream.read_first()
        except BaseException:
            await stream.aclose()
            raise
        assert state.status is not None
        return httpx2.Response(state.status, headers=state.headers, stream=stream)


class AppTransport(httpx2.BaseTransport):
    """For a client that blocks: the application's event loop runs while it waits."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        opening = _opened(self._server.app, request, request.read())
        state = self._server.run(_enter(opening))
        first = self._server.run(state.next_body())
        assert state.status is not None
        stream = _Body(self._server, opening, state, first)
        return httpx2.Response(state.status, headers=state.headers, stream=stream)


class _AsyncBody(httpx2.AsyncByteStream):
    def __init__(self, opening: _Opening, state: Exchange) -> None:
        self._opening = opening
        self._state = state
        self._first: bytes | None = None

    async def read_first(self) -> None:
        self._first = await self._state.next_body()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        piece = self._first
        while piece is not None:
            yield piece
            piece = await self._state.next_body()

    async def aclose(self) -> None:
        await self._opening.__aexit__(None, None, None)


class _Body(httpx2.SyncByteStream):
    def __init__(
        self, server: Server, opening: _Opening, state: Exchange, first: bytes | None
    ) -> None:
        self._server = server
        self._opening = opening
        self._state = state
        self._first = first

    def __iter__(self) -> Iterator[bytes]:
        piece = self._first
        while piece is not None:
            yield piece
            piece = self._server.run(self._state.next_body())

    def close(self) -> None:
        self._server.run(_leave(self._opening))


def _opened(app: App, request: httpx2.Request, body: bytes) -> _Opening:
    headers = {key.lower(): value for key, value in request.headers.items()}
    path = request.url.raw_path.decode()
    return exchange(app, request.method, path, body, headers)


async def _enter(opening: _Opening) -> Exchange:
    return await opening.__aenter__()


async def _leave(opening: _Opening) -> None:
    await opening.__aexit__(None, None, None)
