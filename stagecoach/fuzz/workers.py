"""Workers that run in the turn of their caller, with weights that stay loaded.

Owns the models of every layout that was asked for. Stages run one after the other in the
caller's thread; ranks of a stage, which wait for each other, in a thread each. Memory, drafter
and links are new with every engine.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from stagecoach.config.engine import ResolvedConfig
from stagecoach.draft.drafter import Drafter
from stagecoach.draft.load import load_drafter
from stagecoach.engine.messages import FromWorker, ToWorker
from stagecoach.engine.worker import Worker
from stagecoach.errors import WorkerDiedError
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import TensorParallel
from stagecoach.model.weights import load_stage
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.stage import Stage
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from stagecoach.runner.stage_runner import Loaders

Reply = Callable[[int, FromWorker], None]


class Layouts:
    """The loaded layouts of one model."""

    def __init__(self) -> None:
        self._grids: dict[tuple[object, ...], _Grid] = {}

    def start(
        self, config: ResolvedConfig, reply: Reply, drafter: Drafter | None = None
    ) -> "WorkerSet":
        """Start the workers of one engine; they have reported their memory when this returns.

        Args:
            reply: called with a worker's rank and message.
            drafter: takes the place of the draft that the config names.
        """
        engine = config.engine
        key = (engine.tensor_parallel_size, config.quantization, *config.partition)
        if key not in self._grids or self._grids[key].is_broken:
            self._grids[key] = _Grid(config)
        return WorkerSet(self._grids[key], config, reply, drafter)


class WorkerSet:
    """The workers of one engine."""

    def __init__(
        self, grid: "_Grid", config: ResolvedConfig, reply: Reply, drafter: Drafter | None
    ) -> None:
        self._grid = grid
        self._ports = [_TurnPort(worker.rank, reply) for worker in grid.topology.workers]
        mesh = ThreadMesh(grid.topology)
        self._workers = [
            Worker(
                config,
                worker,
                Links(mesh.links(worker).transport, grid.tensor_parallel[worker.rank]),
                self._ports[worker.rank],
                grid.loaders(worker.rank, drafter),
            )
            for worker in grid.topology.workers
        ]
        self._each(Worker.start)

    def send(self, message: ToWorker) -> None:
        """Have all workers carry it out.

        Raises whatever a worker raised.
        """
        self._each(lambda worker: worker.handle(message))

    def hand_over(self, rank: int, message: ToWorker) -> None:
        """What this worker will find when it waits for a message in the middle of the next."""
        self._ports[rank].messages.append(message)

    def _each(self, act: Callable[[Worker], Any]) -> None:
        self._grid.run(lambda rank: act(self._workers[rank]))


class _Grid:
    """Models of one layout, and the threads of its tensor-parallel ranks."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.topology = Topology.of(config.engine)
        self._mesh = ThreadMesh(self.topology)
        self.tensor_parallel: list[TensorParallel] = [
            self._mesh.links(worker).tensor_parallel for worker in self.topology.workers
        ]
        self._models: dict[tuple[int, bool], StageModel] = {}
        self.is_broken = False
        self._pool = (
            ThreadPoolExecutor(
                self.topology.tp_size, initializer=torch.set_flush_denormal, initargs=(True,)
            )
            if self.topology.tp_size > 1
            else None
        )

    def loaders(self, rank: int, drafter: Drafter | None) -> Loaders:
        def stage_model(folder: Any, model: Any, stage: Stage, *rest: Any, **more: Any) -> Any:
            key = (rank, more["taps"] is not None)
            if key not in self._models:
                self._models[key] = load_stage(folder, model, stage, *rest, **more)
            return self._models[key]

        def stage_drafter(*arguments: Any) -> Drafter:
            return load_drafter(*arguments) if drafter is None else drafter

        return Loaders(stage_model, stage_drafter)

    def run(self, act: Callable[[int], None]) -> None:
        """Call `act` with every rank, in an order in which no stage waits for ever."""
        topology = self.topology

        def run_ranks(tp_rank: int) -> None:
            try:
                for stage in range(topology.num_stages):
                    act(topology.stage_ranks(stage)[tp_rank])
            except BaseException:
                self.is_broken = True
                self._mesh.close()
                raise

        if self._pool is None:
            run_ranks(0)
            return
        futures = [self._pool.submit(run_ranks, rank) for rank in range(topology.tp_size)]
        wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        # The others only say that their neighbour ended.
        for error in sorted(errors, key=lambda error: isinstance(error, WorkerDiedError)):
            raise error


class _TurnPort:
    """A worker's port where nothing comes later: what it waits for is there."""

    def __init__(self, rank: int, reply: Reply) -> None:
        self._rank = rank
        self._reply = reply
        self.messages: deque[ToWorker] = deque()

    def receive(self) -> ToWorker:
        assert self.messages, "waits for what was not handed over"
        return self.messages.popleft()

    def receive_now(self) -> ToWorker | None:
        return self.messages.popleft() if self.messages else None

    def send(self, message: FromWorker) -> None:
        self._reply(self._rank, message)

    def close(self) -> None:
        return
