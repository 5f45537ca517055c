"""What the tests of commands know of a finished command, and the options that make it fast."""

from collections.abc import Callable
from typing import NamedTuple

FAST = ("--distributed-executor-backend", "uni", "--num-threads", "1", "--log-level", "warning")


class Run(NamedTuple):
    """How a command ended and what it wrote."""

    status: int
    stdout: str
    stderr: str


Stagecoach = Callable[..., Run]
