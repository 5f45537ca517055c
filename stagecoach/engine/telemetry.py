"""What the engine loop tells of itself: counts since it serves, and the timeline of its plans.

Owns the counting. The loop says what happened; queues and pools are read when somebody asks.
"""

import time
from collections.abc import Sequence

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.cache.memory_plan import MemoryNeeds
from stagecoach.engine.cache_identity import with_bytes
from stagecoach.engine.messages import (
    MAX_REQUESTS,
    EngineStats,
    RequestTrace,
    StageSpan,
    StepEcho,
    Timeline,
)
from stagecoach.engine.timeline import PlanRing, request_traces
from stagecoach.observe.histogram import HistogramCounter
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.speculation_stats import SpeculationStats
from stagecoach.schedule.step_plan import StepPlan, StepResult

# Tokens of a plan, as vLLM counts those of an iteration.
_ITERATION_BOUNDS = (1.0, *(float(2**power) for power in range(3, 15)))


class Telemetry:
    """Totals since `begin`, and the latest plans."""

    def __init__(self, num_stages: int) -> None:
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.loop_seconds = 0.0
        self._began = 0.0
        self._num_steps = 0
        # Of the schedulers before the present one.
        self._num_preemptions = 0
        self._cache_counts = PrefixCacheStats()
        self._forward_seconds = 0.0
        self._step_seconds = 0.0
        self._num_windows = 0
        self._num_window_tokens = 0
        self._stage_busy_seconds = [0.0] * num_stages
        self._stage_hop_seconds = [0.0] * num_stages
        self._stage_idle_seconds = [0.0] * num_stages
        self._iteration_tokens = HistogramCounter(_ITERATION_BOUNDS)
        self._ring = PlanRing(num_stages)

    def begin(self) -> None:
        """The engine serves from now on."""
        self._began = time.monotonic()

    def carry(self, scheduler: Scheduler) -> None:
        """Another scheduler takes over: the counts of this one are counts of the past."""
        self._num_preemptions += scheduler.num_preemptions
        self._cache_counts = scheduler.prefix_cache_stats.after(self._cache_counts)
        self._ring.drop_open()

    def note_launched(self, plan: StepPlan, now: float) -> None:
        """A plan was sent at `now`, in monotonic seconds."""
        record = self._ring.note_launched(plan, now)
        self._num_windows += record.num_windows
        self._num_window_tokens += record.num_window_tokens
        self._iteration_tokens.note(record.num_tokens)

    def note_stage(self, stage: int, report: StepEcho | StepResult) -> None:
        """Rank 0 of a stage is done with a plan."""
        busy_seconds, hop_seconds = report.busy_seconds, report.hop_seconds
        self._stage_busy_seconds[stage] += busy_seconds
        self._stage_hop_seconds[stage] += hop_seconds
        ended = report.arrived + busy_seconds + hop_seconds
        self._ring.note_span(report.step, stage, StageSpan(report.arrived, ended, hop_seconds))

    def note_committed(self, result: StepResult) -> None:
        """The last stage's result was applied."""
        self._num_steps += 1
        self._forward_seconds += result.forward_seconds
        self._step_seconds += result.step_seconds
        self._ring.note_committed(result, time.monotonic())

    def stats(
        self,
        query_id: int,
        scheduler: Scheduler,
        *,
        num_compiling: int,
        speculation: SpeculationStats | None,
        cache_needs: Sequence[MemoryNeeds] | None,
        num_recoveries: int = 0,
        recovery_seconds: float = 0.0,
    ) -> EngineStats:
        """All counts, and the present state of queues and pools.

        Args:
            num_compiling: requests that wait for their grammars, in no queue.
            cache_needs: of each worker; None where prefixes are not cached.
            num_recoveries, recovery_seconds: how often workers were brought back, and how long
                all of that took.
        """
        uptime_seconds = time.monotonic() - self._began
        return EngineStats(
            query_id=query_id,
            num_steps=self._num_steps,
            num_waiting=scheduler.num_waiting + num_compiling,
            num_running=scheduler.num_running,
            num_preemptions=self._num_preemptions + scheduler.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_pages=scheduler.num_pages,
            num_free_pages=scheduler.num_free_pages,
            num_slots=scheduler.num_slots,
            num_free_slots=scheduler.num_free_slots,
            loop_seconds=self.loop_seconds,
            forward_seconds=self._forward_seconds,
            step_seconds=self._step_seconds,
            uptime_seconds=uptime_seconds,
            stage_busy_seconds=tuple(self._stage_busy_seconds),
            stage_hop_seconds=tuple(self._stage_hop_seconds),
            num_plans_in_flight=scheduler.num_in_flight,
            num_recoveries=num_recoveries,
            recovery_seconds=recovery_seconds,
            num_windows=self._num_windows,
            num_window_tokens=self._num_window_tokens,
            stage_idle_seconds=self._idle_seconds(uptime_seconds),
            iteration_tokens=self._iteration_tokens.read(),
            speculation=speculation,
            prefix_cache=None
            if cache_needs is None
            else with_bytes(scheduler.prefix_cache_stats.after(self._cache_counts), cache_needs),
        )

    def _idle_seconds(self, uptime_seconds: float) -> tuple[float, ...]:
        """What is left of each stage's time.

        A plan is counted when it ends, so that what was told while it ran is too much: then it
        stands until time has caught up, because a counter must not go backwards.
        """
        for stage, idle_seconds in enumerate(self._stage_idle_seconds):
            worked_seconds = self._stage_busy_seconds[stage] + self._stage_hop_seconds[stage]
            self._stage_idle_seconds[stage] = max(idle_seconds, uptime_seconds - worked_seconds)
        return tuple(self._stage_idle_seconds)

    def timeline(
        self,
        query_id: int,
        first_step: int,
        scheduler: Scheduler,
        compiling: tuple[RequestTrace, ...],
    ) -> Timeline:
        """The latest plans from `first_step` on, who is alive, and the pool of state slots.

        Args:
            compiling: the requests that wait for their grammars, in no queue.
        """
        return Timeline(
            query_id=query_id,
            now=time.monotonic(),
            plans=self._ring.traces(first_step),
            requests=(*request_traces(scheduler), *compiling)[:MAX_REQUESTS],
            slot_states=scheduler.slot_states(),
        )
