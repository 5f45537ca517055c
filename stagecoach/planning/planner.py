"""From an engine's options to what it would take and how fast it would be.

Owns the order: settle the options, count bytes, estimate times, look for what fits and for better
partitions. Starts nothing and reads no weights.
"""

from dataclasses import replace
from math import prod

from stagecoach.config.engine import EngineConfig, ResolvedConfig, option
from stagecoach.config.model import LayerKind
from stagecoach.config.quantization import NamePatterns
from stagecoach.costs.engine_costs import (
    decode_time,
    prefill_rate,
    prefill_seconds,
    step_costs,
)
from stagecoach.costs.machine import H200, Machine
from stagecoach.costs.step_time import StepCosts, StepShape
from stagecoach.errors import ConfigError
from stagecoach.model.ledger import check_patterns, model_tensors
from stagecoach.pipeline.boundary import outgoing_fields
from stagecoach.pipeline.partition import (
    LayerCosts,
    attention_balance,
    partition,
    time_layer_costs,
)
from stagecoach.pipeline.stage import Stage, make_stages
from stagecoach.planning.footprint import Footprints
from stagecoach.planning.memory import (
    EngineMemory,
    RankMemory,
    engine_memory,
    most_requests,
    planned_requests,
    pool_bytes,
)
from stagecoach.planning.remedies import Remedies
from stagecoach.planning.report import (
    ContextReport,
    DecodeReport,
    PartitionReport,
    Plan,
    PrefillReport,
    StageReport,
)
from stagecoach.resolve import resolve
from stagecoach.runner.stage_runner import DTYPES
from stagecoach.schedule.chunking import cohort_size
from stagecoach.schedule.prefill_shares import PrefillShares

_CONTEXTS = (4096, 32768, 131072, 262144, 1048576)
_REQUESTS = (1, 8, 64, 256)
_PROMPTS = (8192, 65536)


