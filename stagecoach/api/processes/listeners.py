"""Where the server listens.

Owns the sockets and the choice how several API processes share an address. Each gets a socket
of its own (SO_REUSEPORT), among which the kernel spreads connections by their ports: with one
socket for all, whichever process wakes first takes a whole burst. A socket outlives its process
in the supervisor, so what has connected waits for the next process of that place.
"""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from stagecoach.api.settings import ServerSettings
from stagecoach.errors import ConfigError
from stagecoach.observe.log import get_logger

_log = get_logger(__name__)

_BACKLOG = 2048


@contextlib.contextmanager
def listening(settings: ServerSettings, num_processes: int) -> Iterator[list[socket.socket]]:
    """Sockets that listen, one for each process; of a Unix socket they all are the same one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        listeners = _bind(settings, num_processes)
    except OSError as error:
        place = (
            f"--uds={settings.uds}"
            if settings.uds is not None
            else f"--host={settings.host} --port={settings.port}"
        )
        raise ConfigError(f"{place}: {error.strerror or error}") from None
    _log.info("listening on %s", _address(listeners[0]))
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()
        if settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)


def _bind(settings: ServerSettings, num_processes: int) -> list[socket.socket]:
    if settings.uds is not None:
        listeners = [_bound(socket.socket(socket.AF_UNIX), settings.uds)] * num_processes
    elif num_processes == 1:
        listeners = [_bind_port(settings.host, settings.port, is_shared=False)]
    else:
        # Alone first: whoever shares a port would be let in beside another server.
        with _bind_port(settings.host, settings.port, is_shared=False) as alone:
            port = alone.getsockname()[1]
        listeners = [_bind_port(settings.host, port, is_shared=True) for _ in range(num_processes)]
    for listener in listeners:
        listener.listen(_BACKLOG)
    return listeners


def _bind_port(host: str, port: int, *, is_shared: bool) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return _bound(listener, (host, port))


def _bound(listener: socket.socket, address: str | tuple[str, int]) -> socket.socket:
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _address(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return name
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"
