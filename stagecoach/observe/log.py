"""The log: one logger, to stderr, with the worker's name before each line.

Owns the format and the level. A line is one event with its numbers. stdout belongs to what a
command was asked for.

    12:00:00 info    worker[1,0]  loaded 4 layers, 12.3 MB in 0.21 s
"""

import logging
import sys
import threading

LEVELS = ("debug", "info", "warning", "error")

_ROOT = "stagecoach"


def get_logger(module: str) -> logging.Logger:
    """The logger of a module; `module` is its `__name__`."""
    assert module == _ROOT or module.startswith(f"{_ROOT}."), module
    return logging.getLogger(module)


def configure(worker: str, *, level: str = "info") -> None:
    """Send the log of this process to stderr; a second call replaces the first.

    Args:
        worker: name of this process. A line from a thread that was given a name of its own
            (`worker[0,1]` where workers are threads) carries that name instead.
        level: one of LEVELS.
    """
    assert level in LEVELS, level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(worker))
    logger = logging.getLogger(_ROOT)
    for old in [item for item in logger.handlers if isinstance(item.formatter, _Formatter)]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    # Our lines are complete; a root handler of the calling program would print them twice.
    logger.propagate = False


def adopt(library: str) -> None:
    """Have the lines of a library look like ours, in a process that nobody else configures."""
    logger = logging.getLogger(library)
    ours = logging.getLogger(_ROOT).handlers
    logger.handlers[:] = [item for item in ours if isinstance(item.formatter, _Formatter)]
    logger.propagate = False


class _Formatter(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__("%(asctime)s %(level)-7s %(worker)s  %(message)s", datefmt="%H:%M:%S")
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        record.level = record.levelname.lower()
        record.worker = self._name(record)
        return super().format(record)

    def _name(self, record: logging.LogRecord) -> str:
        thread = record.threadName
        if thread is None or thread == threading.main_thread().name or thread.startswith("Thread-"):
            return self._worker
        return thread
