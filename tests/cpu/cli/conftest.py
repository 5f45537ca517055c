"""Runs a command in this process, as the shell would."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecoach.__main__ import main
from tests.cpu.cli.command_run import Run, Stagecoach
from tests.small_engine import write_small_draft


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture
def stagecoach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Stagecoach]:
    """`stagecoach(*arguments)`; what it does to the log is undone."""
    logger = logging.getLogger("stagecoach")
    before = (list(logger.handlers), logger.level, logger.propagate)

    def run(*arguments: object) -> Run:
        monkeypatch.setattr("sys.argv", ["stagecoach", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Run(code or 0, captured.out, captured.err)

    yield run
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts one fails the test."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("stagecoach.llm.EngineClient", start)
