"""The server in this process: the routes over a small engine of threads, in one event loop."""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fastapi import FastAPI

from stagecoach.api.app import make_app
from stagecoach.api.engine_service import EngineService
from stagecoach.api.settings import ServerSettings
from stagecoach.config.engine import EngineConfig
from stagecoach.llm import open_model
from stagecoach.model.tiny import TinyShape, kimi_k3_config, write_tiny_model
from tests.cpu.api.asgi import Answer, call
from tests.small_engine import OPTIONS

T = TypeVar("T")

MODEL = "small"
SHAPE = TinyShape(num_layers=4, mla_layers=(2, 3), block_size=2, max_length=512)


class Server:
    """An application whose event loop runs while a test waits for something."""

    def __init__(self, app: FastAPI, service: EngineService) -> None:
        self.app = app
        self.service = service
        self.runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def call(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Answer:
        return self.run(call(self.app, method, path, body, headers))

    def post(self, path: str, **body: Any) -> Answer:
        return self.call("POST", path, body)

    def get(self, path: str) -> Answer:
        return self.call("GET", path)

    async def is_idle(self) -> bool:
        """Wait until the engine has nothing to do; False if that never comes."""
        for _ in range(500):
            stats = await self.service.stats()
            is_free = (stats.num_free_pages, stats.num_free_slots) == (
                stats.num_pages,
                stats.num_slots,
            )
            if stats.num_running == stats.num_waiting == 0 and is_free:
                return True
            await asyncio.sleep(0.01)
        return False


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, kimi_k3_config(SHAPE), seed=3, max_shard_bytes=200_000)
    return folder


@pytest.fixture(scope="session")
def started(model_folder: Path) -> Iterator[Server]:
    """One engine for all tests; `server` is the fixture to use."""
    options: dict[str, Any] = OPTIONS | {
        "distributed_executor_backend": "uni",
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
    }
    config, tokenizer = open_model(EngineConfig(model=str(model_folder), **options))
    service = EngineService(config, tokenizer, max_queue_requests=20, stall_timeout_seconds=60)
    settings = ServerSettings(served_model_names=(MODEL, "other-name"), max_body_bytes=100_000)
    server = Server(make_app(service, settings, "1.2.3"), service)
    server.run(service.load())
    assert service.failure is None
    yield server
    service.close()
    server.runner.close()


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """Nothing of a test is left when it ends: no request, no task, no page."""
    yield started
    assert started.run(started.is_idle())
    assert started.service.num_open_requests == 0
    assert started.service.counts.num_completions == 0
    assert not asyncio.all_tasks(started.runner.get_loop())
