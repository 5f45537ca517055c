"""What the workers of an engine would take of their devices, and what would make it fit.

Owns the sum: weights (`footprint.py`), what is estimated (`reserve.py`), and pages and slots, which
`cache/memory_plan.py` divides as it does for a running engine. Allocates nothing.
"""

from typing import NamedTuple

import psutil

from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan, plan_memory
from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.cache.state_slots import NUM_RESERVED_SLOTS
from stagecoach.config.engine import ResolvedConfig, option
from stagecoach.errors import CapacityError, ConfigError
from stagecoach.pipeline.stage import Stage, make_stages
from stagecoach.pipeline.topology import Topology
from stagecoach.planning.footprint import Footprints, WeightBytes
from stagecoach.planning.reserve import NO_RESERVE, Reserve, estimate_reserve
from stagecoach.runner.device_memory import memory_needs
from stagecoach.runner.stage_runner import DTYPES


class RankMemory(NamedTuple):
    """Bytes of rank 0 of one stage."""

    stage: Stage
    weights: WeightBytes
    drafter: int
    reserve: Reserve
    needs: MemoryNeeds

    @property
    def fixed_bytes(self) -> int:
        """All but pages and slots."""
        return self.weights.total + self.drafter + self.reserve.total


class EngineMemory(NamedTuple):
    """Of all stages, and how their pools are divided; None where they do not fit."""

    ranks: tuple[RankMemory, ...]
    plan: MemoryPlan | None
    problem: str  # empty where it fits
    remedies: tuple[str, ...] = ()  # options with values that follow from the problem's numbers

    @property
    def fits(self) -> bool:
        return self.plan is not None


def engine_memory(
    config: ResolvedConfig, gpu_bytes: int, footprints: Footprints | None = None
) -> EngineMemory:
    """Of an engine on GPUs of `gpu_bytes`, or on CPUs if the config's device is one.

    Args:
        footprints: of the same model, ranks and types, where they were asked before.
    """
    footprints = footprints or Footprints(config)
    ranks = tuple(
        _rank_memory(config, stage, gpu_bytes, footprints)
        for stage in make_stages(config.partition)
    )
    if problem := _explain_weights(config, ranks, gpu_bytes):
        return EngineMemory(ranks, None, problem)
    try:
        # The host tier is shared by all workers; the ranks of a stage are alike.
        num_ranks = config.engine.tensor_parallel_size
        plan = divide(config, [rank.needs for rank in ranks for _ in range(num_ranks)])
    except CapacityError as error:
        return EngineMemory(ranks, None, error.cause, error.remedies)
    except ConfigError as error:
        return EngineMemory(ranks, None, str(error))
    if problem := _explain_pools(config, ranks, plan, gpu_bytes):
        return EngineMemory(ranks, None, problem)
    return EngineMemory(ranks, plan, "")


def divide(config: ResolvedConfig, needs: list[MemoryNeeds]) -> MemoryPlan:
    """As the engine does once its workers have reported; errors as of `plan_memory`."""
    engine = config.engine
    return plan_memory(
        needs,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=config.max_model_len,
        block_size=engine.block_size,
        num_gpu_blocks_override=engine.num_gpu_blocks_override,
        max_state_checkpoints=engine.max_state_checkpoints if engine.enable_prefix_caching else 0,
        kv_offloading_size=engine.kv_offloading_size,
    )


