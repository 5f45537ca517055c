"""A worker's life at the end of a scripted port: load, allocate, plans in order, end."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine import messages
from stagecoach.engine.messages import (
    Allocate,
    FromWorker,
    LoadProgress,
    PlanDone,
    RunPlan,
    Shutdown,
    StepEcho,
    TokenMasks,
    ToWorker,
    WorkerAllocated,
    WorkerReady,
)
from stagecoach.engine.worker import Worker
from stagecoach.errors import CheckpointError, EngineDeadError
from stagecoach.pipeline.stage import make_stages
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from stagecoach.request import SamplingParams
from stagecoach.runner.device_memory import memory_needs
from stagecoach.runner.stage_runner import DTYPES, StageRunner
from stagecoach.runner.step_outcome import StepOutcome
from stagecoach.schedule.step_plan import (
    Comparison,
    SamplingEntry,
    Segment,
    StepPlan,
    pack_page_table,
    plan_digest,
)
from tests.cpu.engine.fakes import in_threads, resolved

pytestmark = pytest.mark.cpu

ALLOCATE = Allocate(memory=MemoryPlan(num_pages=6, num_slots=5))


@dataclass
class ScriptedWorkerPort:
    """Hands out its messages in order; the script must end with a Shutdown."""

    script: deque[ToWorker]
    sent: list[FromWorker] = field(default_factory=list)

    def receive(self) -> ToWorker:
        return messages.decode_to_worker(messages.encode(self.script.popleft()))

    def receive_now(self) -> ToWorker | None:
        return self.receive()

    def send(self, message: FromWorker) -> None:
        self.sent.append(messages.decode_from_worker(messages.encode(message)))

    def close(self) -> None: ...


def plan(step: int, start: int = 0, length: int = 3, samples: bool = False) -> StepPlan:
    """The next tokens of one request, whose sampling row 2 is filled by the first sample."""
    segment = Segment(
        request_id=7,
        epoch=1,
        start=start,
        token_ids=tuple(range(start + 1, start + length + 1)),
        read_slot=3 if start else 0,
        write_slot=3,
        page_table=pack_page_table([4, 2]),
        sampling_row=2 if samples else None,
    )
    entry = SamplingEntry(
        row=2,
        request_id=7,
        params=SamplingParams(temperature=0.0),
        seed=0,
        stop_token_ids=(),
        num_prompt_tokens=start + length,
    )
    return StepPlan(step=step, segments=(segment,), admissions=(entry,) if samples else ())


def serve(config: ResolvedConfig, script: Sequence[ToWorker]) -> list[list[FromWorker]]:
    """What each worker of the grid says when all of them get that script."""
    topology = Topology(
        num_stages=config.engine.pipeline_parallel_size,
        tp_size=config.engine.tensor_parallel_size,
    )
    mesh = ThreadMesh(topology)
    ports = [ScriptedWorkerPort(deque(script)) for _ in topology.workers]
    workers = [
        Worker(config, worker, mesh.links(worker), ports[worker.rank])
        for worker in topology.workers
    ]
    in_threads([worker.run for worker in workers])
    assert all(not port.script for port in ports)
    return [port.sent for port in ports]


def dummy(**options: Any) -> ResolvedConfig:
    """Random weights: nothing is read."""
    return resolved(load_format="dummy", **options)


def run_plan(step_plan: StepPlan) -> RunPlan:
    return RunPlan(encoded_plan=step_plan.encode())


def test_a_worker_loads_allocates_runs_plans_and_ends() -> None:
    config = dummy()
    plans = [plan(0), plan(1, start=3, length=2, samples=True)]
    [sent] = serve(config, [ALLOCATE, *map(run_plan, plans), Shutdown()])
    progress = [message for message in sent if isinstance(message, LoadProgress)]
    assert progress == sent[: len(progress)] and progress
    assert progress[-1].done_bytes == progress[-1].total_bytes > 0
    ready, allocated, *done = sent[len(progress) :]
    assert isinstance(ready, WorkerReady) and ready.worker == "worker[0,0]"
    [stage] = make_stages(config.partition)
    needs = memory_needs(config, stage, DTYPES[config.dtype])
    assert ready.needs.bytes_per_page == needs.bytes_per_page
    assert ready.needs.bytes_per_slot == needs.bytes_per_slot
    assert allocated == WorkerAllocated(worker="worker[0,0]")
    for message, step_plan in zip(done, plans, strict=True):
        assert isinstance(message, PlanDone)
        result = message.result
        assert (result.step, result.digest) == (step_plan.step, step_plan.digest())
        [row] = result.rows
        assert (row.request_id, row.epoch) == (7, 1)
        assert len(row.token_ids) == step_plan.num_samples
        assert result.step_seconds >= result.busy_seconds >= result.forward_seconds > 0


def test_workers_that_do_not_sample_echo_the_digest_of_what_they_ran() -> None:
    config = dummy(pipeline_parallel_size=2, tensor_parallel_size=2)
    plans = [plan(0), plan(1, start=3, length=1, samples=True)]
    said = serve(config, [ALLOCATE, *map(run_plan, plans), Shutdown()])
    for rank, sent in enumerate(said):
        answers = [message for message in sent if isinstance(message, StepEcho | PlanDone)]
        if rank == 2:
            assert [type(answer) for answer in answers] == [PlanDone, PlanDone]
            continue
        for answer, step_plan in zip(answers, plans, strict=True):
            assert isinstance(answer, StepEcho)
            assert answer.worker == Topology(num_stages=2, tp_size=2).worker(rank).name
            assert answer.step == step_plan.step
            assert answer.digest == plan_digest(step_plan.encode())
            assert answer.busy_seconds > 0


def test_every_worker_tells_what_it_found_comparing() -> None:
    """Two requests of the same tokens against each other, and one against nothing computed."""
    config = dummy(pipeline_parallel_size=2, tensor_parallel_size=2)
    first, *_ = plan(0).segments
    second = msgspec.structs.replace(
        first, request_id=8, write_slot=1, page_table=pack_page_table([1])
    )
    compared = msgspec.structs.replace(
        plan(1, start=3, length=1, samples=True),
        comparisons=(Comparison(3, 0, 1), Comparison(1, 0, 2)),
    )
    plans = [StepPlan(step=0, segments=(first, second)), compared]
    said = serve(config, [ALLOCATE, *map(run_plan, plans), Shutdown()])
    for sent in said:
        answers = [message for message in sent if isinstance(message, StepEcho | PlanDone)]
        without, with_two = (
            answer.result.differences if isinstance(answer, PlanDone) else answer.differences
            for answer in answers
        )
        assert without == ()
        equal, unequal = with_two
        assert equal < 1e-5 and unequal == 1.0


def constrained(step: int) -> StepPlan:
    sampled = plan(step, samples=True)
    [segment] = sampled.segments
    return msgspec.structs.replace(
        sampled, segments=(msgspec.structs.replace(segment, is_constrained=True),)
    )


def test_the_worker_that_samples_takes_the_masks_behind_the_plan() -> None:
    config = dummy(pipeline_parallel_size=2)
    step_plan = constrained(0)
    topology = Topology(num_stages=2, tp_size=1)
    mesh = ThreadMesh(topology)
    only = 77
    masks = (1 << only).to_bytes(4 * -(-config.model.vocab_size // 32), "little")
    script: list[ToWorker] = [ALLOCATE, run_plan(step_plan)]
    ports = [
        ScriptedWorkerPort(deque([*script, Shutdown()])),
        ScriptedWorkerPort(deque([*script, TokenMasks(step=0, masks=masks), Shutdown()])),
    ]
    workers = [
        Worker(config, worker, mesh.links(worker), ports[worker.rank])
        for worker in topology.workers
    ]
    in_threads([worker.run for worker in workers])
    [done] = [message for message in ports[1].sent if isinstance(message, PlanDone)]
    assert done.result.rows[0].token_ids == (only,)


@pytest.mark.parametrize(
    ("behind", "error", "text"),
    [
        (TokenMasks(step=3, masks=bytes(64)), AssertionError, "masks of step 3 behind step 0"),
        (ALLOCATE, AssertionError, "step 0 waits for its masks"),
        (Shutdown(), EngineDeadError, "ended before the masks of step 0"),
    ],
)
def test_a_worker_that_waits_for_masks_takes_nothing_else(
    behind: ToWorker, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        serve(dummy(), [ALLOCATE, run_plan(constrained(0)), behind])


@pytest.mark.parametrize("steps", [(1,), (0, 2), (0, 0)])
def test_a_plan_out_of_order_is_our_mistake_and_names_the_step(steps: tuple[int, ...]) -> None:
    script = [ALLOCATE, *(run_plan(plan(step)) for step in steps), Shutdown()]
    expected = len(steps) - 1
    with pytest.raises(AssertionError, match=rf"expected step {expected}:\nstep {steps[-1]}:"):
        serve(dummy(), script)


def test_a_plan_before_the_memory_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="load and allocate first"):
        serve(dummy(), [run_plan(plan(0)), Shutdown()])


def test_a_checkpoint_that_cannot_be_read_ends_the_worker_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        serve(resolved(checkpoint=tmp_path), [Shutdown()])


def test_a_shutdown_after_the_load_ends_the_worker() -> None:
    [sent] = serve(dummy(), [Shutdown()])
    assert isinstance(sent[-1], WorkerReady)


class Scripted:
    """A step that runs until the test says that it has ended."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.has_ended = False

    def is_ready(self) -> bool:
        return self.has_ended

    def outcome(self) -> StepOutcome:
        assert self.has_ended, "nobody may wait for a step while there are messages"
        return StepOutcome(
            rows=(),
            forward_seconds=0.25,
            wait_seconds=0.5,
            differences=(),
            device_seconds=0.75,
        )


