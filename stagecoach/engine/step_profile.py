"""What steps cost on the running pipeline: measured before it serves, and while it does.

Owns the ladder of scratch plans that are run at the start, and the gathering of each step's busy
seconds from all stages. The scratch plans use memory of their own, which is replaced before the
first request: windows at position 0, so that they need nothing that was computed before.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.cache.state_slots import NUM_RESERVED_SLOTS, ZERO_SLOT
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.messages import FromWorker, PlanDone, RunPlan, StepEcho
from stagecoach.errors import PlanDivergenceError
from stagecoach.observe.log import get_logger
from stagecoach.request import SamplingParams
from stagecoach.schedule.chunking import pages_for
from stagecoach.schedule.step_cost import MeasuredStep, StepCost, StepShape
from stagecoach.schedule.step_plan import (
    SamplingEntry,
    Segment,
    StepPlan,
    pack_page_table,
    plan_digest,
)

_LOG = get_logger(__name__)

# Requests that one scratch plan may hold, and those that propose: further ones cost like the last.
_MOST_REQUESTS = 64
_MOST_PROPOSALS = 16
# Small rungs are run once to warm up; then all of them, the small ones first, until the times
# are good or the time is over.
_WARM_UP_TOKENS = 8
_NUM_REPEATS = 4
_BUDGET_SECONDS = 0.8


class Rung(NamedTuple):
    """One kind of scratch plan."""

    num_windows: int
    num_drafts: int  # of each window
    proposes: bool

    @property
    def shape(self) -> StepShape:
        return StepShape(
            num_tokens=self.num_windows * (1 + self.num_drafts),
            widest=1 + self.num_drafts,
            num_proposals=self.num_windows if self.proposes else 0,
        )


class StepProfile(NamedTuple):
    cost: StepCost
    num_steps: int  # plans that the workers have executed for it


class StageClock:
    """Busy seconds of the steps in flight, until every stage has told its own."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._seconds: dict[int, list[float | None]] = {}

    def note(self, step: int, stage: int, seconds: float) -> tuple[float, ...] | None:
        """The times of all stages, first to last, once this was the last that was missing."""
        times = self._seconds.setdefault(step, [None] * self._num_stages)
        times[stage] = seconds
        known = tuple(item for item in times if item is not None)
        if len(known) < self._num_stages:
            return None
        del self._seconds[step]
        return known


def shape_of(plan: StepPlan) -> StepShape | None:
    """What decides the cost of a plan of decode windows; None where it holds a chunk too."""
    if not all(segment.is_window for segment in plan.segments):
        return None
    return StepShape(
        num_tokens=plan.num_tokens,
        widest=max(segment.num_tokens for segment in plan.segments),
        num_proposals=sum(segment.proposes for segment in plan.segments),
    )


class StepTimes:
    """What plans of windows take while they serve; told when there is time to listen."""

    def __init__(self, num_stages: int) -> None:
        self._clock = StageClock(num_stages)
        self._shapes: dict[int, StepShape] = {}  # of plans in flight
        self._measured: list[tuple[StepShape, tuple[float, ...]]] = []

    def note_launched(self, plan: StepPlan) -> None:
        """A plan whose time is of interest."""
        if (shape := shape_of(plan)) is not None:
            self._shapes[plan.step] = shape

    def note(self, step: int, stage: int, busy_seconds: float) -> None:
        """A stage is done with a plan."""
        stage_seconds = self._clock.note(step, stage, busy_seconds)
        if stage_seconds is not None and (shape := self._shapes.pop(step, None)) is not None:
            self._measured.append((shape, stage_seconds))

    def take(self) -> list[tuple[StepShape, tuple[float, ...]]]:
        """What was measured since the last time: busy seconds of each stage, by shape."""
        taken, self._measured = self._measured, []
        return taken


