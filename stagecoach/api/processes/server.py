"""One process that answers HTTP: listen, load, serve, drain, end.

Owns the event loop's life and what signals do to it. The first SIGTERM or SIGINT drains: what
is open may finish within the deadline, then ends with an error. The second ends everything at
once.
"""

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, cast

import uvicorn

from stagecoach.api.app import make_app
from stagecoach.api.engine_service import EngineService
from stagecoach.api.processes.http_protocol import BoundedProtocol, Patience
from stagecoach.api.processes.listeners import listening
from stagecoach.api.settings import ServerSettings
from stagecoach.config.engine import ResolvedConfig
from stagecoach.observe.log import adopt, get_logger
from stagecoach.text.tokenizer import Tokenizer

_log = get_logger(__name__)

# Longer than the idle time after which usual proxies drop a connection of theirs.
_KEEP_ALIVE_SECONDS = 75
# After the deadline, for the last events to be written.
LAST_WORDS_SECONDS = 5
# What one of several processes obeys as another obeys SIGTERM, which reaches it twice where all
# processes of a service are signalled: from there, and passed on by the supervisor.
SUPERVISOR_SIGNAL = signal.SIGUSR1
# What the log says, once, of a server whose engine died and of one that was asked to end.
DEATH_LINE = "%s: %s. Requests get 503 until this server is ended and started again"
ENDING_LINE = "ending: %d open requests may finish within %g s"


def serve(
    config: ResolvedConfig, tokenizer: Tokenizer, settings: ServerSettings, version: str
) -> None:
    """Serve from this process until a signal comes or the engine fails to load.

    Raises:
        ConfigError: the address cannot be listened on.
        ConfigError, CheckpointError, EngineDeadError: why the engine did not load.
    """
    service = make_service(config, tokenizer, settings)
    with listening(settings, num_processes=1) as [listener]:
        serve_on(listener, service, settings, version)


def make_service(
    config: ResolvedConfig, tokenizer: Tokenizer, settings: ServerSettings, **options: Any
) -> EngineService:
    """The engine as the settings want it; `options` are further ones of EngineService."""
    return EngineService(
        config,
        tokenizer,
        max_queue_requests=settings.max_queue_requests,
        stall_timeout_seconds=settings.stall_timeout_seconds,
        request_timeout_seconds=settings.request_timeout_seconds,
        **options,
    )


def serve_on(
    listener: socket.socket,
    service: EngineService,
    settings: ServerSettings,
    version: str,
    on_serving: Callable[[], None] | None = None,
    *,
    is_loaded: bool = False,
) -> None:
    """Serve connections of `listener` until a signal comes or the engine fails to load.

    The engine is closed at the end.

    Args:
        on_serving: called once the engine has loaded.
        is_loaded: it has already, so nobody need be told that it loads.

    Raises:
        ConfigError, CheckpointError, EngineDeadError: why the engine did not load.
    """
    server = _Server(service, settings, version, on_serving, is_loaded=is_loaded)
    try:
        server.run(sockets=[listener])
    finally:
        # Nobody new is to wait for a server that ends.
        listener.close()
        service.close(in_order=not server.force_exit)
    server.check_loaded()


class _Server(uvicorn.Server):
    """uvicorn, which loads the engine beside it and drains before it ends."""

    def __init__(
        self,
        service: EngineService,
        settings: ServerSettings,
        version: str,
        on_serving: Callable[[], None] | None,
        *,
        is_loaded: bool,
    ) -> None:
        patience = Patience(
            header_seconds=settings.client_header_timeout_seconds,
            send_seconds=settings.send_timeout_seconds,
        )
        super().__init__(
            uvicorn.Config(
                make_app(service, settings, version),
                # uvicorn calls it as it would call a class.
                http=cast(Any, functools.partial(BoundedProtocol, patience=patience)),
                ws="none",
                log_config=None,
                log_level="warning" if settings.log_level == "info" else settings.log_level,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=round(settings.shutdown_timeout_seconds)
                + LAST_WORDS_SECONDS,
                server_header=False,
            )
        )
        adopt("uvicorn")
        self._service = service
        self._settings = settings
        self._on_serving = on_serving
        self._is_loaded = is_loaded
        self._was_asked_to_end = False
        self._has_told_death = False
        self._loading: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loading = asyncio.create_task(self._load())
        if self._is_loaded:
            await asyncio.wait([self._loading])
        await super().startup(sockets)

    async def _load(self) -> None:
        try:
            await self._service.load()
        except BaseException:
            # An engine that never came up leaves nothing to wait for.
            self.should_exit = True
            raise
        if self._on_serving is not None:
            self._on_serving()
        else:
            _log.info("serving %s", ", ".join(self._settings.served_model_names))

    @property
    def _is_alone(self) -> bool:
        """Whether no supervisor is told when it serves."""
        return self._on_serving is None

    async def on_tick(self, counter: int) -> bool:
        failure = self._service.failure
        # Of several processes the supervisor tells.
        is_ours = self._is_alone and not self._has_told_death
        if failure is not None and is_ours and self._service.is_loaded:
            self._has_told_death = True
            _log.error(DEATH_LINE, type(failure).__name__, failure)
        return await super().on_tick(counter)

    def check_loaded(self) -> None:
        """
        Raises:
            Exception: why the engine did not load.
        """
        loading = self._loading
        if loading is not None and loading.done() and not loading.cancelled():
            loading.result()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        seconds = self._settings.shutdown_timeout_seconds
        if self._was_asked_to_end and self._is_alone:
            _log.info(ENDING_LINE, self._service.num_open_requests, seconds)
        self._service.drain(seconds)
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
        handled = [signal.SIGINT, signal.SIGTERM] if self._is_alone else [SUPERVISOR_SIGNAL]
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
        self.should_exit = self._was_asked_to_end = True
