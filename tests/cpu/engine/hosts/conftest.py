"""A party for each test."""

from collections.abc import Iterator

import pytest

from tests.cpu.engine.hosts.party import Party


@pytest.fixture
def party(monkeypatch: pytest.MonkeyPatch) -> Iterator[Party]:
    party = Party(monkeypatch)
    yield party
    party.close()
