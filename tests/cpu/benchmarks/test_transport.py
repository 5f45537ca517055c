"""Connections of a load generator: as many as requests at a time, and used again."""

import asyncio

import httpx
import pytest

from stagecoach.benchmarks.transport import ConnectionStack
from tests.cpu.benchmarks.fake_server import FakeServer, FakeTransport, served

_BODY = {"prompt": "a", "max_tokens": 3}


class _Counted(FakeTransport):
    """A connection that carries one request at a time."""

    def __init__(self, server: FakeServer) -> None:
        super().__init__(server)
        self.num_requests = 0
        self.is_closed = False
        self.fails = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_requests += 1
        if self.fails:
            raise httpx.ReadError("gone")
        return await super().handle_async_request(request)

    async def aclose(self) -> None:
        self.is_closed = True


async def _ask(client: httpx.AsyncClient) -> str:
    async with client.stream("POST", "http://fake/v1/completions", json=_BODY) as response:
        return (await response.aread()).decode()


def test_requests_at_a_time_have_connections_of_their_own_and_later_ones_use_them_again() -> None:
    opened: list[_Counted] = []

    def open_one() -> _Counted:
        opened.append(_Counted(FakeServer(step_seconds=0.001)))
        return opened[-1]

    async def main() -> None:
        async with httpx.AsyncClient(transport=ConnectionStack(open_one)) as client:
            for _ in range(3):
                answers = await asyncio.gather(*(_ask(client) for _ in range(4)))
                assert all("[DONE]" in answer for answer in answers)
            assert not any(connection.is_closed for connection in opened)

    asyncio.run(main())
    assert [connection.num_requests for connection in opened] == [3] * 4
    assert all(connection.is_closed for connection in opened)


def test_a_connection_is_free_again_after_a_failure_and_after_a_cut_answer() -> None:
    connection = _Counted(FakeServer())

    async def main() -> None:
        async with httpx.AsyncClient(transport=ConnectionStack(lambda: connection)) as client:
            connection.fails = True
            with pytest.raises(httpx.ReadError):
                await _ask(client)
            connection.fails = False
            async with client.stream("POST", "http://fake/v1/completions", json=_BODY) as response:
                async for _ in response.aiter_raw():
                    break
            assert "[DONE]" in await _ask(client)

    asyncio.run(main())
    assert connection.num_requests == 3


def test_it_opens_real_connections() -> None:
    async def main(url: str) -> list[int]:
        async with httpx.AsyncClient(transport=ConnectionStack()) as client:
            asked = (client.post(f"{url}/tokenize", json={"prompt": "a"}) for _ in range(3))
            return [response.status_code for response in await asyncio.gather(*asked)]

    with served(FakeServer()) as url:
        assert asyncio.run(main(url)) == [200] * 3
