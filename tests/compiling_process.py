"""A process whose Triton compiles: that of the tests' own interprets."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_SECONDS = 300


class Told(NamedTuple):
    """What a process wrote."""

    stdout: str
    stderr: str


def run_compiling(*arguments: str, **environment: str) -> Told:
    """Run Python with these arguments to its end, which must be a good one.

    Args:
        environment: variables beside those of this process.
    """
    inherited = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=inherited | environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Told(done.stdout, done.stderr)