@dataclass
class BusyPort(ScriptedWorkerPort):
    """Has no message at the places of None; then a step ends, the newest first."""

    script: deque[Any]
    steps: list[Scripted] = field(default_factory=list)

    def receive_now(self) -> ToWorker | None:
        message = self.script.popleft()
        if message is not None:
            return messages.decode_to_worker(messages.encode(message))
        running = [step for step in self.steps if not step.has_ended]
        if running:
            running[-1].has_ended = True
        return None


def test_plans_are_taken_while_older_ones_run_and_answered_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = [run_plan(plan(step)) for step in range(4)]
    port = BusyPort(deque([ALLOCATE, plans[0], plans[1], plans[2], None, None, None, plans[3]]))
    port.script += [None, Shutdown()]
    num_sent: list[int] = []

    def launch(self: Any, plan: StepPlan, *waits: Any) -> Scripted:
        port.steps.append(Scripted(plan.step))
        num_sent.append(sum(isinstance(message, PlanDone) for message in port.sent))
        return port.steps[-1]

    monkeypatch.setattr(StageRunner, "launch", launch)
    config = dummy()
    topology = Topology(num_stages=1, tp_size=1)
    before = time.monotonic()
    Worker(config, topology.worker(0), ThreadMesh(topology).links(topology.worker(0)), port).run()
    results = [message.result for message in port.sent if isinstance(message, PlanDone)]
    # Steps 2 and 1 ended before step 0, and waited for it.
    assert num_sent == [0, 0, 0, 3]
    assert [result.step for result in results] == [0, 1, 2, 3]
    for result in results:
        assert (result.busy_seconds, result.hop_seconds, result.step_seconds) == (0.25, 0.5, 0.75)
        assert before - 0.75 <= result.arrived <= time.monotonic() - 0.75


