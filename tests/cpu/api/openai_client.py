"""The `openai` package, unchanged, over an application in this process.

Answers are checked against the package's own types: what it does not know is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import openai

from tests.cpu.api.conftest import Server


class _Transport(httpx2.BaseTransport):
    """Calls the application; a stream arrives as a whole."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.raw_path.decode()
        answer = self._server.call(request.method, path, request.read(), dict(request.headers))
        return httpx2.Response(answer.status, headers=answer.headers, content=answer.body)


@contextmanager
def openai_client(server: Server) -> Iterator[openai.OpenAI]:
    with (
        httpx2.Client(transport=_Transport(server)) as http_client,
        openai.OpenAI(
            base_url="http://test/v1",
            api_key="none",
            max_retries=0,
            http_client=http_client,
            _strict_response_validation=True,
        ) as client,
    ):
        yield client


def async_openai_client(server: Server) -> openai.AsyncOpenAI:
    """To be used within the server's event loop, and closed there."""
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app)),
        _strict_response_validation=True,
    )
