"""One scripted server for each file, and the anthropic package in front of it."""

from collections.abc import Iterator
from pathlib import Path

import anthropic
import pytest

from tests.cpu.api.anthropic_client import anthropic_client
from tests.cpu.api.conftest import Server
from tests.cpu.api.scripted import ScriptedEngine, scripted_server

Scripted = tuple[Server, ScriptedEngine]


@pytest.fixture(scope="module")
def scripted(model_folder: Path) -> Iterator[Scripted]:
    with scripted_server(model_folder) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def client(scripted: Scripted) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(scripted[0]) as client:
        yield client
