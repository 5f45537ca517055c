"""What a check ends with: a name, whether it holds, and why.

Owns how an outcome or an error becomes a verdict. Knows no checkpoint.
"""

import re
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from stagecoach.errors import StagecoachError

Status = Literal["ok", "failed", "skipped"]


class CheckFailedError(Exception):
    """What was checked does not hold; the text says what was found instead."""


class CheckSkippedError(Exception):
    """Nothing was checked; the text says why."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the page."""

    check: str
    status: Status
    detail: str  # of an ok what was found, else why
    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The page.

    Attributes:
        is_ok: nothing failed; something may be skipped.
    """

    model: str
    draft: str | None
    layout: str
    is_ok: bool
    verdicts: tuple[Verdict, ...]


class Verdicts:
    """The verdicts so far, in the order of their checks.

    Args:
        tell: called with each as it is reached.
    """

    def __init__(self, tell: Callable[[Verdict], None]) -> None:
        self._tell = tell
        self._found: dict[str, Verdict] = {}

    @property
    def found(self) -> tuple[Verdict, ...]:
        return tuple(self._found.values())

    def is_ok(self, check: str) -> bool:
        return check in self._found and self._found[check].status == "ok"

    def judge(self, check: str, find: Callable[[], str], needs: tuple[str, ...] = ()) -> None:
        """Add a verdict.

        Args:
            find: says what it found. What it raises on purpose becomes the verdict; a mistake of
                ours is raised on.
            needs: checks that must be ok for this one to mean anything.
        """
        assert check not in self._found, f"{check} was judged before"
        began = time.perf_counter()
        status: Status = "ok"
        lacking = [name for name in needs if not self.is_ok(name)]
        if lacking:
            status, detail = "skipped", f"needs: {', '.join(lacking)}"
        else:
            try:
                detail = find()
            except CheckSkippedError as reason:
                status, detail = "skipped", str(reason)
            except CheckFailedError as fault:
                status, detail = "failed", str(fault)
            except (StagecoachError, ValueError, OSError) as error:
                status, detail = "failed", f"{type(error).__name__}: {error}"
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                status, detail = "failed", _describe_memory(error)
        seconds = time.perf_counter() - began
        verdict = Verdict(check=check, status=status, detail=detail, seconds=seconds)
        self._found[check] = verdict
        self._tell(verdict)


def _is_out_of_memory(error: Exception) -> bool:
    """Torch raises a RuntimeError of this text where the host gives no memory."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _describe_memory(error: Exception) -> str:
    found = re.search(r"allocate (\d+) bytes", str(error))
    needed = f"{int(found[1]):,} bytes more were needed" if found else "the host gave no more"
    return (
        f"out of memory: {needed}; give --memory-gib a smaller number, free memory on this host, "
        "or leave the layers out with --skip-layers"
    )


def counted(number: int, noun: str) -> str:
    """As in 1 file, 2 files."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
