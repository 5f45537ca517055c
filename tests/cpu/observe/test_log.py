"""The log: prefix, level and where it goes."""

import logging
import threading
from collections.abc import Iterator

import pytest

from stagecoach.observe import log


@pytest.fixture(autouse=True)
def _leave_logging_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("stagecoach")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    logger.setLevel(before[1])


def test_a_line_goes_to_stderr_with_time_level_and_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.configure("worker[1,0]")
    log.get_logger("stagecoach.engine.loop").warning("step %d took %.1f s", 7, 0.25)
    captured = capsys.readouterr()
    assert captured.out == ""
    time, rest = captured.err.split(" ", 1)
    assert len(time.split(":")) == 3
    assert rest == "warning worker[1,0]  step 7 took 0.2 s\n"


@pytest.mark.parametrize("level", log.LEVELS)
def test_lines_below_the_level_are_dropped(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("main", level=level)
    for name in log.LEVELS:
        log.get_logger("stagecoach").log(logging.getLevelName(name.upper()), "at %s", name)
    printed = [line.rsplit(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert printed == list(log.LEVELS[log.LEVELS.index(level) :])


def test_a_second_call_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("first")
    log.configure("second")
    log.get_logger("stagecoach").info("once")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "second  once" in lines[0]


def test_lines_of_a_library_that_was_adopted_look_like_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = logging.getLogger("a_library")
    log.configure("main")
    for _ in range(2):
        log.adopt("a_library")
    library.warning("came from %s", "there")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(" warning main  came from there")
    library.handlers.clear()


def test_a_named_thread_speaks_under_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("main")
    logger = log.get_logger("stagecoach")
    for name in ("worker[0,1]", None):
        thread = threading.Thread(target=logger.info, args=("hello",), name=name)
        thread.start()
        thread.join()
    named, unnamed = capsys.readouterr().err.splitlines()
    assert "worker[0,1]  hello" in named
    assert "main  hello" in unnamed


def test_an_exception_is_printed_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("main")
    try:
        raise RuntimeError("disk full")
    except RuntimeError as error:
        log.get_logger("stagecoach").error("load failed", exc_info=error)
    assert "RuntimeError: disk full" in capsys.readouterr().err
