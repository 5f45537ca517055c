"""The server's life: listen, load, serve, drain, end.

Owns the sockets and what signals do. The first SIGTERM or SIGINT drains: what is open may
finish within the deadline, then ends with an error. The second ends everything at once.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import uvicorn

from stagecoach.api.app import make_app
from stagecoach.api.engine_service import EngineService
from stagecoach.api.settings import ServerSettings
from stagecoach.errors import ConfigError
from stagecoach.observe.log import get_logger

_log = get_logger(__name__)

# Longer than the idle time after which usual proxies drop a connection of theirs.
_KEEP_ALIVE_SECONDS = 75
# After the deadline, for the last events to be written.
_LAST_WORDS_SECONDS = 5


def serve(service: EngineService, settings: ServerSettings, version: str) -> None:
    """Serve until a signal comes or the engine fails to load; then the engine is closed.

    Raises:
        ConfigError: the address cannot be listened on.
        ConfigError, CheckpointError, EngineDeadError: why the engine did not load.
    """
    listener = _listen(settings)
    server = _Server(service, settings, version)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
        if settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)
        service.close(in_order=not server.force_exit)
    server.check_loaded()


class _Server(uvicorn.Server):
    """uvicorn, which loads the engine beside it and drains before it ends."""

    def __init__(self, service: EngineService, settings: ServerSettings, version: str) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service, settings, version),
                log_level="warning" if settings.log_level == "info" else settings.log_level,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=round(settings.shutdown_timeout_seconds)
                + _LAST_WORDS_SECONDS,
                server_header=False,
            )
        )
        self._service = service
        self._settings = settings
        self._loading: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            _log.info("listening on %s", _address(listener))
        self._loop = asyncio.get_running_loop()
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            await self._service.load()
        except BaseException:
            # An engine that never came up leaves nothing to wait for.
            self.should_exit = True
            raise
        _log.info("serving %s", ", ".join(self._settings.served_model_names))

    def check_loaded(self) -> None:
        """
        Raises:
            Exception: why the engine did not load.
        """
        loading = self._loading
        if loading is not None and loading.done() and not loading.cancelled():
            loading.result()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain(self._settings.shutdown_timeout_seconds)
        if self._loading is not None and not self._loading.done():
            # Its thread waits for the engine: closing is what ends that, with an error that
            # is no news.
            await asyncio.to_thread(self._service.close)
            await asyncio.gather(self._loading, return_exceptions=True)
            self._loading = None
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Unlike uvicorn, ends in order after a signal: it is not raised again."""
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._service.end_open)
        self.should_exit = True


def _listen(settings: ServerSettings) -> socket.socket:
    try:
        if settings.uds is not None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(settings.uds)
        else:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((settings.host, settings.port))
    except OSError as error:
        place = (
            f"--uds={settings.uds}"
            if settings.uds is not None
            else f"--host={settings.host} --port={settings.port}"
        )
        raise ConfigError(f"{place}: {error.strerror or error}") from None
    listener.listen(2048)
    return listener


def _address(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return name
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"
