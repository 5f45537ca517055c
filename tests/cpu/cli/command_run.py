"""What the tests of commands know of a finished command, and the options that make it fast."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stagecoach.runner.stage_runner import StageRunner, StepOutcome
from stagecoach.schedule.step_plan import RowResult, StepPlan

FAST = ("--distributed-executor-backend", "uni", "--num-threads", "1", "--log-level", "warning")


class Run(NamedTuple):
    """How a command ended and what it wrote."""

    status: int
    stdout: str
    stderr: str


Stagecoach = Callable[..., Run]


def spoil_first_request(monkeypatch: pytest.MonkeyPatch, *, start: int) -> None:
    """What the first request computes at or behind token `start` is not finite."""
    run_plan = StageRunner.run

    def run(self: StageRunner, plan: StepPlan, *masks: Any) -> StepOutcome:
        outcome = run_plan(self, plan, *masks)
        assert outcome.rows is not None
        rows = tuple(
            RowResult(request_id=row.request_id, epoch=row.epoch, token_ids=(), is_finite=False)
            if row.request_id == 1 and segment.start >= start
            else row
            for row, segment in zip(outcome.rows, plan.segments, strict=True)
        )
        return outcome._replace(rows=rows)

    monkeypatch.setattr(StageRunner, "run", run)


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
