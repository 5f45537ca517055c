"""What several API processes cannot be started over, and one that ends before it served."""

from pathlib import Path
from typing import Any

import pytest

from stagecoach.api.processes import supervisor
from stagecoach.api.settings import ServerSettings
from stagecoach.engine.launch import ProcessEngine
from stagecoach.errors import CheckpointError, ConfigError, EngineDeadError, StagecoachError
from tests.cpu.engine.fakes import resolved

SETTINGS = ServerSettings(served_model_names=("m",), api_server_count=2, port=0)


class Client:
    """In the place of an EngineClient: starts nothing."""

    ready: Any = None
    failure: StagecoachError | None = None

    def __init__(self, folder: Path) -> None:
        self.config = resolved()
        self.engine = ProcessEngine.__new__(ProcessEngine)
        self.engine._folder = folder
        self.forgotten: list[int] = []
        self.is_closed = False

    def __call__(self, *args: object, **options: object) -> "Client":
        return self

    def forget_client(self, client: int) -> None:
        self.forgotten.append(client)

    def close(self, *, in_order: bool) -> None:
        self.is_closed = True


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Its processes say what they were started with, and end."""
    # What it sets is for its children, and is taken back after the test.
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    client = Client(tmp_path)
    monkeypatch.setattr(supervisor, "EngineClient", client)
    monkeypatch.setattr(supervisor, "run_api", print)
    return client


def test_an_engine_of_threads_is_refused() -> None:
    config = resolved(distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="--api-server-count=2 and --distributed-executor"):
        supervisor.supervise(config, SETTINGS, "1")


def test_one_that_ends_before_it_served_ends_the_server(client: Client) -> None:
    with pytest.raises(EngineDeadError, match=r"api\[\d\] ended with status 0 before it served"):
        supervisor.supervise(client.config, SETTINGS, "1")
    assert client.is_closed and client.forgotten


def test_an_engine_that_does_not_load_is_told_with_its_reason(client: Client) -> None:
    client.failure = CheckpointError("a tensor is missing")
    with pytest.raises(CheckpointError, match="a tensor is missing"):
        supervisor.supervise(client.config, SETTINGS, "1")
    assert client.is_closed
