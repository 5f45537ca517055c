"""Step times of a whole engine: from its options to costs, and from stages to what a client sees.

Owns how stages overlap: which cohorts run side by side, and what lies between a step's result and
the next step. Knows no tensor.
"""

from collections.abc import Iterator
from typing import NamedTuple

from stagecoach.config.engine import ResolvedConfig
from stagecoach.costs.machine import Machine
from stagecoach.costs.step_time import StepCosts, StepShape, Storage
from stagecoach.pipeline.stage import make_stages

_VALUE_BYTES = {"fp8": 1.0, "bfloat16": 2.0, "float32": 4.0, "float64": 8.0}
_PACKED_BYTES = 0.5 + 1 / 32  # two codes a byte, and a scale for each group of 32
# From a step's result to the launch of the next: the loop, both ways to the workers, inputs.
_TURNAROUND_SECONDS = 1.0e-3
_TURNAROUND_SECONDS_OF_REQUEST = 10e-6


def step_costs(config: ResolvedConfig, machine: Machine) -> StepCosts:
    """Of one rank of the engine on such GPUs."""
    speculation = config.speculation
    return StepCosts(
        machine=machine,
        model=config.model,
        tp_size=config.engine.tensor_parallel_size,
        storage=_storage(config),
        draft=speculation.draft if speculation else None,
        num_draft_tokens=config.num_draft_tokens,
        has_graphs=not config.engine.enforce_eager,
    )


def _storage(config: ResolvedConfig) -> Storage:
    value, choice = _VALUE_BYTES[config.dtype], config.quantization
    is_packed = choice.keeps_packed and config.model.has_packed_experts
    return Storage(
        activation=value,
        expert=_PACKED_BYTES if is_packed else value,
        are_experts_packed=is_packed,
        fp8_linear=value if choice.fp8 is None else _VALUE_BYTES["fp8"],
        row=_VALUE_BYTES[config.cache_dtype or config.dtype],
        draft_row=_VALUE_BYTES[config.draft_cache_dtype or config.dtype],
    )


class DecodeTime(NamedTuple):
    """Of the time until every request has one more row of tokens."""

    seconds: float
    stage_seconds: tuple[float, ...]  # of one cohort's step on each stage


def decode_time(
    config: ResolvedConfig,
    costs: StepCosts,
    num_requests: int,
    context: float,
    boundary_bytes: tuple[int, ...],
) -> DecodeTime:
    """A decode step of every request.

    The requests are as many cohorts as there are stages, each with a plan of its own in flight. A
    cohort passes the stages one after the other, and its next plan needs its tokens; a stage
    serves the cohorts in turn. Whichever of the two takes longer is the step.

    Args:
        context: cached tokens of each request, on average.
        boundary_bytes: of one token, from each stage to the next.
    """
    stages = make_stages(config.partition)
    cohort = -(-num_requests // len(stages))
    step = StepShape(num_windows=cohort, width=1 + config.num_draft_tokens, context=context)
    seconds = tuple(costs.stage_seconds(stage, step) for stage in stages)
    if config.is_chaining:
        return DecodeTime(seconds[0], seconds)
    hops = sum(costs.hop_seconds(size * step.num_tokens) for size in boundary_bytes)
    turnaround = _TURNAROUND_SECONDS + _TURNAROUND_SECONDS_OF_REQUEST * cohort
    num_cohorts = -(-num_requests // cohort)
    return DecodeTime(max(num_cohorts * max(seconds), sum(seconds) + hops + turnaround), seconds)


def prefill_seconds(
    config: ResolvedConfig, costs: StepCosts, chunks: tuple[int, ...], start: int = 0
) -> float:
    """From the first launch to the end of a prompt whose chunks are in flight one after the other.

    Args:
        chunks: tokens of each.
        start: cached tokens before the first.
    """
    stages = make_stages(config.partition)
    free = [0.0] * len(stages)
    for shape in _chunk_shapes(chunks, start):
        ready = 0.0
        for index, stage in enumerate(stages):
            ready = max(ready, free[index]) + costs.stage_seconds(stage, shape)
            free[index] = ready
    return free[-1] + _TURNAROUND_SECONDS


def prefill_rate(config: ResolvedConfig, costs: StepCosts, num_tokens: int) -> float:
    """Tokens a second where prompts of one plan each keep every stage busy."""
    shape = StepShape(num_chunk_tokens=num_tokens)
    slowest = max(costs.stage_seconds(stage, shape) for stage in make_stages(config.partition))
    return num_tokens / slowest


def _chunk_shapes(chunks: tuple[int, ...], start: int) -> Iterator[StepShape]:
    for length in chunks:
        yield StepShape(num_chunk_tokens=length, chunk_context=start)
        start += length
