"""EngineConfig: every option of the engine, frozen, with one doc line each.

Owns the options, their own ranges, and the resolution of `auto` values. Combinations of
options are judged in `compatibility.py`. Names follow vLLM where it has the option.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagecoach.errors import ConfigError
from stagecoach.model_config import ModelConfig

# Requests without a seed put their number beside it in one 63-bit key.
MAX_ENGINE_SEED = 2**31 - 1
DTYPES = ("auto", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is started with. Resolving returns a new value; nothing writes it."""

    model: str = field(metadata={"doc": "Checkpoint folder, or `demo` or `tiny`."})
    pipeline_parallel_size: int = field(
        default=1, metadata={"doc": "Pipeline stages.", "flags": ("-pp",)}
    )
    tensor_parallel_size: int = field(
        default=1, metadata={"doc": "Tensor-parallel ranks in each stage.", "flags": ("-tp",)}
    )
    pp_partition: tuple[int, ...] | None = field(
        default=None,
        metadata={"doc": "Layers of each stage, as `5,4`. Default: balanced by estimated cost."},
    )
    dtype: str = field(
        default="auto",
        metadata={
            "doc": "Weights and activations: auto, bfloat16, float32, float64. `auto` is "
            "float32 on CPU, where bfloat16 is slower, and the checkpoint's type elsewhere."
        },
    )
    device: str = field(default="cpu", metadata={"doc": "Where the model runs: cpu."})
    max_model_len: int | None = field(
        default=None,
        metadata={"doc": "Most tokens of a request, prompt and output. Default: the model's."},
    )
    max_num_seqs: int = field(default=64, metadata={"doc": "Most requests running at once."})
    max_num_batched_tokens: int = field(
        default=2048, metadata={"doc": "Most tokens in one step plan."}
    )
    block_size: int = field(default=64, metadata={"doc": "Tokens in one page of MLA cache."})
    kv_cache_memory_bytes: int | None = field(
        default=None,
        metadata={
            "doc": "Memory of one worker for pages and state slots. Default: what the largest "
            "batch of the longest requests needs; all workers together take at most a quarter "
            "of the free memory."
        },
    )
    num_gpu_blocks_override: int | None = field(
        default=None, metadata={"doc": "Number of pages, whatever the memory says."}
    )
    seed: int = field(
        default=0, metadata={"doc": "Seed of dummy weights and of requests without a seed."}
    )
    load_format: str = field(
        default="auto",
        metadata={"doc": "auto: safetensors; dummy: seeded random weights, nothing is read."},
    )
    hf_overrides: dict[str, Any] = field(
        default_factory=dict, metadata={"doc": "JSON object whose keys replace config.json's."}
    )
    distributed_executor_backend: str = field(
        default="mp",
        metadata={
            "doc": "mp: engine loop and workers are processes; uni: everything in this process, "
            "a thread a worker, for debugging."
        },
    )
    execute_model_timeout_seconds: int = field(
        default=300,
        metadata={"doc": "A step without a result for this long ends the engine: a worker hangs."},
    )
    num_threads: int | None = field(
        default=None,
        metadata={"doc": "CPU threads of each worker. Default: all cores but one, shared out."},
    )
    log_level: str = field(
        default="info", metadata={"doc": "Least severe messages on stderr: debug to error."}
    )
    debug_poison: bool = field(
        default=False,
        metadata={"doc": "Fill free pages and slots with NaN and check the pools at each step."},
    )

    def __post_init__(self) -> None:
        _at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("block_size", self.block_size, 1)
        _at_least("execute_model_timeout_seconds", self.execute_model_timeout_seconds, 1)
        for name in (
            "max_model_len",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
            "num_threads",
        ):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.max_model_len == 1:
            raise ConfigError("--max-model-len=1: leaves no room for an output token")
        _at_least("seed", self.seed, 0)
        if self.seed > MAX_ENGINE_SEED:
            raise ConfigError(f"--seed={self.seed}: must be at most {MAX_ENGINE_SEED}")
        if not isinstance(self.debug_poison, bool):
            raise ConfigError(f"--debug-poison={self.debug_poison!r}: must be true or false")
        if not isinstance(self.hf_overrides, dict):
            raise ConfigError(f"--hf-overrides={self.hf_overrides!r}: must be a JSON object")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, ("cpu",))
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _one_of("distributed_executor_backend", self.distributed_executor_backend, ("mp", "uni"))

    @property
    def num_workers(self) -> int:
        return self.pipeline_parallel_size * self.tensor_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """An EngineConfig whose `auto` values are settled, with the model's facts beside it."""

    engine: EngineConfig
    model: ModelConfig
    checkpoint: Path
    dtype: str  # bfloat16, float32 or float64
    max_model_len: int
    partition: tuple[int, ...]  # layers of each stage


def option(name: str) -> str:
    """The command-line spelling of an EngineConfig field."""
    return "--" + name.replace("_", "-")


def field_docs() -> dict[str, str]:
    return {item.name: item.metadata.get("doc", "") for item in dataclasses.fields(EngineConfig)}


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{option(name)}={value!r}: must be an integer of at least {low}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option(name)}={value!r}: must be one of {', '.join(allowed)}")
