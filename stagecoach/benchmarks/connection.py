"""What a client command needs to know of a server before it starts.

Owns the server's address, the wait for it and the choice of a model. Sends no load.
"""

import time
from collections.abc import Iterable

import httpx

from stagecoach.benchmarks.event_stream import response_error
from stagecoach.errors import ConfigError, ServerError

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0


def request_headers(api_key: str | None, items: Iterable[str]) -> dict[str, str]:
    """Headers of every request; `items` are NAME=VALUE and win over the key.

    Raises:
        ConfigError: an item is of another form.
    """
    headers = {} if not api_key else {"Authorization": f"Bearer {api_key}"}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"--header={item}: must be NAME=VALUE")
        headers[name.strip()] = value.strip()
    return headers


def setup_client(
    base_url: str,
    headers: dict[str, str],
    *,
    option: str = "--base-url",
    transport: httpx.BaseTransport | None = None,
) -> httpx.Client:
    """A client for questions before a run, with one minute for each.

    Args:
        option: how the command line calls the address.

    Raises:
        ConfigError: the address is none.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"{option}={base_url}: must begin with http:// or https://")
    return httpx.Client(
        base_url=base_url, headers=headers, timeout=60.0, transport=transport, trust_env=False
    )


def wait_until_ready(client: httpx.Client, timeout_seconds: float) -> None:
    """Return once /v1/models, and /health where there is one, answer with status 200.

    Raises:
        ServerError: it did not within `timeout_seconds`; says what it did last.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while (failure := _why_not_ready(client)) is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ServerError(f"not ready after {timeout_seconds:g} s: {failure}")
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def first_model(client: httpx.Client) -> str:
    """The first of /v1/models.

    Raises:
        ServerError: there is none, or no such answer.
    """
    try:
        response = client.get("/v1/models")
        if response.status_code != 200:
            raise response_error(response.status_code, response.content)
        listed = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"{client.base_url}: /v1/models: {error}") from None
    models = listed.get("data") if isinstance(listed, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str):
        raise ServerError(f"{client.base_url}: /v1/models lists no model; give --model")
    return name


def _why_not_ready(client: httpx.Client) -> str | None:
    """A server may list its models while it loads them; its health then says so."""
    for path in ("/v1/models", "/health"):
        try:
            status = client.get(path).status_code
        except httpx.HTTPError as error:
            return f"{client.base_url}: {error}"
        is_offered = path == "/v1/models" or status != 404
        if is_offered and status != 200:
            return f"{client.base_url}: {path} has HTTP status {status}"
    return None
