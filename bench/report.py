"""What every table of results says of the machine, the versions and the code it measured."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path


def machine_line(packages: Sequence[str]) -> str:
    """Processor, cores, versions of Python and of `packages`, and the commit."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return (
        f"Machine: {_processor()}, {len(os.sched_getaffinity(0))} cores. "
        f"Python {platform.python_version()}, {versions}. Commit {commit_name()}."
    )


def commit_name() -> str:
    """Of the code that is measured; the variable COMMIT names it where there is no repository."""
    given = os.environ.get("COMMIT")
    if given:
        return given
    changes = " with local changes" if _git("status", "--porcelain", "--", "stagecoach") else ""
    return _git("rev-parse", "--short", "HEAD") + changes


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=False
    ).stdout.strip()
