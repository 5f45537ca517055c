"""What a client asks a server before it starts."""

import time

import httpx
import pytest

from stagecoach.benchmarks.connection import (
    first_model,
    request_headers,
    setup_client,
    wait_until_ready,
)
from stagecoach.errors import ConfigError, ServerError
from tests.cpu.benchmarks.fake_server import FakeServer, setup_transport


def _client(handle: object) -> httpx.Client:
    return setup_client("http://fake", {}, transport=httpx.MockTransport(handle))  # type: ignore[arg-type]


def test_the_first_model_is_taken() -> None:
    with setup_client("http://fake", {}, transport=setup_transport(FakeServer())) as client:
        assert first_model(client) == "fake"


@pytest.mark.parametrize("reply", [{}, {"data": []}, [], {"data": [{}]}, {"data": [3]}])
def test_a_list_without_a_model_is_an_error(reply: object) -> None:
    with (
        _client(lambda request: httpx.Response(200, json=reply)) as client,
        pytest.raises(ServerError, match="/v1/models lists no model; give --model"),
    ):
        first_model(client)


def test_the_key_is_sent_and_a_wrong_one_is_told() -> None:
    transport = setup_transport(FakeServer(api_key="secret"))
    with setup_client("http://fake", request_headers("secret", ()), transport=transport) as client:
        assert first_model(client) == "fake"
    with (
        setup_client("http://fake", {}, transport=transport) as client,
        pytest.raises(ServerError, match="HTTP status 401: wrong key"),
    ):
        first_model(client)


def test_headers_win_over_the_key() -> None:
    assert request_headers(None, ()) == {}
    headers = request_headers("key", ["X-A= b=c ", "Authorization=Basic x"])
    assert headers == {"Authorization": "Basic x", "X-A": "b=c"}
    for item in ("X-A", "=b"):
        with pytest.raises(ConfigError, match=f"--header={item}: must be NAME=VALUE"):
            request_headers(None, [item])


def test_an_address_needs_a_scheme() -> None:
    with pytest.raises(ConfigError, match="--base-url=fake:80: must begin with http"):
        setup_client("fake:80", {})


@pytest.mark.parametrize("health", [200, 404])
def test_it_waits_until_the_server_is_ready(monkeypatch: pytest.MonkeyPatch, health: int) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def handle(request: httpx.Request) -> httpx.Response:
        if not pauses:
            raise httpx.ConnectError("refused")
        if request.url.path == "/v1/models":
            return httpx.Response(503 if len(pauses) < 2 else 200)
        # It lists a model that it still loads.
        return httpx.Response(503 if len(pauses) < 4 else health)

    with _client(handle) as client:
        wait_until_ready(client, 60.0)
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6])


def test_it_waits_no_longer_than_it_was_told() -> None:
    begin = time.monotonic()
    with (
        _client(lambda request: httpx.Response(503)) as client,
        pytest.raises(ServerError, match=r"not ready after 0.3 s: .* has HTTP status 503"),
    ):
        wait_until_ready(client, 0.3)
    assert 0.3 <= time.monotonic() - begin < 5
