"""An OpenAI-compatible server that takes as long as it is told: a model of nothing but delays.

One implementation behind two doors: a transport for httpx, for tests in virtual time, and an ASGI
application for a real socket. Token i is the word `t<i>`.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import uvicorn

Usage = Literal["continuous", "final", "none"]
Fault = Literal["status", "event", "cut", "garbage", "silence"]

JSON = "application/json"


@dataclass
class FakeServer:
    """An answer takes `prefill_seconds` to its first token and `step_seconds` for each further
    `tokens_per_step`. `faults` are by the number of the request, from 0.
    """

    prefill_seconds: float = 0.0
    step_seconds: float = 0.0
    tokens_per_step: int = 1
    usage: Usage = "continuous"
    tells_token_ids: bool = False
    has_tokenize: bool = True
    reasoning: str = ""
    answer: str | None = None  # one piece after the other, instead of numbered words
    faults: dict[int, Fault] = field(default_factory=dict)
    api_key: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Whatever is not a stream."""
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "fake"}, {"id": "other"}]}
        if path == "/tokenize" and self.has_tokenize:
            tokens = [sum(word.encode()) for word in body["prompt"].split()]
            return 200, {"tokens": tokens, "count": len(tokens), "max_model_len": 10**6}
        if path == "/detokenize" and self.has_tokenize:
            return 200, {"prompt": " ".join(f"t{token_id}" for token_id in body["tokens"])}
        return 404, {"error": {"message": f"no {path} here", "type": "NotFoundError"}}

    async def stream(self, number: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The events of one answer, each when it is due."""
        is_chat = "messages" in body
        limit = body["max_completion_tokens"] if is_chat else body["max_tokens"]
        fault = self.faults.get(number)
        prompt = body["messages"] if is_chat else body["prompt"]
        num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        if is_chat:
            yield _event(_choice({"role": "assistant", "content": ""}))
        num_done = 0
        while num_done < limit:
            await asyncio.sleep(self.prefill_seconds if num_done == 0 else self.step_seconds)
            num_new = min(1 if num_done == 0 else self.tokens_per_step, limit - num_done)
            ids = list(range(num_done, num_done + num_new))
            num_done += num_new
            if fault is not None and num_done > limit // 2:
                if fault == "silence":
                    await asyncio.sleep(10**6)
                yield _LAST_WORDS[fault]
                return
            usage = {"prompt_tokens": num_prompt, "completion_tokens": num_done}
            text = self._text(ids)
            event = _choice({"content": text} if is_chat else None, text)
            if is_chat and num_done == 1:
                event["choices"][0]["delta"]["reasoning_content"] = self.reasoning
            if self.tells_token_ids:
                event["choices"][0]["token_ids"] = ids
            if self.usage == "continuous":
                event["usage"] = usage
            yield _event(event)
        end = _choice({} if is_chat else None)
        end["choices"][0]["finish_reason"] = "length"
        yield _event(end)
        if self.usage != "none":
            yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _text(self, ids: list[int]) -> str:
        if self.answer is None:
            return "".join(f"t{token_id} " for token_id in ids)
        return "".join(self.answer[token_id : token_id + 1] for token_id in ids)

    def open(self, headers: dict[str, str], path: str, body: dict[str, Any]) -> "Opened":
        """Status, and what follows it."""
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            return Opened(401, {"error": {"message": "wrong key"}}, None)
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return Opened(*self.reply(path, body), None)
        number = len(self.requests)
        self.requests.append(body)
        self.headers.append(headers)
        if self.faults.get(number) == "status":
            return Opened(503, {"error": {"message": "too many requests", "code": 503}}, None)
        return Opened(200, {}, self.stream(number, body))


@dataclass
class Opened:
    status: int
    body: dict[str, Any]
    stream: AsyncIterator[bytes] | None


class FakeTransport(httpx.AsyncBaseTransport):
    """The server without a network, for an event loop whose time is virtual."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        opened = self._server.open(dict(request.headers), request.url.path, body)
        if opened.stream is None:
            return httpx.Response(opened.status, json=opened.body)
        return httpx.Response(200, stream=_Stream(opened.stream))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def aclose(self) -> None:
        await self._pieces.aclose()  # type: ignore[attr-defined]


def setup_transport(server: FakeServer) -> httpx.MockTransport:
    """For the questions that a client asks before it sends any load."""

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        opened = server.open(dict(request.headers), request.url.path, body)
        return httpx.Response(opened.status, json=opened.body)

    return httpx.MockTransport(handle)


def as_asgi(server: FakeServer) -> Any:
    """The same as an ASGI application."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        content = b""
        while True:
            message = await receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        opened = server.open(headers, scope["path"], json.loads(content or b"{}"))
        kind = JSON if opened.stream is None else "text/event-stream"
        await send(
            {
                "type": "http.response.start",
                "status": opened.status,
                "headers": [(b"content-type", kind.encode())],
            }
        )
        if opened.stream is None:
            text = json.dumps(opened.body).encode()
            await send({"type": "http.response.body", "body": text})
            return
        async for piece in opened.stream:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


@contextmanager
def served(server: FakeServer) -> Iterator[str]:
    """The server on a port of this machine; its address."""
    config = uvicorn.Config(
        as_asgi(server), port=0, log_config=None, lifespan="off", ws="none", loop="asyncio"
    )
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        while not runner.started:
            assert thread.is_alive()
            thread.join(0.01)
        port = runner.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        runner.should_exit = True
        thread.join()


def _choice(delta: dict[str, Any] | None, text: str = "") -> dict[str, Any]:
    content = {"text": text} if delta is None else {"delta": delta}
    return {"id": "x", "choices": [{"index": 0, "finish_reason": None, **content}]}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


_LAST_WORDS = {
    "event": _event({"error": {"message": "the engine died", "type": "Internal"}}),
    "garbage": b"data: {oops\n\n",
    "cut": b"",
    "silence": b"",
}