def make_ladder(
    *, max_windows: int, max_drafts: int, max_num_batched_tokens: int
) -> tuple[Rung, ...]:
    """Scratch plans from which `StepCost.fit` makes a table, the small ones first.

    Plain steps, single windows of several tokens, plain steps that propose, and one of wide
    windows with more tokens in all than plain steps have.

    Args:
        max_drafts: most drafts of a window, 0 if none fits.
    """
    counts = sorted({1, 2, 4, 16, max_windows} & set(range(1, max_windows + 1)))
    drafts = sorted({1, 3, 7, max_drafts} & set(range(1, max_drafts + 1)))
    rungs = [
        *(Rung(count, 0, proposes=False) for count in counts),
        *(Rung(1, number, proposes=False) for number in drafts),
        *(Rung(count, 0, proposes=True) for count in counts if count <= _MOST_PROPOSALS),
    ]
    wide = [count for count in counts[1:] if count * (1 + max_drafts) > max_windows]
    if max_drafts and wide:
        rungs.append(Rung(wide[0], max_drafts, proposes=False))
    fitting = [rung for rung in rungs if rung.shape.num_tokens <= max_num_batched_tokens]
    return tuple(sorted(fitting, key=_weight))


def _weight(rung: Rung) -> int:
    """Tokens that it computes, in target and draft."""
    return rung.shape.num_tokens + rung.shape.num_proposals


class StepProfiler:
    """Runs the ladder, one plan at a time.

    Attributes:
        memory: what the scratch plans need; workers allocate it before and drop it afterwards.
    """

    def __init__(self, config: ResolvedConfig, memory: MemoryPlan) -> None:
        """
        Args:
            memory: what the engine will have; the scratch memory is no larger.
        """
        engine, model = config.engine, config.model
        self._num_stages = engine.pipeline_parallel_size
        self._tp_size = engine.tensor_parallel_size
        self._vocab_size = model.vocab_size
        self._block_size = engine.block_size
        num_usable_pages = memory.num_pages - NUM_RESERVED_PAGES
        room = min(config.max_model_len, num_usable_pages * engine.block_size)
        # What is proposed stands behind the window, and needs no page.
        max_drafts = min(config.num_draft_tokens, engine.max_num_batched_tokens - 1, room - 1)
        self._pages_each = pages_for(1 + max_drafts, engine.block_size)
        self._num_windows = min(
            _MOST_REQUESTS,
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            num_usable_pages // self._pages_each,
        )
        self._ladder = make_ladder(
            max_windows=self._num_windows,
            max_drafts=max_drafts,
            max_num_batched_tokens=engine.max_num_batched_tokens,
        )
        self.memory = memory
        if config.device == "cuda":
            # Graphs are captured once, for the memory that the engine will have.
            return
        self.memory = MemoryPlan(
            num_pages=NUM_RESERVED_PAGES + self._num_windows * self._pages_each,
            num_slots=NUM_RESERVED_SLOTS + self._num_windows,
        )

    def run(
        self,
        send: Callable[[RunPlan], None],
        receive: Callable[[], tuple[int, FromWorker] | None],
    ) -> StepProfile | None:
        """Measure the pipeline; None if `receive` says that the engine is to stop.

        Args:
            send: to all workers.
            receive: waits for the next message of a worker, with its rank.

        Raises:
            PlanDivergenceError: a worker executed another plan than was sent.
        """
        best: dict[Rung, MeasuredStep] = {}
        step = 0
        began = time.perf_counter()
        for repeat in range(1 + _NUM_REPEATS):
            for rung in self._ladder:
                is_small = _weight(rung) <= _WARM_UP_TOKENS
                is_late = time.perf_counter() - began > _BUDGET_SECONDS
                # What decides at small batches is measured on any machine; the rest follows.
                if (is_late and (repeat > 1 or not is_small)) or not (repeat or is_small):
                    continue
                measured = self._measure(self._plan(step, rung), rung.shape, send, receive)
                if measured is None:
                    return None
                step += 1
                if repeat:
                    best[rung] = _least(measured, best.get(rung, measured))
        seconds = time.perf_counter() - began
        _LOG.info("%s; %d steps in %.2f s", _describe(best), step, seconds)
        return StepProfile(StepCost.fit(list(best.values())), step)

    def _measure(
        self,
        plan: StepPlan,
        shape: StepShape,
        send: Callable[[RunPlan], None],
        receive: Callable[[], tuple[int, FromWorker] | None],
    ) -> MeasuredStep | None:
        encoded = plan.encode()
        digest = plan_digest(encoded)
        clock = StageClock(self._num_stages)
        began = time.perf_counter()
        total_seconds = 0.0
        stage_seconds: tuple[float, ...] | None = None
        send(RunPlan(encoded_plan=encoded))
        # All ranks answer before the next plan, so that none has a head start into it.
        for _ in range(self._num_stages * self._tp_size):
            received = receive()
            if received is None:
                return None
            rank, message = received
            stage, tp_rank = divmod(rank, self._tp_size)
            match message:
                case PlanDone(result=result):
                    total_seconds = time.perf_counter() - began
                    answer, busy_seconds = result.digest, result.busy_seconds
                case StepEcho(digest=answer, busy_seconds=busy_seconds):
                    pass
                case _:
                    raise AssertionError(f"not an answer to a plan: {message}")
            if answer != digest:
                raise PlanDivergenceError(f"{message.worker} ran another plan as step {plan.step}")
            if tp_rank == 0:
                stage_seconds = clock.note(plan.step, stage, busy_seconds)
        assert stage_seconds is not None, f"a stage is missing: {clock}"
        return MeasuredStep(shape, stage_seconds, total_seconds)

    def _plan(self, step: int, rung: Rung) -> StepPlan:
        admissions = () if step else tuple(map(_admission, range(self._num_windows)))
        segments = tuple(self._segment(index, rung) for index in range(rung.num_windows))
        return StepPlan(step=step, segments=segments, admissions=admissions)

    def _segment(self, index: int, rung: Rung) -> Segment:
        # Tokens of all kinds, so that routed experts are those of real traffic.
        first = 1 + index * (1 + rung.num_drafts)
        tokens = range(first, first + 1 + rung.num_drafts)
        first_page = NUM_RESERVED_PAGES + index * self._pages_each
        num_pages = pages_for(len(tokens), self._block_size)
        return Segment(
            request_id=index,
            epoch=0,
            start=0,
            token_ids=tuple(7919 * token % self._vocab_size for token in tokens),
            num_draft_tokens=rung.num_drafts,
            read_slot=ZERO_SLOT,
            write_slot=NUM_RESERVED_SLOTS + index,
            page_table=pack_page_table(tuple(range(first_page, first_page + num_pages))),
            sampling_row=index,
            proposes=rung.proposes,
        )


