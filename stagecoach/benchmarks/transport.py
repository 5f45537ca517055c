"""Many connections to one server, kept open between requests.

Owns which connection carries a request. httpx's own pool looks at all its connections for each
request, which at a concurrency of 64 adds more to a measured time than the server takes; here
each connection is a pool of its own, and a request takes whichever was free last.
"""

from collections.abc import AsyncIterator, Callable

import httpx


class ConnectionStack(httpx.AsyncBaseTransport):
    """Opens a connection where none is free; closes none before the end."""

    def __init__(self, open_one: Callable[[], httpx.AsyncBaseTransport] | None = None) -> None:
        """Prepare.

        Args:
            open_one: what carries one request at a time, in place of a connection.
        """
        self._open_one = open_one or _opener()
        self._all: list[httpx.AsyncBaseTransport] = []
        self._free: list[httpx.AsyncBaseTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it; the connection is free again once the response is closed."""
        if not self._free:
            self._all.append(self._open_one())
            self._free.append(self._all[-1])
        connection = self._free.pop()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._free.append(connection)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _LentStream(response.stream, lambda: self._free.append(connection))
        return response

    async def aclose(self) -> None:
        for connection in self._all:
            await connection.aclose()


class _LentStream(httpx.AsyncByteStream):
    """A response's bytes; gives its connection back when closed."""

    def __init__(self, stream: httpx.AsyncByteStream, give_back: Callable[[], None]) -> None:
        self._stream = stream
        self._give_back = give_back

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._give_back()


def _opener() -> Callable[[], httpx.AsyncBaseTransport]:
    # Reading the certificates takes longer than many a request: once for all connections.
    certificates = httpx.create_ssl_context(trust_env=False)
    return lambda: httpx.AsyncHTTPTransport(
        verify=certificates, limits=httpx.Limits(max_connections=1), trust_env=False
    )