def most_requests(config: ResolvedConfig, memory: EngineMemory, context: int) -> int:
    """Requests of so many tokens whose pages and slots alone fit every worker."""
    num_pages = -(-context // config.engine.block_size)
    counts = []
    for rank in memory.ranks:
        needs = rank.needs
        left = needs.available_bytes - NUM_RESERVED_SLOTS * needs.bytes_per_slot
        left -= NUM_RESERVED_PAGES * needs.bytes_per_page
        each = needs.bytes_per_slot + num_pages * needs.bytes_per_page
        counts.append(max(0, left // each))
    return min(counts)


def planned_requests(config: ResolvedConfig, plan: MemoryPlan, context: int) -> int:
    """Requests of so many tokens that the plan's pages and slots hold at once."""
    num_pages = -(-context // config.engine.block_size)
    return min(config.engine.max_num_seqs, (plan.num_pages - NUM_RESERVED_PAGES) // num_pages)


def _rank_memory(
    config: ResolvedConfig, stage: Stage, gpu_bytes: int, footprints: Footprints
) -> RankMemory:
    dtype = DTYPES[config.dtype]
    weights = footprints.stage_bytes(stage)
    drafter = footprints.drafter_bytes() if stage.is_last else 0
    if config.device == "cpu":
        return RankMemory(stage, weights, drafter, NO_RESERVE, memory_needs(config, stage, dtype))
    reserve = estimate_reserve(config, stage)
    fixed = weights.total + drafter + reserve.total
    available = int(config.engine.gpu_memory_utilization * gpu_bytes) - fixed
    needs = memory_needs(config, stage, dtype, available, gpu_bytes)
    return RankMemory(stage, weights, drafter, reserve, needs)


def _explain_weights(config: ResolvedConfig, ranks: tuple[RankMemory, ...], gpu_bytes: int) -> str:
    """Where there is no room for any page or slot; empty where there is."""
    if config.device == "cpu":
        return _explain_host(config, ranks, None)
    worst = max(ranks, key=lambda rank: rank.fixed_bytes)
    # Given bytes of pages and slots are taken whatever the share.
    is_shared = config.engine.kv_cache_memory_bytes is None
    allowed = int(config.engine.gpu_memory_utilization * gpu_bytes) if is_shared else gpu_bytes
    if worst.fixed_bytes <= allowed:
        return ""
    parts = {
        "weights": worst.weights.total,
        "draft": worst.drafter,
        "driver and libraries": worst.reserve.context,
        "activations": worst.reserve.activations,
        "graphs": worst.reserve.graphs,
    }
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    return (
        f"stage {worst.stage.index} does not fit: {_gib(worst.fixed_bytes)} GiB before any page or "
        f"state slot ({listed}), where {_gib(allowed)} of a GPU's {_gib(gpu_bytes)} may be used"
        + (f" ({option('gpu_memory_utilization')})" if is_shared else "")
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _explain_pools(
    config: ResolvedConfig, ranks: tuple[RankMemory, ...], plan: MemoryPlan, gpu_bytes: int
) -> str:
    """Where options fix the pools whatever memory there is; empty where they fit."""
    if config.device == "cpu":
        return _explain_host(config, ranks, plan)
    for rank in ranks:
        pools = pool_bytes(rank, plan)
        if rank.fixed_bytes + pools > gpu_bytes:
            fixed_by = (
                "num_gpu_blocks_override"
                if config.engine.num_gpu_blocks_override is not None
                else "kv_cache_memory_bytes"
            )
            return (
                f"stage {rank.stage.index} does not fit: {_gib(pools)} GiB of pages and state "
                f"slots ({option(fixed_by)}) beside {_gib(rank.fixed_bytes)} of weights and all "
                f"else are more than a GPU's {_gib(gpu_bytes)}"
            )
    return ""


def _explain_host(
    config: ResolvedConfig, ranks: tuple[RankMemory, ...], plan: MemoryPlan | None
) -> str:
    """Where workers on this host's CPUs take more than it has; without a plan weights alone."""
    engine = config.engine
    here = Topology.of(engine).host_ranks(engine.node_rank, engine.nnodes)
    on_host = [ranks[rank // engine.tensor_parallel_size] for rank in here]
    fixed = sum(rank.fixed_bytes for rank in on_host)
    pools = sum(pool_bytes(rank, plan) for rank in on_host) if plan else 0
    in_all = psutil.virtual_memory().total
    if fixed + pools <= in_all:
        return ""
    beside = f" and {_gib(pools)} of pages and state slots" if plan else ""
    return (
        f"the host does not hold its workers: {_gib(fixed)} GiB of weights{beside}, where it has "
        f"{_gib(in_all)}"
    )


def pool_bytes(rank: RankMemory, plan: MemoryPlan) -> int:
    """Pages and slots of one rank on its device."""
    needs = rank.needs
    return plan.num_pages * needs.bytes_per_page + plan.num_slots * needs.bytes_per_slot
