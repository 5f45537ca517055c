"""The latest plans on their way through the stages, for those who ask to see them.

Owns a ring of what happened to each plan and when. Times are seconds of the machine's monotonic
clock, which its processes share. Knows no message port and asks nobody.
"""

from stagecoach.engine.messages import (
    MAX_PLANS,
    MAX_REQUESTS,
    PlanTrace,
    RequestTrace,
    StageSpan,
)
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.step_plan import StepPlan, StepResult


class PlanRing:
    """The latest `MAX_PLANS` plans, in flight or committed.

    What is noted of a plan that has left the ring is forgotten.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._records: list[_Record | None] = [None] * MAX_PLANS
        self._next_step = 0

    def note_launched(self, plan: StepPlan, now: float) -> "_Record":
        record = _Record(plan, now, self._num_stages)
        self._records[plan.step % MAX_PLANS] = record
        self._next_step = plan.step + 1
        return record

    def note_span(self, step: int, stage: int, span: StageSpan) -> None:
        """Rank 0 of a stage is done with a plan."""
        record = self._records[step % MAX_PLANS]
        if record is not None and record.step == step:
            record.spans[stage] = span

    def note_committed(self, result: StepResult, now: float) -> None:
        record = self._records[result.step % MAX_PLANS]
        if record is None or record.step != result.step:
            return
        record.committed = now
        if record.num_draft_tokens:
            # Windows come first in a plan; each row is its accepted drafts and one token more.
            rows = result.rows[: record.num_windows]
            record.num_accepted_tokens = sum(
                len(row.token_ids) - 1 for row in rows if row.token_ids
            )

    def drop_open(self) -> None:
        """The results of plans in flight never come."""
        for place, record in enumerate(self._records):
            if record is not None and record.committed is None:
                self._records[place] = None

    def traces(self, first_step: int) -> tuple[PlanTrace, ...]:
        """What is known of the plans from `first_step` on, the oldest first."""
        first = max(first_step, self._next_step - MAX_PLANS, 0)
        records = (self._records[step % MAX_PLANS] for step in range(first, self._next_step))
        return tuple(record.trace() for record in records if record is not None)


class _Record:
    """A PlanTrace while it becomes known."""

    __slots__ = (
        "committed",
        "launched",
        "num_accepted_tokens",
        "num_chunks",
        "num_tokens",
        "num_window_tokens",
        "num_windows",
        "spans",
        "step",
    )

    def __init__(self, plan: StepPlan, launched: float, num_stages: int) -> None:
        self.step = plan.step
        self.launched = launched
        self.committed: float | None = None
        self.num_windows = self.num_window_tokens = self.num_chunks = self.num_tokens = 0
        self.num_accepted_tokens = 0
        self.spans: list[StageSpan | None] = [None] * num_stages
        for segment in plan.segments:
            num_tokens = segment.num_tokens
            self.num_tokens += num_tokens
            if num_tokens == 1 + segment.num_draft_tokens:
                self.num_windows += 1
                self.num_window_tokens += num_tokens
            else:
                self.num_chunks += 1

    @property
    def num_draft_tokens(self) -> int:
        return self.num_window_tokens - self.num_windows

    def trace(self) -> PlanTrace:
        return PlanTrace(
            self.step,
            self.launched,
            self.committed,
            self.num_windows,
            self.num_chunks,
            self.num_tokens,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            tuple(self.spans),
        )


def request_traces(scheduler: Scheduler) -> tuple[RequestTrace, ...]:
    """The oldest `MAX_REQUESTS` of clients: those that run, then those that wait."""
    return tuple(
        RequestTrace(
            request_id=request.request_id,
            state=state,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_computed_tokens=request.num_computed,
            num_output_tokens=len(request.output_token_ids),
            slot=request.slot,
            num_pages=len(request.page_ids),
        )
        for request, state in scheduler.oldest_requests(MAX_REQUESTS)
    )
