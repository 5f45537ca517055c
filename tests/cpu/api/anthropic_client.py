"""The `anthropic` package, unchanged, over an application in this process.

Answers and events are checked against the package's own types: what it does not know is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx2

from tests.cpu.api.conftest import Server
from tests.cpu.api.transport import AppTransport, AsyncAppTransport

_OPTIONS: dict[str, Any] = {
    "base_url": "http://test",
    "api_key": "none",
    "max_retries": 0,
    "_strict_response_validation": True,
}


@contextmanager
def anthropic_client(server: Server, **options: Any) -> Iterator[anthropic.Anthropic]:
    http_client = httpx2.Client(transport=AppTransport(server))
    with anthropic.Anthropic(http_client=http_client, **_OPTIONS | options) as client:
        yield client


def async_anthropic_client(server: Server) -> anthropic.AsyncAnthropic:
    """To be used within the server's event loop, and closed there."""
    http_client = httpx2.AsyncClient(transport=AsyncAppTransport(server.app))
    return anthropic.AsyncAnthropic(http_client=http_client, **_OPTIONS)
