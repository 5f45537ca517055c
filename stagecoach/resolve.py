"""From what was asked for to what will run: EngineConfig -> ResolvedConfig.

Owns the order of the steps: find the checkpoint, read its config, refuse what cannot work,
settle what was left open. Runs once, before any process starts; reads no weights.
"""

import json
from pathlib import Path

import psutil

from stagecoach import compatibility
from stagecoach.checkpoint_folder import checkpoint_folder, draft_folder
from stagecoach.compatibility import Combination
from stagecoach.config import (
    EngineConfig,
    ResolvedConfig,
    ResolvedSpeculation,
    SpeculativeConfig,
    option,
    speculation_key,
)
from stagecoach.draft_config import load_draft_config
from stagecoach.errors import CapacityError, ConfigError
from stagecoach.model_config import ModelConfig, load_model_config
from stagecoach.pipeline.partition import partition


def resolve(engine: EngineConfig) -> ResolvedConfig:
    """Settle every value that was left to the model or the machine.

    Raises:
        ConfigError: no such folder of the model or the draft, a value of its config.json that is
            not implemented, or a combination that `compatibility.py` refuses.
        CapacityError: a host tier larger than the free memory of this host.
        CheckpointError: a folder holds no readable config.json.
    """
    folder = checkpoint_folder(engine.model)
    model = _load_model(folder, engine)
    speculation = None
    if engine.speculative_config is not None:
        speculation = _resolve_speculation(engine.speculative_config)
    draft = speculation.draft if speculation else None
    compatibility.check(Combination(engine, model, draft))
    _check_host_tier(engine)
    return ResolvedConfig(
        engine=engine,
        model=model,
        checkpoint=folder,
        dtype=_dtype(engine, model),
        max_model_len=engine.max_model_len or model.max_position_embeddings,
        partition=partition(
            model,
            engine.pipeline_parallel_size,
            engine.pp_partition,
            draft,
            speculation.num_speculative_tokens if speculation else 0,
        ),
        speculation=speculation,
    )


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
    if size is not None and size > free_gib:
        raise CapacityError(
            f"{option('kv_offloading_size')}={size:g}: more GiB than this host has free "
            f"({free_gib:.2f})"
        )


def _dtype(engine: EngineConfig, model: ModelConfig) -> str:
    if engine.dtype != "auto":
        return engine.dtype
    if engine.device == "cpu":
        return "float32"
    # Nothing runs in float16: its range is too small for the residual stream.
    return "bfloat16" if model.dtype == "float16" else model.dtype
