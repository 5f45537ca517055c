"""EngineConfig: every option of the engine, frozen, with one doc line each.

Owns the options, their own ranges, and the resolution of `auto` values. Combinations of
options are judged in `compatibility/rules.py`; the keys of speculation are in `speculative.py`.
Names follow vLLM where it has the option.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagecoach.config.draft import DraftConfig
from stagecoach.config.model import ModelConfig
from stagecoach.config.option_values import at_least, is_number, one_of
from stagecoach.config.option_values import option as option  # how all name an option
from stagecoach.config.quantization import (
    NO_QUANTIZATION,
    ONLINE_METHODS,
    NamePatterns,
    QuantizationChoice,
    has_whole_groups,
)
from stagecoach.config.speculative import SpeculativeConfig as SpeculativeConfig
from stagecoach.config.speculative import speculation_key as speculation_key
from stagecoach.errors import ConfigError

# Requests without a seed put their number beside it in one 63-bit key.
MAX_ENGINE_SEED = 2**31 - 1
DTYPES = ("auto", "bfloat16", "float32", "float64")
DEVICES = ("auto", "cpu", "cuda")
CACHE_DTYPES = ("auto", "bfloat16", "fp8")
PACKED_MODES = ("auto", "packed", "decoded")
LAUNCHERS = ("local", "torchrun", "ray")
_MAX_PORT = 65535


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
    mxfp4_experts: str = field(
        default="auto",
        metadata={
            "doc": "Experts that are stored as MXFP4: packed, as they are; decoded, to --dtype "
            "when they are loaded, four times as large or more; auto: packed on a GPU, where "
            "they are faster so; decoded on a CPU."
        },
    )
    online_quantization: str = field(
        default="none",
        metadata={
            "doc": "Quantise linear layers while they are loaded: none; ptpc_fp8: E4M3 with a "
            "factor for each output channel, inputs with one for each token."
        },
    )
    online_quantization_include: tuple[str, ...] | None = field(
        default=None,
        metadata={
            "doc": "Patterns of tensor names that are quantised, with commas between, as "
            "`*.self_attn.*,*.mlp.*`. Default: all that may be."
        },
    )
    online_quantization_exclude: tuple[str, ...] | None = field(
        default=None,
        metadata={
            "doc": "Patterns of tensor names that are not, in place of the default: routed "
            "experts, their latent projections and the narrow projections of gates."
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={
            "doc": "Rows of the MLA cache: auto, that of activations; bfloat16; fp8, E4M3 without "
            "a factor."
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
    launcher: str = field(
        default="local",
        metadata={
            "doc": "Who starts the workers. local: this command, which runs once on each of "
            "--nnodes hosts; torchrun: torchrun or whatever sets RANK, WORLD_SIZE and MASTER_ADDR "
            "runs this command for every rank; ray: actors on the nodes of a Ray cluster."
        },
    )
    nnodes: int = field(
        default=1,
        metadata={
            "doc": "Hosts. Each runs the same command with a --node-rank of its own and holds "
            "whole stages; the first serves, the others end with it."
        },
    )
    node_rank: int = field(
        default=0, metadata={"doc": "Which of the --nnodes hosts this is, from 0."}
    )
    master_addr: str = field(
        default="127.0.0.1",
        metadata={"doc": "Address of the host with --node-rank 0, where it waits for the others."},
    )
    master_port: int = field(
        default=29501, metadata={"doc": "Port of --master-addr where the hosts meet."}
    )
    network_interface: str | None = field(
        default=None,
        metadata={
            "doc": "Network interface of this host that carries plans and tensors to other hosts. "
            "Default: the one on the way to --master-addr."
        },
    )
    host_key_file: str | None = field(
        default=None,
        metadata={
            "doc": "File with a secret that all hosts of an engine share; who cannot prove to have "
            "it is sent away at --master-port. Default: whoever reaches that port can ask to join."
        },
    )
    distributed_timeout_seconds: int = field(
        default=600,
        metadata={"doc": "How long hosts and workers may take to find each other at the start."},
    )
    execute_model_timeout_seconds: int = field(
        default=300,
        metadata={
            "doc": "A step without a result for this long ends the engine: a worker hangs. With "
            "--recover, workers that hang are started anew instead."
        },
    )
    recover: bool = field(
        default=False,
        metadata={
            "doc": "When a worker ends or hangs, start it anew and go on: running requests are "
            "computed again from their tokens. Otherwise the engine ends."
        },
    )
    max_recoveries: int = field(
        default=3,
        metadata={"doc": "With --recover: one more within the window below ends the engine."},
    )
    recovery_window_seconds: int = field(
        default=600, metadata={"doc": "Time in which --max-recoveries are allowed."}
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
        at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        at_least("block_size", self.block_size, 1)
        at_least("execute_model_timeout_seconds", self.execute_model_timeout_seconds, 1)
        self._check_hosts()
        for name in (
            "max_model_len",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
            "num_threads",
        ):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.max_model_len == 1:
            raise ConfigError("--max-model-len=1: leaves no room for an output token")
        at_least("seed", self.seed, 0)
        if self.seed > MAX_ENGINE_SEED:
            raise ConfigError(f"--seed={self.seed}: must be at most {MAX_ENGINE_SEED}")
        at_least("max_recoveries", self.max_recoveries, 1)
        at_least("recovery_window_seconds", self.recovery_window_seconds, 1)
        for name in ("enable_prefix_caching", "debug_poison", "enforce_eager", "recover"):
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
        one_of("dtype", self.dtype, DTYPES)
        self._check_quantization()
        one_of("load_format", self.load_format, ("auto", "dummy"))
        one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        one_of("distributed_executor_backend", self.distributed_executor_backend, ("mp", "uni"))

    def _check_hosts(self) -> None:
        one_of("launcher", self.launcher, LAUNCHERS)
        at_least("nnodes", self.nnodes, 1)
        at_least("node_rank", self.node_rank, 0)
        at_least("master_port", self.master_port, 1)
        if self.master_port > _MAX_PORT:
            raise ConfigError(f"--master-port={self.master_port}: must be at most {_MAX_PORT}")
        at_least("distributed_timeout_seconds", self.distributed_timeout_seconds, 1)

    def _check_cache(self) -> None:
        at_least("state_checkpoint_interval", self.state_checkpoint_interval, 0)
        if self.max_state_checkpoints is not None:
            at_least("max_state_checkpoints", self.max_state_checkpoints, 0)
        size, rate = self.kv_offloading_size, self.verify_cache
        if size is not None and not (is_number(size, int | float) and 0 < size < math.inf):
            raise ConfigError(
                f"{option('kv_offloading_size')}={size!r}: must be a number of GiB above 0"
            )
        if not (is_number(rate, int | float) and 0 <= rate <= 1):
            raise ConfigError(f"{option('verify_cache')}={rate!r}: must be a number in 0..1")

    def _check_quantization(self) -> None:
        one_of("mxfp4_experts", self.mxfp4_experts, PACKED_MODES)
        one_of("online_quantization", self.online_quantization, ONLINE_METHODS)
        one_of("kv_cache_dtype", self.kv_cache_dtype, CACHE_DTYPES)
        for name in ("online_quantization_include", "online_quantization_exclude"):
            patterns = getattr(self, name)
            if patterns is not None and not (
                isinstance(patterns, tuple)
                and patterns
                and all(isinstance(pattern, str) and pattern for pattern in patterns)
            ):
                raise ConfigError(f"{option(name)}={patterns!r}: must be a tuple of patterns")

    def _check_device(self) -> None:
        one_of("device", self.device, DEVICES)
        share, sizes = self.gpu_memory_utilization, self.cudagraph_capture_sizes
        if not (is_number(share, int | float) and 0 < share <= 1):
            raise ConfigError(
                f"{option('gpu_memory_utilization')}={share!r}: must be a number above 0, up to 1"
            )
        if sizes is not None and not (
            isinstance(sizes, tuple)
            and sizes
            and all(is_number(size, int) and size > 0 for size in sizes)
        ):
            raise ConfigError(
                f"{option('cudagraph_capture_sizes')}={sizes!r}: must be a tuple of integers of "
                "at least 1"
            )

    @property
    def num_workers(self) -> int:
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def fp8_patterns(self) -> NamePatterns | None:
        """Which matrices become E4M3; None: none does."""
        if self.online_quantization == "none":
            return None
        patterns = NamePatterns()
        return NamePatterns(
            self.online_quantization_include or patterns.include,
            self.online_quantization_exclude or patterns.exclude,
        )


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
    def quantization(self) -> QuantizationChoice:
        """How the target's weights lie in memory."""
        mode, tp_size = self.engine.mxfp4_experts, self.engine.tensor_parallel_size
        is_whole = has_whole_groups(*self.model.expert_widths, tp_size)
        is_kept = self.device == "cuda" and is_whole
        return QuantizationChoice(
            keeps_packed=is_kept if mode == "auto" else mode == "packed",
            fp8=self.engine.fp8_patterns,
        )

    @property
    def draft_quantization(self) -> QuantizationChoice:
        """How the draft's weights lie in memory."""
        speculative = self.engine.speculative_config
        if speculative is None or speculative.online_quantization == "none":
            return NO_QUANTIZATION
        return QuantizationChoice(fp8=self.engine.fp8_patterns)

    @property
    def cache_dtype(self) -> str | None:
        """Of MLA cache rows: bfloat16 or fp8; None: that of activations."""
        wanted = self.engine.kv_cache_dtype
        return None if wanted == "auto" else wanted

    @property
    def draft_cache_dtype(self) -> str | None:
        """Of the draft's context rows, in the same words."""
        speculative = self.engine.speculative_config
        wanted = "auto" if speculative is None else speculative.kv_cache_dtype
        return None if wanted == "auto" else wanted

    @property
    def dummy_seed(self) -> int | None:
        """Seed of random weights; None: the checkpoints are read."""
        return self.engine.seed if self.engine.load_format == "dummy" else None
