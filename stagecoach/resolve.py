"""From what was asked for to what will run: EngineConfig -> ResolvedConfig.

Owns the order of the steps: find the checkpoint, read its config, refuse what cannot work,
settle what was left open. Runs once, before any process starts; reads no weights.
"""

import dataclasses
import json
from pathlib import Path

import psutil

from stagecoach import visible_gpus
from stagecoach.checkpoint_folder import checkpoint_folder, draft_folder
from stagecoach.compatibility import rules
from stagecoach.compatibility.quantization_rules import check_rows
from stagecoach.compatibility.rules import Combination
from stagecoach.config.draft import load_draft_config
from stagecoach.config.engine import (
    EngineConfig,
    ResolvedConfig,
    ResolvedSpeculation,
    SpeculativeConfig,
    option,
    speculation_key,
)
from stagecoach.config.model import ModelConfig, load_model_config
from stagecoach.costs.engine_costs import step_costs
from stagecoach.costs.machine import H200
from stagecoach.costs.step_time import StepShape
from stagecoach.errors import CapacityError, ConfigError
from stagecoach.observe.log import get_logger
from stagecoach.pipeline.partition import estimate_layer_costs, partition, time_layer_costs
from stagecoach.pipeline.topology import Topology

_LOG = get_logger(__name__)

# The first number of the compute capability that kernels are written and tuned for.
_GPU_CAPABILITY = 9
# Beyond that a further request makes a step read few experts more.
_BUSY_REQUESTS = 16
_BUSY_CONTEXT = 2048


def resolve(engine: EngineConfig, device_elsewhere: str | None = None) -> ResolvedConfig:
    """Settle every value that was left to the model or the machine.

    Args:
        device_elsewhere: cpu or cuda, where the engine would run on other machines: then nothing
            of this one is looked at.

    Raises:
        ConfigError: no such folder of the model or the draft, a value of its config.json that is
            not implemented, a torch without CUDA where the device is cuda, or a combination
            that `compatibility/rules.py` refuses.
        CapacityError: a host tier larger than the free memory of this host, or fewer GPUs than
            workers where the device is cuda.
        CheckpointError: a folder holds no readable config.json.
    """
    folder = checkpoint_folder(engine.model)
    model = _load_model(folder, engine)
    speculation = None
    if engine.speculative_config is not None:
        speculation = _resolve_speculation(engine.speculative_config)
    draft = speculation.draft if speculation else None
    rules.check(Combination(engine, model, draft))
    device = device_elsewhere or _device(engine)
    if device_elsewhere is None:
        _check_host_tier(engine)
    dtype = _dtype(engine, model, device)
    check_rows(engine, device, dtype)
    config = ResolvedConfig(
        engine=engine,
        model=model,
        checkpoint=folder,
        dtype=dtype,
        max_model_len=engine.max_model_len or model.max_position_embeddings,
        partition=(),
        speculation=speculation,
        device=device,
    )
    return dataclasses.replace(config, partition=_partition(config))


def _load_model(folder: Path, engine: EngineConfig) -> ModelConfig:
    try:
        return load_model_config(folder, engine.hf_overrides)
    except ConfigError as error:
        text = f"{option('model')}={engine.model}: {error}"
        if engine.hf_overrides:
            text += f" (after {option('hf_overrides')}={json.dumps(engine.hf_overrides)})"
        raise ConfigError(text) from None


def _resolve_speculation(config: SpeculativeConfig) -> ResolvedSpeculation:
    folder = draft_folder(config.model)
    try:
        draft = load_draft_config(folder)
    except ConfigError as error:
        raise ConfigError(f"{speculation_key('model')}={config.model}: {error}") from None
    is_synthetic = config.synthetic_acceptance_length is not None
    return ResolvedSpeculation(
        draft=draft,
        checkpoint=folder,
        num_speculative_tokens=config.num_speculative_tokens,
        acceptance=config.acceptance,
        has_confidence_schedule=config.confidence_schedule is not False and not is_synthetic,
        has_watchdog=config.watchdog is not False and not is_synthetic,
        synthetic_acceptance_length=config.synthetic_acceptance_length,
    )


