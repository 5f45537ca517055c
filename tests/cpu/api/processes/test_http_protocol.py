"""What one connection may take of a client's and of the server's patience, over real sockets."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from stagecoach.api.processes.http_protocol import (
    MAX_HEAD_BYTES,
    MAX_URL_BYTES,
    BoundedProtocol,
    Patience,
)
from stagecoach.request import FinishReason
from tests.cpu.api.asgi import call
from tests.cpu.api.scripted import scripted_server

LIMIT_SECONDS = 10.0
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
App = Callable[..., Awaitable[None]]


class Front:
    """Connections to an application behind the protocol, in this event loop."""

    def __init__(self, port: int, protocols: list[BoundedProtocol]) -> None:
        self.protocols = protocols
        self.writers: list[asyncio.StreamWriter] = []
        self._port = port

    async def connect(
        self, *, buffer_bytes: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """`buffer_bytes`: what the reader's kernel takes before the application reads."""
        connection = socket.socket()
        if buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**12)
        self.writers.append(writer)
        return reader, writer

    async def answer(self, *pieces: bytes) -> bytes:
        """Send these, and read until the server closes."""
        reader, writer = await self.connect()
        async with asyncio.timeout(LIMIT_SECONDS):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            return await reader.read()


@asynccontextmanager
async def front(
    app: Any, *, header_seconds: float = 30.0, send_seconds: float = 30.0
) -> AsyncIterator[Front]:
    config = uvicorn.Config(app, lifespan="off", access_log=False, log_level="critical")
    config.load()
    state, protocols = ServerState(), []

    def make() -> BoundedProtocol:
        protocol = BoundedProtocol(
            config=config,
            server_state=state,
            app_state={},
            patience=Patience(header_seconds=header_seconds, send_seconds=send_seconds),
        )
        protocols.append(protocol)
        return protocol

    with socket.socket() as listener:
        # Connections inherit it: what the kernel takes of an answer nobody reads.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        listener.bind(("127.0.0.1", 0))
        server = await asyncio.get_running_loop().create_server(make, sock=listener)
        async with server:
            clients = Front(listener.getsockname()[1], protocols)
            try:
                yield clients
            finally:
                for writer in clients.writers:
                    writer.transport.abort()
                await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_SECONDS):
        while state.tasks or state.connections:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)


async def hello(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    while message.get("more_body"):
        message = await receive()
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hi"})


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and code of an answer that is one of ours."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert "content-type: application/json" in lines and "connection: close" in lines
    return int(lines[0].split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"nonsense\r\n\r\n"], (400, "invalid_http")),
        ([b"GET / HTTP/1.1\r\nho st: x\r\n\r\n"], (400, "invalid_http")),
        ([b"GET /" + b"a" * MAX_URL_BYTES + b" HTTP/1.1\r\n\r\n"], (414, "url_too_long")),
        ([b"GET /", *[b"a" * 1000] * 40], (414, "url_too_long")),
        ([GET + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n"], (431, "headers_too_large")),
        ([GET, *[b"x: y\r\n"] * 20_000], (431, "headers_too_large")),
        ([GET + b"x: ", *[b"y" * 1000] * 100], (431, "headers_too_large")),
        ([GET, b"x: "], (408, "header_timeout")),
    ],
    ids=["no HTTP", "bad header", "URL", "URL in pieces", "header", "many", "endless", "slow"],
)
def test_a_head_that_is_none_of_ours_is_refused(
    pieces: list[bytes], expected: tuple[int, str]
) -> None:
    async def run() -> None:
        async with front(hello, header_seconds=0.3 if expected[0] == 408 else 30) as server:
            assert refusal(await server.answer(*pieces)) == expected
            # Nobody else is any the worse for it.
            whole = await server.answer(GET + b"connection: close\r\n\r\n")
            assert whole.startswith(b"HTTP/1.1 200") and whole.endswith(b"hi")

    asyncio.run(run())


def test_a_connection_on_which_nothing_is_asked_is_closed() -> None:
    async def run() -> None:
        async with front(hello, header_seconds=0.05) as server:
            assert await server.answer() == b""

    asyncio.run(run())


def test_the_next_request_of_a_connection_has_its_own_time() -> None:
    async def run() -> None:
        async with front(hello, header_seconds=0.5) as server:
            reader, writer = await server.connect()
            for _ in range(4):
                writer.write(GET + b"\r\n")
                assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.15)
            writer.write(GET)
            assert refusal(await reader.read()) == (408, "header_timeout")

    asyncio.run(run())


def test_a_body_may_take_longer_than_a_head() -> None:
    async def run() -> None:
        async with front(hello, header_seconds=0.3) as server:
            reader, writer = await server.connect()
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
            await asyncio.sleep(0.4)
            writer.write(b"cd")
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")

    asyncio.run(run())


def test_garbage_behind_a_request_does_not_write_into_its_answer() -> None:
    has_begun = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        has_begun.set()
        while (await receive())["type"] != "http.disconnect":
            continue

    async def run() -> None:
        async with front(slow) as server:
            reader, writer = await server.connect()
            writer.write(GET + b"\r\n")
            await has_begun.wait()
            writer.write(b"\x00garbage\r\n\r\n")
            answer = await reader.read()
            assert b"one" in answer and b"HTTP/1.1 400" not in answer

    asyncio.run(run())


class Fountain:
    """An application that sends `total` bytes, as fast as they are taken."""

    def __init__(self, total: int, piece: int = 1000) -> None:
        self.num_sent = 0
        self.has_ended = False
        self._total = total
        self._piece = piece

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sender = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(self._gone(receive))
        await asyncio.wait((sender, gone), return_when=asyncio.FIRST_COMPLETED)
        for task in (sender, gone):
            task.cancel()
        await asyncio.gather(sender, gone, return_exceptions=True)
        self.has_ended = True

    async def _send(self, send: Any) -> None:
        while self.num_sent < self._total:
            body = b"x" * self._piece
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self.num_sent += self._piece
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue


