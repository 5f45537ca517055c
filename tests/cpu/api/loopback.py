"""An application on a real socket of this machine, in the event loop of a test."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

LIMIT_SECONDS = 20.0


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve `app`; gives its URL. Ends when all answers have."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, LIMIT_SECONDS)


async def until(is_so: Callable[[], object]) -> None:
    """Return once it is so."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
