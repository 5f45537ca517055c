"""What one rank knows after a step, and a step of which that is not known yet.

Owns the moments between which a device's time is counted; they are read when all have passed,
so that nothing waits for them.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from stagecoach.schedule.step_plan import RowResult


class StepOutcome(NamedTuple):
    """What one rank knows after a step."""

    rows: tuple[RowResult, ...] | None  # only on the rank that samples
    forward_seconds: float  # inside the models: layers, head and drafter
    wait_seconds: float  # for the stage before
    differences: tuple[float, ...]  # one a comparison of the plan, as in StepResult
    # From the step's begin to its end, waiting included, where the device kept the time; None:
    # it was computed while the caller waited.
    device_seconds: float | None = None


class StepInFlight(Protocol):
    """A step that was launched."""

    def is_ready(self) -> bool:
        """Whether `outcome` returns at once."""

    def outcome(self) -> StepOutcome:
        """Wait for the step's end."""


class FinishedStep:
    """A step that was computed while it was launched."""

    def __init__(self, outcome: StepOutcome) -> None:
        self._outcome = outcome

    def is_ready(self) -> bool:
        return True

    def outcome(self) -> StepOutcome:
        return self._outcome


class DeviceStep:
    """A step on the current stream of a CUDA device, which begins with it now.

    Attributes:
        differences: as in StepOutcome.
        read_rows: gives the rows once the last moment has passed; None where nobody samples.
    """

    def __init__(self) -> None:
        self._began, self._prepared, self._received, self._ended = (
            torch.cuda.Event(enable_timing=True) for _ in range(4)
        )
        self.differences: tuple[float, ...] = ()
        self.read_rows: Callable[[], tuple[RowResult, ...]] | None = None
        self._began.record()

    def note_prepared(self) -> None:
        """From here on it waits for the stage before."""
        self._prepared.record()

    def note_received(self) -> None:
        """What is enqueued from here on has its inputs."""
        self._received.record()

    def note_enqueued(self) -> None:
        """Nothing of the step follows."""
        self._ended.record()

    def is_ready(self) -> bool:
        return self._ended.query()

    def outcome(self) -> StepOutcome:
        self._ended.synchronize()
        rows = self.read_rows() if self.read_rows is not None else None
        return StepOutcome(
            rows=rows,
            forward_seconds=self._received.elapsed_time(self._ended) / 1000,
            wait_seconds=self._prepared.elapsed_time(self._received) / 1000,
            differences=self.differences,
            device_seconds=self._began.elapsed_time(self._ended) / 1000,
        )
