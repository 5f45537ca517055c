"""A worker whose neighbour is gone keeps its weights, and computes the same when all meet again."""

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.messages import (
    Allocate,
    FromWorker,
    LinkBroken,
    LoadProgress,
    Meet,
    Part,
    PlanDone,
    Shutdown,
    StepEcho,
    TokenMasks,
    ToWorker,
    WorkerAllocated,
    WorkerApart,
    WorkerReady,
)
from stagecoach.engine.worker import Worker
from stagecoach.errors import WorkerDiedError
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.renewable_links import RenewableLinks
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology, WorkerId
from tests.cpu.engine.fakes import in_threads
from tests.cpu.engine.test_worker import ScriptedWorkerPort, dummy, plan, run_plan, serve

pytestmark = pytest.mark.cpu

ALLOCATE = Allocate(memory=MemoryPlan(num_pages=6, num_slots=5))
GRID = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
# What a survivor is told from the first sign on.
AGAIN: tuple[ToWorker, ...] = (
    Part(generation=2),
    Meet(generation=4, first_step=7),
    ALLOCATE,
    run_plan(plan(7)),
    run_plan(plan(8, start=3, length=1, samples=True)),
    Shutdown(),
)


class ThreadWorld:
    """A mesh for each generation; whoever leaves one tears it for all who are in it."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.topology = Topology.of(config.engine)
        self._meshes = {generation: ThreadMesh(self.topology) for generation in (0, 4)}

    def connect(self, worker: WorkerId) -> Callable[[int], Links]:
        return lambda generation: self._meshes[generation].links(worker)

    def renewable(self, worker: WorkerId) -> RenewableLinks:
        met: list[ThreadMesh] = []

        def meet(generation: int) -> Links:
            met.append(self._meshes[generation])
            return self.connect(worker)(generation)

        return RenewableLinks(worker, self.topology, meet, lambda: met[-1].close())


def computed(sent: Sequence[FromWorker]) -> list[object]:
    """Rows, or that there are none for this worker to tell, of each plan."""
    return [
        message.result.rows if isinstance(message, PlanDone) else None
        for message in sent
        if isinstance(message, PlanDone | StepEcho)
    ]


def said(port: ScriptedWorkerPort) -> list[type]:
    return [type(message) for message in port.sent if not isinstance(message, LoadProgress)]


@pytest.mark.parametrize("lost", range(4))
def test_those_that_stay_and_the_one_that_is_new_compute_as_if_nothing_had_been(lost: int) -> None:
    config = dummy(**GRID, debug_poison=True)
    undisturbed = serve(
        config,
        [ALLOCATE, *map(run_plan, (plan(0), plan(1, start=3, length=1, samples=True))), Shutdown()],
    )
    world = ThreadWorld(config)
    ports = [
        ScriptedWorkerPort(
            deque(AGAIN[1:] if rank == lost else (ALLOCATE, run_plan(plan(0)), *AGAIN))
        )
        for rank in range(4)
    ]

    def live(worker: WorkerId) -> None:
        renewable, port = world.renewable(worker), ports[worker.rank]
        if worker.rank != lost:
            Worker(config, worker, renewable.meet(0), port, renewable=renewable).run()
            return
        # It is there when all load, and gone before the first plan.
        first_port = ScriptedWorkerPort(deque())
        first_life = Worker(config, worker, renewable.meet(0), first_port, renewable=renewable)
        first_life.start()
        renewable.part()
        Worker(config, worker, renewable.apart(), port, renewable=renewable).run(3)

    in_threads([lambda worker=worker: live(worker) for worker in world.topology.workers])
    again = [WorkerReady, WorkerAllocated]
    for rank, port in enumerate(ports):
        assert not port.script
        assert computed(port.sent)[-2:] == computed(undisturbed[rank])
        assert said(port)[-4:-2] == again, "as after a load"
        [apart] = [message for message in port.sent if isinstance(message, WorkerApart)]
        assert apart.generation == (3 if rank == lost else 2)
        if rank == lost:
            assert said(port)[0] is WorkerApart
        elif rank // 2 == lost // 2:
            assert LinkBroken in said(port), "the ranks of a stage wait for each other"


def test_a_worker_that_is_apart_drops_what_was_on_its_way() -> None:
    config = dummy()
    world = ThreadWorld(config)
    [worker] = world.topology.workers
    stale = (run_plan(plan(5)), TokenMasks(step=5, masks=b""), ALLOCATE)
    port = ScriptedWorkerPort(deque((ALLOCATE, AGAIN[0], *stale, *AGAIN)))
    renewable = world.renewable(worker)
    Worker(config, worker, renewable.meet(0), port, renewable=renewable).run()
    parted = [message.generation for message in port.sent if isinstance(message, WorkerApart)]
    assert parted == [2, 2] and len(computed(port.sent)) == 2


@pytest.mark.parametrize("recovers", [False, True])
def test_a_worker_that_cannot_part_ends_with_its_neighbour(*, recovers: bool) -> None:
    """In an engine that does not recover; and on a device, from which nobody can call back."""
    config = dummy(pipeline_parallel_size=2)
    world = ThreadWorld(config)
    first, second = world.topology.workers

    def leave() -> None:
        renewable = world.renewable(first)
        Worker(config, first, renewable.meet(0), ScriptedWorkerPort(deque())).start()
        renewable.part()

    port = ScriptedWorkerPort(deque((ALLOCATE, run_plan(plan(0)), Shutdown())))
    fixed = RenewableLinks(second, world.topology, world.connect(second), None)
    renewable = fixed if recovers else None
    with pytest.raises(WorkerDiedError):
        in_threads([leave, Worker(config, second, fixed.meet(0), port, renewable=renewable).run])
    assert LinkBroken not in said(port)