def _admission(index: int) -> SamplingEntry:
    return SamplingEntry(
        row=index,
        request_id=index,
        params=SamplingParams(),
        seed=index,
        stop_token_ids=(),
        num_prompt_tokens=1,
    )


def _least(one: MeasuredStep, other: MeasuredStep) -> MeasuredStep:
    """The quicker time of each stage: what slowed the other down was not the step."""
    return MeasuredStep(
        one.shape,
        tuple(map(min, one.stage_seconds, other.stage_seconds)),
        min(one.total_seconds, other.total_seconds),
    )


def _describe(best: dict[Rung, MeasuredStep]) -> str:
    """The ends of the ladder, in milliseconds."""
    steps = {rung: 1000 * item.total_seconds for rung, item in best.items()}
    parts = []
    for name, rungs in (
        ("plain", [rung for rung in steps if not rung.num_drafts and not rung.proposes]),
        ("one window", [rung for rung in steps if rung.num_drafts and rung.num_windows == 1]),
        ("with proposals", [rung for rung in steps if rung.proposes]),
    ):
        if rungs:
            last = max(rungs)
            ends = " to ".join(
                f"{steps[rung]:.2f} ms of {rung.shape.num_tokens}"
                for rung in dict.fromkeys((min(rungs), last))
            )
            parts.append(f"{name} {ends} tokens")
    return "step times: " + ", ".join(parts)