def test_memory_is_looked_at_when_all_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("load", "memory_needs"):
        original = getattr(StageRunner, name)

        def noted(self: Any, *rest: Any, original: Any = original) -> Any:
            result = original(self, *rest)
            done.append(original.__name__)
            return result

        monkeypatch.setattr(StageRunner, name, noted)
    topology = Topology(num_stages=1, tp_size=1)
    worker, port = topology.worker(0), ScriptedWorkerPort(deque())
    links = ThreadMesh(topology).links(worker)
    Worker(dummy(), worker, links, port, after_load=lambda: done.append("meet")).start()
    assert done == ["load", "meet", "memory_needs"]


class Slow(Scripted):
    """Ends only when somebody waits for it."""

    def outcome(self) -> StepOutcome:
        self.has_ended = True
        return super().outcome()


def test_a_plan_that_makes_the_host_wait_holds_up_no_older_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = ScriptedWorkerPort(
        deque([ALLOCATE, *(run_plan(plan(step)) for step in range(3)), Shutdown()])
    )
    num_sent: list[int] = []

    def launch(self: Any, plan: StepPlan, masks: Any, before_wait: Any) -> Scripted:
        if plan.step == 2:
            before_wait()
        num_sent.append(sum(isinstance(message, PlanDone) for message in port.sent))
        return Slow(plan.step)

    monkeypatch.setattr(StageRunner, "launch", launch)
    topology = Topology(num_stages=1, tp_size=1)
    worker = topology.worker(0)
    served = Worker(dummy(), worker, ThreadMesh(topology).links(worker), port)
    served.start()
    while served._carry_out(port.receive()):
        pass
    assert num_sent == [0, 0, 2]


def test_an_answer_is_waited_for_where_messages_come_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launch(self: Any, plan: StepPlan, *waits: Any) -> Scripted:
        step = Scripted(plan.step)
        step.has_ended = True
        return step

    monkeypatch.setattr(StageRunner, "launch", launch)
    topology = Topology(num_stages=1, tp_size=1)
    port = ScriptedWorkerPort(deque())
    worker = Worker(
        dummy(), topology.worker(0), ThreadMesh(topology).links(topology.worker(0)), port
    )
    assert worker.handle(run_plan(plan(0))) and not worker.handle(Shutdown())
    [done] = port.sent
    assert isinstance(done, PlanDone) and done.result.step == 0