def _check_host_tier(engine: EngineConfig) -> None:
    """Memory that is promised but not there would end a worker once it is written."""
    size = engine.kv_offloading_size
    free_gib = psutil.virtual_memory().available / 2**30
    # Of several hosts each has its workers' share.
    num_here = len(Topology.of(engine).host_ranks(engine.node_rank, engine.nnodes))
    if size is not None and size * num_here / engine.num_workers > free_gib:
        raise CapacityError(
            f"{option('kv_offloading_size')}={size:g}: more GiB than this host has free "
            f"({free_gib:.2f})"
        )


def _device(engine: EngineConfig) -> str:
    """cpu or cuda. Threads of one process share a GPU; processes have one each."""
    if engine.device == "cpu" or (engine.device == "auto" and engine.dtype == "float64"):
        return "cpu"
    num_needed = _num_gpus_here(engine)
    has_cuda = visible_gpus.torch_has_cuda()
    if engine.device == "auto":
        if has_cuda and visible_gpus.count(_GPU_CAPABILITY) >= num_needed:
            return "cuda"
        if num_gpus := visible_gpus.count():
            lacking = (
                f"{num_needed} of compute capability {_GPU_CAPABILITY} are needed"
                if has_cuda
                else "the torch that is installed is without CUDA"
            )
            _LOG.warning("on the CPU, although GPUs are visible (%d): %s", num_gpus, lacking)
        return "cpu"
    if not has_cuda:
        raise ConfigError(f"{option('device')}=cuda: the torch that is installed is without CUDA")
    num_gpus = visible_gpus.count()
    if num_gpus >= num_needed:
        return "cuda"
    raise CapacityError(
        f"{option('device')}=cuda: {num_gpus} GPUs are visible, but "
        f"{option('pipeline_parallel_size')}={engine.pipeline_parallel_size} and "
        f"{option('tensor_parallel_size')}={engine.tensor_parallel_size} take {num_needed}"
        f"{' on this host' if engine.nnodes > 1 else ''}"
    )


def _num_gpus_here(engine: EngineConfig) -> int:
    """GPUs that this host must have."""
    is_shared = engine.distributed_executor_backend == "uni"
    if engine.launcher == "ray" and engine.device == "cuda":
        # This process may have none, and those that have are found later.
        return 0
    # There it is known later who runs where; the process of a rank sees one at least.
    if is_shared or engine.launcher != "local":
        return 1
    return len(Topology.of(engine).host_ranks(engine.node_rank, engine.nnodes))


def _partition(config: ResolvedConfig) -> tuple[int, ...]:
    """Balanced for a CPU by what one request's step reads; for GPUs by the estimated time of the
    step of a busy engine, in which a stage runs its share of the requests."""
    engine, num_stages = config.engine, config.engine.pipeline_parallel_size
    if config.device == "cpu":
        draft = config.speculation.draft if config.speculation else None
        costs = estimate_layer_costs(config.model, draft, config.num_draft_tokens)
    else:
        cohort = max(1, min(_BUSY_REQUESTS, engine.max_num_seqs // num_stages))
        busy = StepShape(
            num_windows=cohort, width=1 + config.num_draft_tokens, context=_BUSY_CONTEXT
        )
        # Other kinds of GPUs have other rates, in about the same proportions.
        costs = time_layer_costs(step_costs(config, H200), busy)
    return partition(costs, num_stages, engine.pp_partition)


def _dtype(engine: EngineConfig, model: ModelConfig, device: str) -> str:
    if engine.dtype != "auto":
        return engine.dtype
    if device == "cpu":
        return "float32"
    # Nothing runs in float16: its range is too small for the residual stream. On a GPU float64
    # is not served.
    return {"float16": "bfloat16", "float64": "float32"}.get(model.dtype, model.dtype)
