"""Measuring what steps cost: the ladder, the scratch plans, and that nothing is left of them."""

import dataclasses
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config.engine import ResolvedConfig, SpeculativeConfig
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import (
    Allocate,
    EngineReady,
    EngineStats,
    FromWorker,
    GetStats,
    Hello,
    PlanDone,
    RunPlan,
    Shutdown,
    StepEcho,
)
from stagecoach.engine.step_profile import StageClock, StepProfiler, make_ladder, shape_of
from stagecoach.errors import PlanDivergenceError, WorkerDiedError
from stagecoach.schedule.step_cost import StepShape
from stagecoach.schedule.step_plan import RowResult, StepPlan, StepResult, plan_digest
from tests.cpu.engine.fakes import ScriptedPort, expected_tokens, outputs, resolved, submit
from tests.cpu.engine.schedules import (
    Answer,
    Ask,
    assert_idle,
    assert_same,
    run,
    start_client,
)
from tests.cpu.schedule.draft_traffic import speculation

pytestmark = pytest.mark.cpu


def speculating(num_places: int = 7, *, watchdog: bool = True, **options: Any) -> ResolvedConfig:
    config = speculation(num_places, schedule=watchdog, watchdog=watchdog)
    return dataclasses.replace(resolved(**options), speculation=config)


def busy_seconds(shape: StepShape, stage: int, num_stages: int) -> float:
    seconds = 1.0 + stage + 0.125 * shape.num_tokens + 0.25 * (shape.widest - 1)
    if stage == num_stages - 1 and shape.num_proposals:
        seconds += 0.5 + 0.0625 * shape.num_proposals
    return seconds


