"""A connection between the head and one member: messages, and proof that the other side lives.

Owns the frames on the wire and the signs of life. A side that says nothing for too long is gone,
though no packet ever said so: a cable, a switch or a whole host may end without a word.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from stagecoach.engine.hosts import messages
from stagecoach.engine.hosts.messages import HostMessage, Ping

PING_SECONDS = 1.0
SILENCE_SECONDS = 10.0
_LENGTH = struct.Struct(">I")
_MAX_BYTES = 1 << 22

_Received = TypeVar("_Received", bound=HostMessage)


class LineCutError(Exception):
    """The other side is gone; the text says how that was noticed."""


class Line(Generic[_Received]):
    """Messages both ways over one TCP connection; `send` from any thread."""

    def __init__(
        self, connection: socket.socket, decoder: "msgspec.msgpack.Decoder[_Received]"
    ) -> None:
        connection.settimeout(SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._decoder = decoder
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._gives_signs = False

    @property
    def peer_address(self) -> str:
        """Of the other side."""
        return str(self._socket.getpeername()[0])

    def send(self, message: HostMessage) -> None:
        """Nothing if the other side is gone, which whoever receives is told."""
        data = messages.encode(message)
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> _Received:
        """The next message but signs of life.

        Raises:
            LineCutError: the other side ended, was silent for too long, or speaks otherwise.
        """
        while True:
            [length] = _LENGTH.unpack(self._read(_LENGTH.size))
            if length > _MAX_BYTES:
                raise LineCutError("it speaks another protocol")
            try:
                message = self._decoder.decode(self._read(length))
            except msgspec.DecodeError:
                raise LineCutError("it speaks another protocol") from None
            if not isinstance(message, Ping):
                return message

    def start(self, on_message: Callable[[_Received], None], on_cut: Callable[[str], None]) -> None:
        """From here on messages are told in a thread of their own, then once how the line ended;
        and the other side hears signs of life."""
        self.give_signs()

        def receive() -> None:
            try:
                while True:
                    on_message(self.receive())
            except LineCutError as error:
                if not self._is_closed.is_set():
                    on_cut(str(error))
            finally:
                self.close()

        threading.Thread(target=receive, name="line receive", daemon=True).start()

    def give_signs(self) -> None:
        """The other side hears signs of life from here on; one caller after the other."""
        if self._gives_signs:
            return
        self._gives_signs = True

        def ping() -> None:
            while not self._is_closed.wait(PING_SECONDS):
                self.send(Ping())

        threading.Thread(target=ping, name="line ping", daemon=True).start()

    def wait_until_closed(self, seconds: float) -> None:
        """By either side."""
        self._is_closed.wait(seconds)

    def close(self) -> None:
        """What was sent still arrives; nothing more is told."""
        self._is_closed.set()
        # Wakes who waits for a message, too.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                part = self._socket.recv(num_bytes - len(data))
            except TimeoutError:
                raise LineCutError(
                    f"it gave no sign of life for {SILENCE_SECONDS:g} s: the link is cut, or the "
                    "host hangs"
                ) from None
            except OSError as error:
                raise LineCutError(error.strerror or str(error)) from None
            if not part:
                raise LineCutError("it ended without a word")
            data += part
        return bytes(data)