def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    fountain = Fountain(10**8)

    async def run() -> None:
        async with front(fountain, send_seconds=0.2) as server:
            _, writer = await server.connect(buffer_bytes=4096)
            writer.write(GET + b"\r\n")
            async with asyncio.timeout(LIMIT_SECONDS):
                while not fountain.has_ended:
                    await asyncio.sleep(0.01)

    asyncio.run(run())
    # What waits is what the transport, the stream reader and two kernels hold.
    assert fountain.num_sent < 400_000


def test_a_reader_that_takes_a_little_now_and_then_is_kept() -> None:
    fountain = Fountain(300_000)

    async def run() -> None:
        async with front(fountain, send_seconds=0.5) as server:
            reader, writer = await server.connect(buffer_bytes=4096)
            writer.write(GET + b"connection: close\r\n\r\n")
            num_bytes, num_reads = 0, 0
            while data := await reader.read(2**13):
                num_bytes += len(data)
                num_reads += 1
                # All together it takes longer than the server waits for one that takes nothing.
                await asyncio.sleep(0.06 if num_reads < 15 else 0)
            assert num_bytes > 300_000

    asyncio.run(run())


def request_bytes(path: str, **body: Any) -> bytes:
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    ).encode() + data


async def read_events(reader: asyncio.StreamReader) -> str:
    """The text of a stream of completions."""
    text = ""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return text


def test_a_reader_that_stops_holds_little_and_then_gets_everything(model_folder: Path) -> None:
    """Thousands of tokens come while it sleeps; a reader beside it notices nothing."""
    letters = [97 + number % 26 for number in range(400)]
    expected = bytes(letters).decode()

    with scripted_server(model_folder) as (server, engine):

        async def run() -> None:
            async with front(server.app) as net:
                body = {"prompt": "a", "n": 12, "stream": True, "max_tokens": 400}
                sleeper, writer = await net.connect(buffer_bytes=4096)
                writer.write(request_bytes("/v1/completions", **body, return_token_ids=True))
                await until(lambda: len(engine.open) >= 1)
                await feed(engine, letters[:1])
                await until(lambda: len(engine.open) == 12)
                for start in range(1, 399):
                    await feed(engine, letters[start : start + 1])
                beside, second = await net.connect()
                engine.say([104, 105])
                second.write(request_bytes("/v1/completions", prompt="b", stream=True))
                assert await asyncio.wait_for(read_events(beside), LIMIT_SECONDS) == "hi"
                buffered = [
                    protocol.transport.get_write_buffer_size()
                    for protocol in net.protocols
                    if protocol.transport is not None
                ]
                # uvicorn's high water mark, and one event beyond it.
                assert 0 < max(buffered) < 2**16 + 2**14
                await feed(engine, letters[399:], is_last=True)
                texts = await asyncio.wait_for(read_sorted(sleeper), LIMIT_SECONDS)
                # The followers of the first begin one token later.
                assert texts == [expected] + [expected[1:]] * 11

        server.run(run())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not holds():
            await asyncio.sleep(0.001)


async def feed(engine: Any, token_ids: list[int], *, is_last: bool = False) -> None:
    """The same tokens to every request that is open."""
    ending = {"finish_reason": FinishReason.LENGTH} if is_last else {}
    for request_id in list(engine.open):
        engine.tell(request_id, token_ids=tuple(token_ids), **ending)
    await asyncio.sleep(0)


async def read_sorted(reader: asyncio.StreamReader) -> list[str]:
    """The texts of the choices."""
    texts: dict[int, str] = {}
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


def test_a_body_that_comes_slowly_is_answered_408(model_folder: Path) -> None:
    with scripted_server(model_folder, client_body_timeout_seconds=0.2) as (server, _):

        async def run() -> None:
            async with front(server.app) as net:
                whole = request_bytes("/v1/completions", prompt="a")
                assert refusal(await net.answer(whole[:-3])) == (408, "body_timeout")

        server.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_and_is_aborted(
    model_folder: Path, *, stream: bool
) -> None:
    with scripted_server(model_folder, request_timeout_seconds=0.1) as (server, engine):
        answer = server.post("/v1/completions", prompt="a", stream=stream)
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        assert "--request-timeout" in answer.error["message"]
        assert engine.num_aborted == 1


def test_a_stream_that_takes_too_long_ends_with_an_error_event(model_folder: Path) -> None:
    with scripted_server(model_folder, request_timeout_seconds=0.2) as (server, engine):

        async def run() -> Any:
            asking = asyncio.create_task(
                call(server.app, "POST", "/v1/completions", {"prompt": "a", "stream": True})
            )
            await until(lambda: bool(engine.open))
            await feed(engine, [104])
            return await asking

        answer = server.run(run())
        assert answer.status == 200
        assert answer.events[-1]["error"]["code"] == "timeout"
        assert engine.num_aborted == 1


def test_a_request_that_ends_in_time_leaves_no_timer(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer holds the whole request."""
    timers: list[asyncio.TimerHandle] = []
    with scripted_server(model_folder, request_timeout_seconds=60.0) as (server, engine):
        engine.say([104, 105])
        loop = server.runner.get_loop()
        call_later = loop.call_later

        def note(*args: Any, **options: Any) -> asyncio.TimerHandle:
            timers.append(call_later(*args, **options))
            return timers[-1]

        monkeypatch.setattr(loop, "call_later", note)
        assert server.post("/v1/completions", prompt="a").status == 200
    assert timers and all(timer.cancelled() for timer in timers)
