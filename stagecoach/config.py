"""EngineConfig: every option of the engine, frozen, with one doc line each.

Owns the options, their own ranges, and the resolution of `auto` values. Combinations of
options are judged in `compatibility.py`. Names follow vLLM where it has the option.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagecoach.draft_config import DraftConfig
from stagecoach.errors import ConfigError
from stagecoach.model_config import ModelConfig

# Requests without a seed put their number beside it in one 63-bit key.
MAX_ENGINE_SEED = 2**31 - 1
DTYPES = ("auto", "bfloat16", "float32", "float64")
DEVICES = ("auto", "cpu", "cuda")
DRAFT_METHODS = ("dspark",)
ACCEPTANCE_RULES = ("shared", "rejection")
MAX_SPECULATIVE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The keys of `--speculative-config`; names as in vLLM where it has the key."""

    model: str = field(
        metadata={"doc": "draft checkpoint folder, or `demo-draft` or `tiny-draft`; must be given"}
    )
    method: str = field(default="dspark", metadata={"doc": "how drafts are made: dspark"})
    num_speculative_tokens: int = field(
        default=7,
        metadata={"doc": f"k, the most drafts of a verify window: 1 to {MAX_SPECULATIVE_TOKENS}"},
    )
    acceptance: str = field(
        default="shared",
        metadata={
            "doc": "shared: draft and target choose with the same noise, so the tokens are those "
            "of plain decoding; rejection: only their distribution is"
        },
    )
    confidence_schedule: bool | None = field(
        default=None,
        metadata={
            "doc": "whether confidences and measured step times choose each window's length; "
            "otherwise it is k; null: yes, unless acceptance is synthetic"
        },
    )
    watchdog: bool | None = field(
        default=None,
        metadata={
            "doc": "whether drafting stops where it does not pay, with a probe from time to "
            "time; null: yes, unless acceptance is synthetic"
        },
    )
    synthetic_acceptance_length: float | None = field(
        default=None,
        metadata={
            "doc": "for benchmarks: mean tokens of a verify round whatever the target says, so "
            "the text is none of its own; 1 to k + 1; null: off"
        },
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise _speculation_error("model", self.model, "a folder or a draft's name")
        most = MAX_SPECULATIVE_TOKENS
        if not _is_number(self.num_speculative_tokens, int) or not (
            1 <= self.num_speculative_tokens <= most
        ):
            raise _speculation_error(
                "num_speculative_tokens", self.num_speculative_tokens, f"an integer in 1..{most}"
            )
        for name, allowed in (("method", DRAFT_METHODS), ("acceptance", ACCEPTANCE_RULES)):
            if getattr(self, name) not in allowed:
                raise _speculation_error(name, getattr(self, name), f"one of {', '.join(allowed)}")
        for name in ("confidence_schedule", "watchdog"):
            if not isinstance(getattr(self, name), bool | None):
                raise _speculation_error(name, getattr(self, name), "true, false or null")
        length, longest = self.synthetic_acceptance_length, self.num_speculative_tokens + 1
        # A NaN is in no range either.
        if length is not None and not (_is_number(length, int | float) and 1 <= length <= longest):
            raise _speculation_error(
                "synthetic_acceptance_length",
                length,
                f"a number in 1..{longest} (num_speculative_tokens + 1)",
            )

    @staticmethod
    def parse(values: object) -> "SpeculativeConfig":
        """From the parsed JSON object; a SpeculativeConfig is returned as it is.

        Raises:
            ConfigError: no object, an unknown key (the known ones are named), no `model`, or a
                value of the wrong type or outside its range.
        """
        if isinstance(values, SpeculativeConfig):
            return values
        flag = option("speculative_config")
        if not isinstance(values, dict):
            raise ConfigError(f"{flag}={values!r}: must be a JSON object")
        known = [item.name for item in dataclasses.fields(SpeculativeConfig)]
        for key in values:
            if key not in known:
                raise ConfigError(f"{flag}: unknown key {key!r}; known are {', '.join(known)}")
        if "model" not in values:
            raise ConfigError(f"{flag}: the key model is missing; it names the draft")
        return SpeculativeConfig(**values)


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
    device: str = field(
        default="auto",
        metadata={
            "doc": "Where the model runs: auto, cpu, cuda. `auto` is cuda where torch is built for "
            "it and there is a GPU of compute capability 9 for each worker, and cpu elsewhere and "
            "in float64."
        },
    )
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
            "batch of the longest requests and its checkpoints need; on CPU all workers together "
            "take at most a quarter of the free memory, on a GPU see --gpu-memory-utilization."
        },
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata={
            "doc": "Share of a GPU's memory for weights, graphs, activations, pages and state "
            "slots together: above 0 to 1."
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
    enforce_eager: bool = field(
        default=False,
        metadata={"doc": "Launch every kernel by itself instead of replaying CUDA graphs."},
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = field(
        default=None,
        metadata={
            "doc": "Numbers of requests for which decode steps are captured as CUDA graphs, as "
            "`1,8,64`; smaller batches are padded to the next. Default: a ladder up to "
            "--max-num-seqs."
        },
    )
    async_scheduling: bool | None = field(
        default=None,
        metadata={
            "doc": "Launch the next decode step before the tokens of the one before are back. "
            "Default: on a GPU. No effect with several stages or a draft, where steps overlap or "
            "depend on their results."
        },
    )
    num_threads: int | None = field(
        default=None,
        metadata={"doc": "CPU threads of each worker. Default: all cores but one, shared out."},
    )
    log_level: str = field(
        default="info", metadata={"doc": "Least severe messages on stderr: debug to error."}
    )
    speculative_config: SpeculativeConfig | None = field(
        default=None,
        metadata={
            "doc": "JSON object that switches speculation on and names its draft, as in "
            """'{"model": "demo-draft", "num_speculative_tokens": 7}'."""
        },
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata={"doc": "Keep pages and states of prompts and answers for requests to come."},
    )
    state_checkpoint_interval: int = field(
        default=512,
        metadata={
            "doc": "A state is kept every so many tokens, rounded up to whole pages, beside those "
            "at the ends of prompts and answers and where requests part; 0: only there."
        },
    )
    max_state_checkpoints: int | None = field(
        default=None,
        metadata={
            "doc": "State slots for checkpoints beside one for each of --max-num-seqs. Default: "
            "two a request, or fewer where memory is short."
        },
    )
    kv_offloading_size: float | None = field(
        default=None,
        metadata={
            "doc": "GiB of host memory, of all workers together, for evicted pages and "
            "checkpoints. Default: none."
        },
    )
    verify_cache: float = field(
        default=0.0,
        metadata={
            "doc": "Share of prefix hits that are computed again from scratch beside the request "
            "and compared: 0 to 1."
        },
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
        for name in ("enable_prefix_caching", "debug_poison", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{option(name)}={getattr(self, name)!r}: must be true or false")
        if not isinstance(self.async_scheduling, bool | None):
            raise ConfigError(
                f"{option('async_scheduling')}={self.async_scheduling!r}: must be true, false or "
                "null"
            )
        self._check_cache()
        self._check_device()
        if not isinstance(self.hf_overrides, dict):
            raise ConfigError(f"--hf-overrides={self.hf_overrides!r}: must be a JSON object")
        if not isinstance(self.speculative_config, SpeculativeConfig | None):
            raise ConfigError(
                f"{option('speculative_config')}={self.speculative_config!r}: must be a "
                "SpeculativeConfig; SpeculativeConfig.parse makes one of a dict"
            )
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _one_of("distributed_executor_backend", self.distributed_executor_backend, ("mp", "uni"))

    def _check_cache(self) -> None:
        _at_least("state_checkpoint_interval", self.state_checkpoint_interval, 0)
        if self.max_state_checkpoints is not None:
            _at_least("max_state_checkpoints", self.max_state_checkpoints, 0)
        size, rate = self.kv_offloading_size, self.verify_cache
        if size is not None and not (_is_number(size, int | float) and 0 < size < math.inf):
            raise ConfigError(
                f"{option('kv_offloading_size')}={size!r}: must be a number of GiB above 0"
            )
        if not (_is_number(rate, int | float) and 0 <= rate <= 1):
            raise ConfigError(f"{option('verify_cache')}={rate!r}: must be a number in 0..1")

    def _check_device(self) -> None:
        _one_of("device", self.device, DEVICES)
        share, sizes = self.gpu_memory_utilization, self.cudagraph_capture_sizes
        if not (_is_number(share, int | float) and 0 < share <= 1):
            raise ConfigError(
                f"{option('gpu_memory_utilization')}={share!r}: must be a number above 0, up to 1"
            )
        if sizes is not None and not (
            isinstance(sizes, tuple)
            and sizes
            and all(_is_number(size, int) and size > 0 for size in sizes)
        ):
            raise ConfigError(
                f"{option('cudagraph_capture_sizes')}={sizes!r}: must be a tuple of integers of "
                "at least 1"
            )

    @property
    def num_workers(self) -> int:
        return self.pipeline_parallel_size * self.tensor_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpeculation:
    """A SpeculativeConfig whose open values are settled, with the draft's facts beside it."""

    draft: DraftConfig
    checkpoint: Path
    num_speculative_tokens: int
    acceptance: str  # shared or rejection
    has_confidence_schedule: bool
    has_watchdog: bool
    synthetic_acceptance_length: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """An EngineConfig whose `auto` values are settled, with the model's facts beside it."""

    engine: EngineConfig
    model: ModelConfig
    checkpoint: Path
    dtype: str  # bfloat16, float32 or float64
    max_model_len: int
    partition: tuple[int, ...]  # layers of each stage
    speculation: ResolvedSpeculation | None = None
    device: str = "cpu"  # cpu or cuda; never auto

    @property
    def num_draft_tokens(self) -> int:
        """Most drafts of a window: k; 0 without speculation."""
        return self.speculation.num_speculative_tokens if self.speculation else 0

    @property
    def is_chaining(self) -> bool:
        """Whether windows are chained to samples in flight (`schedule/chaining.py`)."""
        if self.engine.pipeline_parallel_size > 1 or self.speculation is not None:
            return False
        is_wanted = self.engine.async_scheduling
        return self.device == "cuda" if is_wanted is None else is_wanted

    @property
    def dummy_seed(self) -> int | None:
        """Seed of random weights; None: the checkpoints are read."""
        return self.engine.seed if self.engine.load_format == "dummy" else None


def option(name: str) -> str:
    """The command-line spelling of an EngineConfig field."""
    return "--" + name.replace("_", "-")


def speculation_key(name: str) -> str:
    """How errors spell a key of `--speculative-config`."""
    return f"{option('speculative_config')} {name}"


def _speculation_error(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{speculation_key(name)}={value!r}: must be {allowed}")


def _is_number(value: object, kinds: Any) -> bool:
    """True is no 1 here."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _at_least(name: str, value: int, low: int) -> None:
    if not _is_number(value, int) or value < low:
        raise ConfigError(f"{option(name)}={value!r}: must be an integer of at least {low}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option(name)}={value!r}: must be one of {', '.join(allowed)}")