def make_plan(
    engine: EngineConfig,
    machine: Machine | None,
    gpu_bytes: int | None = None,
    *,
    context: int | None = None,
    model_name: str | None = None,
) -> Plan:
    """What an engine would be.

    Args:
        engine: as it would be started.
        machine: the GPUs; None: on this machine's CPUs, without times.
        gpu_bytes: of each GPU, in place of what that kind has.
        context: cached tokens of each request in the times of decoding; by default 8,192 or
            half of the longest request.
        model_name: how the model was called, where `engine.model` is its folder.

    Raises:
        ConfigError: the options cannot be served; no request is as long as `context`.
        CheckpointError: no readable config.json.
    """
    config = resolve(engine, "cpu" if machine is None else "cuda")
    if context is not None and context >= config.max_model_len:
        raise ConfigError(
            f"--context={context}: must be below {option('max_model_len')}={config.max_model_len}"
        )
    patterns = config.quantization.fp8
    if patterns is not None and patterns != NamePatterns():
        check_patterns(patterns, model_tensors(config.model))
    size = 0 if machine is None else gpu_bytes or machine.memory_bytes
    footprints = Footprints(config)
    memory = engine_memory(config, size, footprints)
    costs = step_costs(config, machine or H200)
    remedies = tuple(text.replace("=", " ") for text in memory.remedies)
    if not memory.fits and machine is not None:
        remedies = Remedies(config, size).find(memory.remedies)
    has_times = machine is not None
    decode_context = context or min(8192, config.max_model_len // 2)
    num_running = _most_running(config, memory, decode_context)
    plan = memory.plan
    return Plan(
        model=model_name or engine.model,
        gpu=machine.name if machine else None,
        gpu_bytes=size,
        is_measured=machine is not None and machine.is_measured,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        tensor_parallel_size=engine.tensor_parallel_size,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        num_draft_tokens=config.num_draft_tokens,
        partition=config.partition,
        fits=memory.fits,
        problems=(memory.problem,) if memory.problem else (),
        remedies=remedies,
        num_pages=plan.num_pages if plan else 0,
        num_slots=plan.num_slots if plan else 0,
        num_checkpoints=plan.num_slots - 1 - engine.max_num_seqs if plan else 0,
        num_host_pages=plan.num_host_pages if plan else 0,
        num_host_slots=plan.num_host_slots if plan else 0,
        stages=tuple(_stage_report(config, memory, rank, size) for rank in memory.ranks),
        contexts=_contexts(config, memory),
        decode=_decode(config, costs, decode_context, num_running) if has_times else (),
        prefill=_prefill(config, costs) if has_times else (),
        partitions=(
            _partitions(config, costs, footprints, size, decode_context, num_running)
            if has_times
            else ()
        ),
    )


def boundary_bytes(config: ResolvedConfig) -> tuple[int, ...]:
    """Bytes of one token from each stage but the last to the next, over all ranks."""
    return tuple(_outgoing_bytes(config, stage) for stage in make_stages(config.partition)[:-1])


def prompt_chunks(config: ResolvedConfig, num_tokens: int) -> tuple[int, ...]:
    """How the scheduler cuts one prompt that is alone in the engine."""
    engine = config.engine
    shares = PrefillShares(
        num_stages=engine.pipeline_parallel_size,
        budget=engine.max_num_batched_tokens,
        balance=attention_balance(config.model),
    )
    chunks: list[int] = []
    costs: list[float] = []
    start = 0
    while start < num_tokens:
        in_flight = costs[len(costs) - min(len(costs), engine.pipeline_parallel_size) :]
        share = shares.begin_plan([(start, num_tokens)], in_flight)
        length = share.cut(start, min(engine.max_num_batched_tokens, num_tokens - start))
        share.take(start, start + length)
        chunks.append(length)
        costs.append(share.taken)
        start += length
    return tuple(chunks)


def _stage_report(
    config: ResolvedConfig, memory: EngineMemory, rank: RankMemory, gpu_bytes: int
) -> StageReport:
    engine, needs, plan = config.engine, rank.needs, memory.plan
    kinds = [config.model.layer_kinds[layer] for layer in rank.stage.layers]
    pools = pool_bytes(rank, plan) if plan else 0
    num_live = 1 + engine.max_num_seqs
    each_token = _outgoing_bytes(config, rank.stage)
    cohort = cohort_size(engine.max_num_seqs, engine.pipeline_parallel_size)
    total = rank.fixed_bytes + pools
    allowed = int(engine.gpu_memory_utilization * gpu_bytes) if gpu_bytes else total
    if not gpu_bytes and needs.available_bytes < pools:
        allowed = rank.fixed_bytes + needs.available_bytes
    host = plan.num_host_pages * needs.bytes_per_page if plan else 0
    host += plan.num_host_slots * needs.bytes_per_slot if plan else 0
    return StageReport(
        stage=rank.stage.index,
        first_layer=rank.stage.start,
        num_layers=rank.stage.num_layers,
        kda_layers=kinds.count(LayerKind.KDA),
        mla_layers=kinds.count(LayerKind.MLA),
        weight_bytes=rank.weights.total,
        drafter_bytes=rank.drafter,
        context_bytes=rank.reserve.context,
        activation_bytes=rank.reserve.activations,
        graph_bytes=rank.reserve.graphs,
        bytes_per_page=needs.bytes_per_page,
        bytes_per_slot=needs.bytes_per_slot,
        page_bytes=plan.num_pages * needs.bytes_per_page if plan else 0,
        slot_bytes=num_live * needs.bytes_per_slot if plan else 0,
        checkpoint_bytes=(plan.num_slots - num_live) * needs.bytes_per_slot if plan else 0,
        host_bytes=host,
        total_bytes=total,
        spare_bytes=allowed - total,
        boundary_bytes_per_token=each_token,
        boundary_bytes_per_step=each_token * cohort * (1 + config.num_draft_tokens),
        boundary_bytes_per_chunk=each_token * engine.max_num_batched_tokens,
    )


def _outgoing_bytes(config: ResolvedConfig, stage: Stage) -> int:
    taps = config.speculation.draft.taps if config.speculation else None
    fields = outgoing_fields(config.model, stage, taps)
    return sum(prod(field.row_shape) for field in fields) * DTYPES[config.dtype].itemsize


def _contexts(config: ResolvedConfig, memory: EngineMemory) -> tuple[ContextReport, ...]:
    if memory.plan is None:
        return ()
    lengths = [size for size in _CONTEXTS if size < config.max_model_len]
    return tuple(
        ContextReport(
            context=length,
            planned=planned_requests(config, memory.plan, length),
            most=most_requests(config, memory, length),
        )
        for length in (*lengths, config.max_model_len)
    )


def _most_running(config: ResolvedConfig, memory: EngineMemory, context: int) -> int:
    """Requests with so many cached tokens that run at once; all, where nothing fits."""
    if memory.plan is None:
        return config.engine.max_num_seqs
    length = context + 1 + config.num_draft_tokens
    return max(1, planned_requests(config, memory.plan, min(length, config.max_model_len)))


def _decode(
    config: ResolvedConfig, costs: StepCosts, context: int, most: int
) -> tuple[DecodeReport, ...]:
    numbers = sorted({*(number for number in _REQUESTS if number < most), most})
    crossing = boundary_bytes(config)
    reports = []
    for number in numbers:
        time = decode_time(config, costs, number, context, crossing)
        reports.append(
            DecodeReport(
                num_requests=number,
                context=context,
                step_seconds=time.seconds,
                stage_seconds=time.stage_seconds,
                tokens_per_second=number / time.seconds,
            )
        )
    return tuple(reports)


def _prefill(config: ResolvedConfig, costs: StepCosts) -> tuple[PrefillReport, ...]:
    rate = prefill_rate(config, costs, config.engine.max_num_batched_tokens)
    lengths = [length for length in _PROMPTS if length < config.max_model_len]
    reports = []
    for length in lengths or [config.max_model_len - 1]:
        seconds = prefill_seconds(config, costs, prompt_chunks(config, length))
        reports.append(
            PrefillReport(
                prompt_tokens=length,
                seconds=seconds,
                tokens_per_second=length / seconds,
                saturated_tokens_per_second=rate,
            )
        )
    return tuple(reports)


def _partitions(
    config: ResolvedConfig,
    costs: StepCosts,
    footprints: Footprints,
    gpu_bytes: int,
    context: int,
    num_requests: int,
) -> tuple[PartitionReport, ...]:
    """The one that is planned, and those that make one thing each as even as can be."""
    num_stages = config.engine.pipeline_parallel_size
    if num_stages == 1:
        return ()
    cohort = cohort_size(num_requests, num_stages)
    full = StepShape(num_windows=cohort, width=1 + config.num_draft_tokens, context=context)
    chunk = StepShape(num_chunk_tokens=config.engine.max_num_batched_tokens)
    decoding = f"decoding of {num_requests}"
    candidates = {
        "planned": config.partition,
        decoding: partition(time_layer_costs(costs, full), num_stages),
        "prefill": partition(time_layer_costs(costs, chunk), num_stages),
        "memory": partition(_memory_costs(config, footprints, gpu_bytes), num_stages),
    }
    names: dict[tuple[int, ...], list[str]] = {}
    for name, layers in candidates.items():
        names.setdefault(layers, []).append(name)
    reports = []
    for layers, alike in names.items():
        other = replace(config, partition=layers)
        memory = engine_memory(other, gpu_bytes, footprints)
        time = decode_time(other, costs, num_requests, context, boundary_bytes(other))
        reports.append(
            PartitionReport(
                balances=tuple(alike),
                partition=layers,
                fits=memory.fits,
                most_requests=most_requests(other, memory, config.max_model_len),
                num_requests=num_requests,
                step_seconds=time.seconds,
                prefill_tokens_per_second=prefill_rate(other, costs, chunk.num_chunk_tokens),
            )
        )
    return tuple(reports)


def _memory_costs(config: ResolvedConfig, footprints: Footprints, gpu_bytes: int) -> LayerCosts:
    """Bytes of each layer with as many longest requests as the planned partition has room for."""
    planned = engine_memory(config, gpu_bytes, footprints)
    num_requests = max(1, most_requests(config, planned, config.max_model_len))
    one_each = replace(config, partition=(1,) * config.model.num_layers)
    ranks = engine_memory(one_each, gpu_bytes, footprints).ranks
    num_pages = -(-config.max_model_len // config.engine.block_size)
    sizes = [
        rank.weights.total
        + num_requests * (rank.needs.bytes_per_slot + num_pages * rank.needs.bytes_per_page)
        for rank in ranks
    ]
    *_, last = planned.ranks
    reserves = [rank.reserve.total for rank in planned.ranks]
    last_stage = last.drafter + max(0, reserves[-1] - reserves[0])
    return LayerCosts(layers=tuple(sizes), first_stage=0, last_stage=last_stage)
