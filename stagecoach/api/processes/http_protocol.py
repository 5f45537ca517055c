"""HTTP on one connection: how long a client may take for it, and how large its head may be.

Owns what uvicorn's protocol leaves open: a head that never ends, in time or in bytes, and a
reader that takes nothing any more. Costs nothing while events flow: both timers only run while
something is awaited of the client.
"""

import asyncio
import http
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stagecoach.api.error_body import HttpError, failure_of

MAX_URL_BYTES = 16 * 1024
MAX_HEAD_BYTES = 64 * 1024
# For a client that still sends, to read why it is refused.
_LINGER_SECONDS = 1.0


class Patience(NamedTuple):
    """Seconds that a client has."""

    header_seconds: float  # from the connection, or the first byte of a request, to its body
    send_seconds: float  # to take something of an answer that is stuck


class _HeadRefused(Exception):
    """Ends the parser's work on a head; what is answered is kept by the connection."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with these limits. 400, 408, 414 and 431 have the usual error body."""

    def __init__(self, *args: Any, patience: Patience, **options: Any) -> None:
        super().__init__(*args, **options)
        self._patience = patience
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._refusal: HttpError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._head_timer)
        self._stop(self._send_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._head_timer is None and (self.cycle is None or not self.cycle.more_body):
            self._await_head()
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._refusal is None:
            # The parser shows a header only once it is whole.
            try:
                self._check_size(self._num_head_bytes)
            except _HeadRefused:
                self.send_400_response("")

    # What the parser calls.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._check_size(0)

    def on_headers_complete(self) -> None:
        self._check_size(sum(len(name) + len(value) + 4 for name, value in self.headers))
        self._stop(self._head_timer)
        self._head_timer = None
        super().on_headers_complete()

    def _check_size(self, num_head_bytes: int) -> None:
        if len(self.url) > MAX_URL_BYTES:
            self._refusal = HttpError(
                414, f"the URL is longer than {MAX_URL_BYTES} bytes", code="url_too_long"
            )
        elif num_head_bytes > MAX_HEAD_BYTES:
            self._refusal = HttpError(
                431, f"the headers are larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large"
            )
        if self._refusal is not None:
            raise _HeadRefused

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self._patience.header_seconds, self._end_wait)

    def _end_wait(self) -> None:
        if self.transport.is_closing():
            return
        if not self._num_head_bytes:
            # It asked nothing, so there is nothing to answer.
            self.transport.close()
            return
        seconds = self._patience.header_seconds
        self._refusal = HttpError(
            408,
            f"the headers did not arrive within {seconds:g} s (--client-header-timeout)",
            code="header_timeout",
        )
        self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse what arrives and close; uvicorn calls it for what is no HTTP."""
        refusal = self._refusal or HttpError(400, "the request is no HTTP/1.1", code="invalid_http")
        self._refusal = refusal
        self._stop(self._head_timer)
        if self.cycle is None or self.cycle.response_complete:
            body = failure_of(refusal).body
            phrase = http.HTTPStatus(refusal.status).phrase
            head = (
                f"HTTP/1.1 {refusal.status} {phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.write_eof()
            # One that closes with bytes unread resets the connection, and the answer with it.
            self.loop.call_later(_LINGER_SECONDS, self.transport.close)
            return
        # An answer is under way, and a second one in its middle would be read as its text.
        self.transport.close()

    # What the transport calls, when its buffer is full and when it has room again.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop(self._send_timer)
        super().resume_writing()

    def _watch_reader(self, num_bytes: int) -> None:
        self._stop(self._send_timer)
        self._send_timer = self.loop.call_later(
            self._patience.send_seconds, self._judge_reader, num_bytes
        )

    def _judge_reader(self, num_bytes_before: int) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes < num_bytes_before:
            self._watch_reader(num_bytes)
        else:
            self.transport.abort()

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
