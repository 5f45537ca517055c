"""Which sizes tensor parallelism divides, and whether a number of ranks divides them.

Pure functions of the model's configuration, without torch: the engine refuses a number of
ranks before any worker starts, and the modules take their local sizes from here.
"""

from stagecoach.errors import ConfigError
from stagecoach.model_config import LayerKind, ModelConfig


def check_tensor_parallel(config: ModelConfig, tp_size: int) -> None:
    """Refuse a number of ranks that does not divide the heads and the MLP widths.

    The vocabulary need not divide: its last shard is padded.

    Raises:
        ConfigError: names the config.json key, its value and --tensor-parallel-size.
    """
    if LayerKind.KDA in config.layer_kinds:
        local_size("linear_attn_config.num_heads", config.kda.num_heads, tp_size)
    if LayerKind.MLA in config.layer_kinds:
        local_size("num_attention_heads", config.mla.num_heads, tp_size)
    if not all(config.is_moe_layer):
        local_size("intermediate_size", config.dense_intermediate_size, tp_size)
    if config.moe is not None and any(config.is_moe_layer):
        local_size("moe_intermediate_size", config.moe.intermediate_size, tp_size)


def local_size(key: str, value: int, tp_size: int) -> int:
    """One rank's share of `value`.

    Raises:
        ConfigError: `tp_size` does not divide it; `key` is its name in config.json.
    """
    if value % tp_size:
        raise ConfigError(
            f"config.json: {key}={value} is not divisible by --tensor-parallel-size={tp_size}"
        )
    return value // tp_size


def vocab_shard_size(vocab_size: int, tp_size: int) -> int:
    """Vocabulary rows of each rank; the last rank's may reach beyond the vocabulary."""
    return -(-vocab_size // tp_size)
