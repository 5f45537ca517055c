"""What is refused of quantisation: rules of the table in `compatibility/rules.py`.

Owns those that join options of packed experts and of online quantisation with each other and
with the model.
"""

from stagecoach.compatibility.rule import Combination, Rule
from stagecoach.config.engine import EngineConfig, option, speculation_key
from stagecoach.config.quantization import has_whole_groups
from stagecoach.errors import ConfigError

_PACKED, _ONLINE = "mxfp4_experts", "online_quantization"
_PATTERNS = ("online_quantization_include", "online_quantization_exclude")


def _asks_for_packed(asked: Combination) -> bool:
    return asked.engine.mxfp4_experts == "packed"


QUANTIZATION_RULES: tuple[Rule, ...] = (
    Rule(
        name="expert-groups",
        features=("MXFP4 experts",),
        axes=frozenset({"tp"}),
        requires="the widths of an expert are whole groups of 32 on each rank, or it is decoded",
        reason="32 columns of packed weights share a scale",
        parts=lambda asked: (
            (option(_PACKED), asked.engine.mxfp4_experts),
            (option("tensor_parallel_size"), asked.engine.tensor_parallel_size),
            ("moe_intermediate_size", asked.model.expert_widths[0]),
            ("routed_expert_hidden_size or hidden_size", asked.model.expert_widths[1]),
        ),
        is_refused=lambda asked: (
            _asks_for_packed(asked)
            and asked.model.has_packed_experts
            and not has_whole_groups(*asked.model.expert_widths, asked.engine.tensor_parallel_size)
        ),
    ),
    Rule(
        name="packed-experts",
        requires="the model's config says that its experts are stored as MXFP4",
        reason="only what is stored packed stays packed",
        parts=lambda asked: (
            (option(_PACKED), asked.engine.mxfp4_experts),
            ("packed experts in quantization_config", asked.model.has_packed_experts),
        ),
        is_refused=lambda asked: _asks_for_packed(asked) and not asked.model.has_packed_experts,
    ),
    Rule(
        name="online-patterns",
        requires="something is quantised while it is loaded",
        reason="the patterns choose what",
        parts=lambda asked: (
            *((option(name), _joined(getattr(asked.engine, name))) for name in _PATTERNS),
            (option(_ONLINE), asked.engine.online_quantization),
        ),
        is_refused=lambda asked: (
            asked.engine.online_quantization == "none"
            and any(getattr(asked.engine, name) is not None for name in _PATTERNS)
        ),
    ),
    Rule(
        name="draft-online",
        requires="the target is quantised while it is loaded",
        reason="the draft follows it",
        parts=lambda asked: (
            (
                speculation_key(_ONLINE),
                asked.engine.speculative_config
                and asked.engine.speculative_config.online_quantization,
            ),
            (option(_ONLINE), asked.engine.online_quantization),
        ),
        is_refused=lambda asked: (
            asked.engine.speculative_config is not None
            and asked.engine.speculative_config.online_quantization == "follow"
            and asked.engine.online_quantization == "none"
        ),
    ),
)


def check_rows(engine: EngineConfig, device: str, dtype: str) -> None:
    """Refuse cache rows that no kernel of the device reads.

    Args:
        device: cpu or cuda, settled.
        dtype: of activations, settled.

    Raises:
        ConfigError: bfloat16 rows of the target or the draft beside other activations on a GPU.
    """
    wanted = {option("kv_cache_dtype"): engine.kv_cache_dtype}
    if engine.speculative_config is not None:
        draft_rows = engine.speculative_config.kv_cache_dtype
        wanted[speculation_key("kv_cache_dtype")] = draft_rows
    for name, rows in wanted.items():
        if (device, rows) == ("cuda", "bfloat16") and dtype != "bfloat16":
            raise ConfigError(
                f"{name}={rows} and dtype={dtype} and device={device}: refused unless rows are of "
                "the activations' type or fp8 (the kernels for GPUs read these)"
            )


def _joined(patterns: tuple[str, ...] | None) -> str:
    return ",".join(patterns or ())
