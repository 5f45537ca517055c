"""From workers that load to workers that serve: their weights, their memory, what steps cost.

Owns the order of a start as the loop sees it, and what the failure of a worker is raised as.
Decides nothing about requests, which wait meanwhile.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan, describe, plan_memory
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.messages import (
    Allocate,
    CaptureProgress,
    FromWorker,
    LoadProgress,
    ToClient,
    WorkerAllocated,
    WorkerFailed,
    WorkerReady,
)
from stagecoach.engine.ports import LoopPort
from stagecoach.engine.step_profile import StepProfile, StepProfiler
from stagecoach.errors import (
    CheckpointError,
    ConfigError,
    StagecoachError,
    WorkerDiedError,
    error_class,
)
from stagecoach.observe.log import get_logger

_LOG = get_logger(__name__)


class Started(NamedTuple):
    """An engine whose workers wait for the first plan."""

    needs: list[MemoryNeeds]  # by rank
    memory: MemoryPlan
    profile: StepProfile | None  # what steps cost, if lengths of windows depend on it


class StartUp:
    """The start of one engine.

    Args:
        serve_clients: takes what clients have sent; False once a Shutdown came.
        broadcast: tells all clients.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        port: LoopPort,
        serve_clients: Callable[[], bool],
        broadcast: Callable[[ToClient], None],
    ) -> None:
        self._config = config
        self._port = port
        self._serve_clients = serve_clients
        self._broadcast = broadcast

    def run(self) -> Started | None:
        """Wait for the weights, plan the memory, have it allocated; None once a Shutdown came.

        Where lengths of windows depend on what steps cost, that is measured in between.

        Raises:
            CapacityError: the configuration does not fit the workers' memory.
            ConfigError, CheckpointError: why a worker refused to load.
            WorkerDiedError: a worker could not load, or hangs while steps are measured.
            PlanDivergenceError: a worker executed another plan while steps were measured.
        """
        engine = self._config.engine
        by_rank: dict[int, MemoryNeeds] = {}
        while len(by_rank) < engine.num_workers:
            received = self._next_message()
            if received is None:
                return None
            rank, message = received
            if isinstance(message, WorkerReady):
                by_rank[rank] = message.needs
        needs = [by_rank[rank] for rank in range(engine.num_workers)]
        memory = plan_memory(
            needs,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=self._config.max_model_len,
            block_size=engine.block_size,
            num_gpu_blocks_override=engine.num_gpu_blocks_override,
            max_state_checkpoints=(
                engine.max_state_checkpoints if engine.enable_prefix_caching else 0
            ),
            kv_offloading_size=engine.kv_offloading_size,
        )
        _LOG.info("memory: %s", describe(memory, engine.max_num_seqs, engine.block_size))
        profile = None
        if self._needs_costs:
            profiler = StepProfiler(self._config, memory)
            if not self._allocate(profiler.memory):
                return None
            profile = profiler.run(
                self._port.send_workers, lambda: self._next_message(is_executing=True)
            )
            if profile is None:
                return None
        return Started(needs, memory, profile) if self._allocate(memory) else None

    @property
    def _needs_costs(self) -> bool:
        speculation = self._config.speculation
        return speculation is not None and (
            speculation.has_confidence_schedule or speculation.has_watchdog
        )

    def _allocate(self, memory: MemoryPlan) -> bool:
        """Have all workers reserve it, instead of what they had; False once a Shutdown came."""
        self._port.send_workers(Allocate(memory=memory))
        num_allocated = 0
        while num_allocated < self._config.engine.num_workers:
            received = self._next_message()
            if received is None:
                return False
            num_allocated += isinstance(received[1], WorkerAllocated)
        return True

    def _next_message(self, *, is_executing: bool = False) -> tuple[int, FromWorker] | None:
        """The next one of a worker, with its rank; None once a Shutdown came.

        Args:
            is_executing: workers have a plan, for which their time is limited.

        Raises:
            WorkerDiedError: that time is over.
        """
        began = time.monotonic()
        goes_on = True
        while goes_on:
            received = self._port.receive_worker()
            if received is not None:
                message = received[1]
                if isinstance(message, WorkerFailed):
                    raise worker_error(message)
                if isinstance(message, LoadProgress | CaptureProgress):
                    self._broadcast(message)
                return received
            self._port.wait(seconds_left(self._config, began) if is_executing else None)
            goes_on = self._serve_clients()
        return None


def seconds_left(config: ResolvedConfig, since: float) -> float:
    """How long workers may still take for what they have been at since then.

    Raises:
        WorkerDiedError: their time is over.
    """
    timeout = config.engine.execute_model_timeout_seconds
    left = since + timeout - time.monotonic()
    if left <= 0:
        raise WorkerDiedError(
            f"no result for {timeout} s (--execute-model-timeout-seconds): a worker hangs"
        )
    return left


def worker_error(failed: WorkerFailed) -> StagecoachError:
    """A refusal keeps its class; whatever else ended the worker is a WorkerDiedError."""
    error = error_class(failed.kind)
    if issubclass(error, ConfigError | CheckpointError):
        return error(f"{failed.worker}: {failed.reason}")
    return WorkerDiedError(f"{failed.worker} failed: {failed.kind}: {failed.reason}")