class Pipeline:
    """Workers that answer each plan at once, in times that the shape decides."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.num_stages = config.engine.pipeline_parallel_size
        self.tp_size = config.engine.tensor_parallel_size
        self.plans: list[StepPlan] = []
        self.answers: deque[tuple[int, FromWorker]] = deque()
        self.digest: bytes | None = None

    def send(self, message: RunPlan) -> None:
        assert not self.answers, "the plan before is not answered yet"
        plan = StepPlan.decode(message.encoded_plan)
        self.plans.append(plan)
        shape = shape_of(plan)
        assert shape is not None
        digest = self.digest or plan_digest(message.encoded_plan)
        for rank in range(self.num_stages * self.tp_size):
            stage, tp_rank = divmod(rank, self.tp_size)
            seconds = busy_seconds(shape, stage, self.num_stages) * (1 + tp_rank)
            answer: FromWorker
            if (stage, tp_rank) == (self.num_stages - 1, 0):
                rows = tuple(
                    RowResult(request_id=item.request_id, epoch=0, token_ids=(1,))
                    for item in plan.segments
                )
                result = StepResult(step=plan.step, digest=digest, rows=rows, busy_seconds=seconds)
                answer = PlanDone(worker="worker", result=result)
            else:
                answer = StepEcho(
                    worker="worker", step=plan.step, digest=digest, busy_seconds=seconds
                )
            # The sampling worker is not always the last to be heard.
            self.answers.appendleft((rank, answer))

    def receive(self) -> tuple[int, FromWorker] | None:
        return self.answers.popleft()


@pytest.mark.parametrize(("num_stages", "tp_size"), [(1, 1), (1, 2), (3, 1), (2, 2)])
def test_the_table_holds_what_the_stages_took(num_stages: int, tp_size: int) -> None:
    config = speculating(
        pipeline_parallel_size=num_stages, tensor_parallel_size=tp_size, max_num_seqs=16
    )
    pipeline = Pipeline(config)
    profiler = StepProfiler(config, MemoryPlan(num_pages=200, num_slots=17))
    profile = profiler.run(pipeline.send, pipeline.receive)
    assert profile is not None and profile.num_steps == len(pipeline.plans)
    for shape in (StepShape(1, 1, 0), StepShape(9, 1, 3), StepShape(8, 8, 0), StepShape(128, 8, 0)):
        expected = [busy_seconds(shape, stage, num_stages) for stage in range(num_stages)]
        # These stages take no real time, so that what is over is none.
        assert profile.cost.seconds(shape) == pytest.approx(sum(expected), rel=0.01)
        assert profile.cost.seconds(shape, num_stages) == pytest.approx(
            max(expected[-1], sum(expected) / num_stages), rel=0.01
        )


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        (MemoryPlan(num_pages=500, num_slots=101), {"max_num_seqs": 100}),
        (
            MemoryPlan(num_pages=500, num_slots=300, num_host_pages=90, num_host_slots=40),
            {"max_num_seqs": 3, "kv_offloading_size": 0.5},
        ),
        (MemoryPlan(num_pages=2, num_slots=5), {}),
        (MemoryPlan(num_pages=3, num_slots=5), {"block_size": 1}),
        (MemoryPlan(num_pages=60, num_slots=5), {"max_num_batched_tokens": 1}),
        (MemoryPlan(num_pages=60, num_slots=5), {"max_num_batched_tokens": 3}),
        (MemoryPlan(num_pages=60, num_slots=5), {"max_model_len": 2}),
    ],
)
def test_scratch_plans_stay_within_every_limit(memory: MemoryPlan, options: dict[str, Any]) -> None:
    config = speculating(**options)
    engine = config.engine
    pipeline = Pipeline(config)
    profiler = StepProfiler(config, memory)
    scratch = profiler.memory
    assert scratch.num_pages <= memory.num_pages and scratch.num_slots <= memory.num_slots
    # Nothing is kept between scratch plans, on the device or the host.
    assert scratch.num_slots <= 1 + engine.max_num_seqs
    assert (scratch.num_host_pages, scratch.num_host_slots) == (0, 0)
    assert profiler.run(pipeline.send, pipeline.receive) is not None
    assert [plan.step for plan in pipeline.plans] == list(range(len(pipeline.plans)))
    rows = {entry.row for entry in pipeline.plans[0].admissions}
    for plan in pipeline.plans:
        assert plan.num_tokens <= engine.max_num_batched_tokens
        assert len(plan.segments) <= engine.max_num_seqs
        pages = [page for segment in plan.segments for page in segment.page_ids]
        assert len(set(pages)) == len(pages) and all(0 < page < scratch.num_pages for page in pages)
        for segment in plan.segments:
            assert 0 < segment.write_slot < scratch.num_slots
            assert segment.sampling_row in rows and max(rows) < engine.max_num_seqs
            assert len(segment.page_ids) == -(-segment.end // engine.block_size)
            assert segment.end <= config.max_model_len
            assert all(0 <= token < config.model.vocab_size for token in segment.token_ids)


def test_the_ladder_reaches_from_one_token_to_the_widest_full_plan() -> None:
    ladder = make_ladder(max_windows=64, max_drafts=7, max_num_batched_tokens=2048)
    shapes = [rung.shape for rung in ladder]
    assert len(set(shapes)) == len(shapes) < 20
    assert min(shapes) == StepShape(1, 1, 0) and max(shapes) == StepShape(128, 8, 0)
    assert StepShape(8, 8, 0) in shapes and StepShape(16, 1, 16) in shapes


def test_a_worker_that_runs_another_plan_is_named() -> None:
    config = speculating()
    pipeline = Pipeline(config)
    pipeline.digest = b"another!"
    profiler = StepProfiler(config, MemoryPlan(num_pages=60, num_slots=5))
    with pytest.raises(PlanDivergenceError, match="worker ran another plan as step 0"):
        profiler.run(pipeline.send, pipeline.receive)


def test_a_clock_waits_for_every_stage_whatever_the_order() -> None:
    clock = StageClock(3)
    assert clock.note(4, 2, 0.3) is None and clock.note(5, 0, 1.0) is None
    assert clock.note(4, 0, 0.1) is None
    assert clock.note(4, 1, 0.2) == (0.1, 0.2, 0.3)
    assert clock.note(5, 2, 3.0) is None
    assert clock.note(5, 1, 2.0) == (1.0, 2.0, 3.0)
    assert not clock._seconds


class ProfiledPort(ScriptedPort):
    """Workers that answer scratch plans at once; the script begins when the engine is ready."""

    def wait(self, timeout_seconds: float | None) -> None:
        if self.plans and not self.sent(EngineReady):
            self.finish_plan()
        else:
            super().wait(timeout_seconds)


def start(config: ResolvedConfig) -> tuple[EngineLoop, ProfiledPort]:
    port = ProfiledPort(config)
    port.say(Hello())
    port.ready()
    return EngineLoop(config, port), port


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_engine_measures_on_memory_that_it_then_replaces(num_stages: int) -> None:
    loop, port = start(speculating(pipeline_parallel_size=num_stages, debug_poison=True))
    request = submit(1, max_tokens=5)
    port.then(lambda: port.say(request), port.finish_all)
    loop.run()
    kinds = [type(message) for message in port.to_workers]
    first, second = (index for index, kind in enumerate(kinds) if kind is Allocate)
    num_scratch = kinds[first:second].count(RunPlan)
    assert num_scratch > 10 and kinds[:first].count(RunPlan) == 0
    scratch, memory = (item for item in port.to_workers if isinstance(item, Allocate))
    [ready] = port.sent(EngineReady)
    assert memory.memory == MemoryPlan(num_pages=ready.num_pages, num_slots=ready.num_slots)
    assert scratch.memory.num_pages <= ready.num_pages
    # Plans are numbered on, and the request gets its own tokens.
    assert sorted(port.encoded) == list(range(len(port.encoded)))
    assert outputs(port, 1) == expected_tokens(request)
    assert port.sent(EngineReady) and loop.scheduler.num_free_pages == loop.scheduler.num_pages


def test_an_engine_that_does_not_weigh_costs_measures_none() -> None:
    loop, port = start(speculating(watchdog=False))
    port.then(
        lambda: port.say(submit(1)),
        port.finish_plan,
        lambda: port.say(GetStats(query_id=1)),
        port.finish_all,
    )
    loop.run()
    assert sum(isinstance(message, Allocate) for message in port.to_workers) == 1
    assert min(port.encoded) == 0
    [stats] = port.sent(EngineStats)
    assert stats.num_steps == 1
    assert stats.speculation is not None and stats.speculation.num_windows == 0


def test_scratch_plans_are_in_no_statistic() -> None:
    loop, port = start(speculating())
    port.then(lambda: port.say(GetStats(query_id=1)), lambda: port.say(Shutdown()))
    loop.run()
    [stats] = port.sent(EngineStats)
    assert (stats.num_steps, stats.step_seconds, stats.stage_busy_seconds) == (0, 0.0, (0.0,))
    assert stats.num_generated_tokens == 0
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)


def test_a_shutdown_while_steps_are_measured_ends_the_engine() -> None:
    config = speculating()
    port = ScriptedPort(config, lambda: None)
    port.say(Hello())
    port.ready()
    port.events.clear()
    port.then(port.finish_plan, port.finish_plan, lambda: port.say(Shutdown()))
    EngineLoop(config, port).run()
    assert port.to_workers[-1] == Shutdown() and not port.sent(EngineReady)


def test_a_worker_that_hangs_while_steps_are_measured_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, port = start(speculating(execute_model_timeout_seconds=40))
    now = time.monotonic()
    waits: list[float | None] = []

    def wait(timeout_seconds: float | None) -> None:
        nonlocal now
        waits.append(timeout_seconds)
        assert len(waits) < 9, "the loop waits for ever"
        now += 15.0

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(port, "wait", wait)
    with pytest.raises(WorkerDiedError, match=r"40 s \(--execute-model-timeout-seconds"):
        loop.run()
    assert waits == [40.0, 25.0, 10.0]


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_an_engine_that_weighs_costs_returns_the_tokens_of_plain_decoding(
    pp: int,
    tp: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    asks: list[Ask],
    expected: list[Answer],
) -> None:
    """Scratch plans run on real workers, with NaN in all memory, and leave nothing in it."""
    client = start_client(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        speculative_config=SpeculativeConfig(model=str(draft_checkpoint)),
    )
    try:
        for got, wanted in zip(run(client, asks), expected, strict=True):
            assert_same(got, wanted, 1e-9)
        assert_idle(client)
        stats = client.stats().speculation
    finally:
        client.close()
    assert stats is not None and stats.num_proposed_tokens > 0
    assert sum(stats.window_lengths) > 0


@pytest.mark.parametrize("num_stages", [1, 3])
def test_live_plans_of_windows_reach_the_cost_table(
    num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[StepShape, tuple[float, ...]]] = []
    monkeypatch.setattr(
        "stagecoach.schedule.draft_policy.DraftPolicy.note_step",
        lambda self, shape, stage_seconds: noted.append((shape, tuple(stage_seconds))),
    )
    loop, port = start(speculating(pipeline_parallel_size=num_stages))
    port.then(lambda: port.say(submit(1, num_prompt_tokens=6, max_tokens=3)), port.finish_all)
    loop.run()
    busy = (*[0.25] * (num_stages - 1), 1.0)
    # The prompt's chunk is no window; the last of three tokens is never forwarded.
    assert [(shape.num_tokens, seconds) for shape, seconds in noted] == [(1, busy)] * 2
    assert not loop._times._shapes
