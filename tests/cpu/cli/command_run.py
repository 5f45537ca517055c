"""What the tests of commands know of a finished command, and the options that make it fast."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FAST = ("--distributed-executor-backend", "uni", "--num-threads", "1", "--log-level", "warning")


class Run(NamedTuple):
    """How a command ended and what it wrote."""

    status: int
    stdout: str
    stderr: str


Stagecoach = Callable[..., Run]


def always_drafting(draft: Path, num_drafts: int, **keys: object) -> tuple[str, str]:
    """The flag of an engine all of whose windows are as long as can be."""
    config = {
        "model": str(draft),
        "num_speculative_tokens": num_drafts,
        "confidence_schedule": False,
        "watchdog": False,
        **keys,
    }
    return "--speculative-config", json.dumps(config)
