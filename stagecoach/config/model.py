"""What a checkpoint's `config.json` says, checked and under our names.

Owns the mapping from published keys (reference: Kimi-K3 `text_config`, Kimi-Linear
`config.json`) to architecture facts. Knows no tensor and no rank: `schedule/`, `pipeline/`
and `model/` all read it. The two families differ only in the values below, never in a
subclass.
"""

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from stagecoach.config.keys import ConfigKeys
from stagecoach.config.quantization import has_packed_experts, refuse_other_files
from stagecoach.errors import CheckpointError, ConfigError
from stagecoach.json_file import read_json_object

_DTYPES = ("bfloat16", "float16", "float32")


class LayerKind(Enum):
    """Which attention a decoder layer has."""

    KDA = "kda"
    MLA = "mla"


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaConfig:
    """Gated delta rule linear attention (Kimi Linear, arXiv 2510.26692, §3)."""

    num_heads: int
    head_dim: int  # keys and values have the same width
    conv_kernel_size: int
    gate_lower_bound: float | None  # None: the softplus decay of Kimi-Linear
    has_full_rank_gate: bool  # one g_proj; otherwise g_a_proj and g_b_proj

    @property
    def num_conv_rows(self) -> int:
        """Pre-convolution rows that a request keeps between steps."""
        return self.conv_kernel_size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention without positions (NoPE)."""

    num_heads: int
    q_lora_rank: int | None  # None: one full-rank q_proj
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # present in the checkpoint, never rotated
    v_head_dim: int
    has_output_gate: bool
    latent_norm_eps: float  # 1e-6, the class default of the published code, not rms_norm_eps

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_row_width(self) -> int:
        """Values cached per token and layer: the normed latent, then k_pe."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.qk_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed experts and the shared MLP beside them."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one routed expert
    shared_intermediate_size: int  # all shared experts fused; 0 without any
    latent_size: int | None  # width of the routed experts; None: hidden_size
    has_latent_norm: bool  # RMSNorm on the complete routed sum
    score_function: str  # "sigmoid" or "softmax"
    renormalize: bool
    routed_scaling_factor: float
    num_expert_groups: int
    topk_group: int


@dataclass(frozen=True, slots=True)
class Taps:
    """Outputs of target layers that a drafter reads.

    A tap's id is the decoder layer whose output it is; -1 is the embedding.
    """

    layers: tuple[int, ...]  # ascending, without repeats
    # False: the running sum of the open block right after the layer. True: the attention
    # residual mixture that the next reader (layer + 1, or the final norm) reads, before its norm.
    are_mixtures: bool = False

    def __post_init__(self) -> None:
        assert list(self.layers) == sorted(set(self.layers)), f"taps out of order: {self}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of one decoder-only text model."""

    model_type: str  # "kimi_k3" or "kimi_linear"
    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]  # one a decoder layer, 0-based
    is_moe_layer: tuple[bool, ...]
    dense_intermediate_size: int
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig | None  # None: every layer is dense
    activation: str  # "situ" or "silu"
    situ_beta: float
    situ_linear_beta: float | None
    rms_norm_eps: float
    attn_res_block_size: int | None  # None: a plain residual stream
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    eos_token_ids: tuple[int, ...]
    tensor_prefix: str  # "language_model." for Kimi-K3, "" for Kimi-Linear
    has_packed_experts: bool = False  # its config says that routed experts are stored as MXFP4

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def expert_widths(self) -> tuple[int, int]:
        """What a routed expert computes in between, and what it reads; zeros without any."""
        if self.moe is None:
            return 0, 0
        return self.moe.intermediate_size, self.moe.latent_size or self.hidden_size

    def num_closed_blocks(self, layer: int) -> int:
        """Blocks in the residual bank before decoder layer `layer` runs: ceil(layer / block)."""
        if self.attn_res_block_size is None:
            return 0
        return -(-layer // self.attn_res_block_size)


def load_model_config(folder: Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Read `folder/config.json`.

    Args:
        folder: checkpoint folder.
        overrides: keys that replace those of the file (`--hf-overrides`); a nested dict
            replaces key by key.

    Raises:
        CheckpointError: no readable config.json.
        ConfigError: a key is missing or has a value that this engine does not implement.
    """
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder}: no config.json")
    other = folder / "hf_quant_config.json"
    if other.exists():
        refuse_other_files(other.name, read_json_object(other))
    merged = _apply_overrides(read_json_object(path), overrides or {})
    return parse_model_config(merged, _generation_eos(folder))


def parse_model_config(root: dict[str, Any], generation_eos: Any = None) -> ModelConfig:
    """Turn a parsed `config.json` into a ModelConfig; errors as in `load_model_config`.

    Args:
        root: the whole object of the file.
        generation_eos: `eos_token_id` of generation_config.json; its tokens end a text too.
    """
    model_type = root.get("model_type")
    if model_type == "kimi_k3":
        text = root.get("text_config")
        if not isinstance(text, dict):
            raise ConfigError("config.json: model_type kimi_k3 needs a text_config object")
        prefix = "language_model."
    elif model_type == "kimi_linear":
        text, prefix = root, ""
    else:
        raise ConfigError(
            f"config.json: model_type={model_type!r} is not supported (kimi_k3, kimi_linear)"
        )
    keys = ConfigKeys(text)
    num_layers = keys.size("num_hidden_layers")
    linear = keys.section("linear_attn_config")
    mla_layers, kda_layers = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    _check_layer_lists(mla_layers, kda_layers, num_layers)
    # The published lists count from 1.
    kinds = tuple(
        LayerKind.KDA if layer + 1 in kda_layers else LayerKind.MLA for layer in range(num_layers)
    )
    _check_fixed_values(keys)
    activation = keys.choice("hidden_act", ("situ", "silu"), default="silu")
    moe = _parse_moe(keys)
    first_moe, frequency = (
        keys.integer("first_k_dense_replace", 0),
        keys.size("moe_layer_freq", 1),
    )
    vocab_size = keys.size("vocab_size")
    eos = root.get("eos_token_id", text.get("eos_token_id"))
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=keys.size("hidden_size"),
        layer_kinds=kinds,
        is_moe_layer=tuple(
            moe is not None and layer >= first_moe and layer % frequency == 0
            for layer in range(num_layers)
        ),
        dense_intermediate_size=keys.size("intermediate_size"),
        kda=KdaConfig(
            num_heads=linear.size("num_heads"),
            head_dim=linear.size("head_dim"),
            conv_kernel_size=linear.size("short_conv_kernel_size"),
            gate_lower_bound=_parse_lower_bound(linear),
            has_full_rank_gate=linear.flag("use_full_rank_gate", default=False),
        ),
        mla=MlaConfig(
            num_heads=keys.size("num_attention_heads"),
            q_lora_rank=keys.size_or_none("q_lora_rank"),
            kv_lora_rank=keys.size("kv_lora_rank"),
            qk_nope_head_dim=keys.size("qk_nope_head_dim"),
            qk_rope_head_dim=keys.size("qk_rope_head_dim"),
            v_head_dim=keys.size("v_head_dim"),
            has_output_gate=keys.flag("mla_use_output_gate", default=False),
            latent_norm_eps=1e-6,
        ),
        moe=moe,
        activation=activation,
        situ_beta=_number_or(keys.positive("activation_situ_beta"), 1.0),
        situ_linear_beta=keys.positive("activation_situ_linear_beta"),
        rms_norm_eps=_number_or(keys.positive("rms_norm_eps"), 1e-5),
        attn_res_block_size=keys.size_or_none("attn_res_block_size"),
        max_position_embeddings=(
            keys.size_or_none("max_position_embeddings")
            or keys.size_or_none("model_max_length")
            or 1048576
        ),
        tie_word_embeddings=keys.flag(
            "tie_word_embeddings",
            default=ConfigKeys(root).flag("tie_word_embeddings", default=False),
        ),
        dtype=_checkpoint_dtype(root, text),
        eos_token_ids=tuple(
            dict.fromkeys(
                (
                    *_as_token_ids("config.json", eos, vocab_size),
                    *_as_token_ids("generation_config.json", generation_eos, vocab_size),
                )
            )
        ),
        tensor_prefix=prefix,
        has_packed_experts=_has_packed_experts(root, keys),
    )


def _parse_lower_bound(linear: ConfigKeys) -> float | None:
    bound = linear.number("gate_lower_bound", None)
    if bound is not None and bound >= 0:
        raise ConfigError(
            f"config.json: linear_attn_config.gate_lower_bound={bound:g} must be negative"
        )
    return bound


def _parse_moe(keys: ConfigKeys) -> MoeConfig | None:
    num_experts = keys.size_or_none("num_experts")
    if num_experts is None:
        return None
    intermediate = keys.size("moe_intermediate_size")
    num_experts_per_token = keys.integer("num_experts_per_token")
    if not 0 < num_experts_per_token <= num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_token={num_experts_per_token} must lie in "
            f"1..num_experts={num_experts}"
        )
    num_groups = keys.size_or_none("num_expert_group") or 1
    topk_group = keys.size_or_none("topk_group") or 1
    if num_experts % num_groups or topk_group > num_groups:
        raise ConfigError(
            f"config.json: num_expert_group={num_groups} must divide num_experts={num_experts} "
            f"and be at least topk_group={topk_group}"
        )
    if num_groups > 1 and not keys.flag("use_grouped_topk", default=True):
        raise ConfigError(
            f"config.json: use_grouped_topk=false with num_expert_group={num_groups} is not "
            "supported"
        )
    if num_experts_per_token > topk_group * (num_experts // num_groups):
        raise ConfigError(
            f"config.json: num_experts_per_token={num_experts_per_token} experts are not in "
            f"topk_group={topk_group} of num_expert_group={num_groups} groups"
        )
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        intermediate_size=intermediate,
        shared_intermediate_size=intermediate * (keys.size_or_none("num_shared_experts") or 0),
        latent_size=keys.size_or_none("routed_expert_hidden_size"),
        has_latent_norm=keys.flag("latent_moe_use_norm", default=False),
        score_function=keys.choice(
            "moe_router_activation_func", ("sigmoid", "softmax"), default="sigmoid"
        ),
        renormalize=keys.flag("moe_renormalize", default=True),
        routed_scaling_factor=_number_or(keys.number("routed_scaling_factor", None), 1.0),
        num_expert_groups=num_groups,
        topk_group=topk_group,
    )


def _check_layer_lists(
    mla_layers: frozenset[int], kda_layers: frozenset[int], num_layers: int
) -> None:
    layers = frozenset(range(1, num_layers + 1))
    twice = mla_layers & kda_layers
    listed = mla_layers | kda_layers
    if twice or listed != layers:
        raise ConfigError(
            "config.json: linear_attn_config.full_attn_layers and kda_layers must share out "
            f"1..num_hidden_layers={num_layers}; listed twice: {sorted(twice)}, missing: "
            f"{sorted(layers - listed)}, outside: {sorted(listed - layers)}"
        )


def _check_fixed_values(keys: ConfigKeys) -> None:
    if keys.get("mla_use_nope", True) is not True:
        raise ConfigError("config.json: mla_use_nope=false is not supported (MLA has no positions)")
    keys.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    num_heads = keys.get("num_attention_heads")
    if (keys.get("num_key_value_heads") or num_heads) != num_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads={keys.get('num_key_value_heads')} must equal "
            f"num_attention_heads={num_heads}"
        )
    if keys.get("num_nextn_predict_layers", 0):
        raise ConfigError(
            f"config.json: num_nextn_predict_layers={keys.get('num_nextn_predict_layers')} "
            "is not supported (MTP layers belong to a checkpoint of their own)"
        )


def _has_packed_experts(root: dict[str, Any], keys: ConfigKeys) -> bool:
    """The key is in the text model's object, or at the root in checkpoints of other makers."""
    at_root = has_packed_experts(ConfigKeys(root))
    return has_packed_experts(keys) or at_root


def _checkpoint_dtype(root: dict[str, Any], text: dict[str, Any]) -> str:
    for source in (root, text):
        for key in ("dtype", "torch_dtype"):
            if source.get(key):
                dtype = str(source[key]).removeprefix("torch.")
                if dtype not in _DTYPES:
                    raise ConfigError(
                        f"config.json: {key}={dtype!r} is not supported ({', '.join(_DTYPES)})"
                    )
                return dtype
    return "bfloat16"


def _number_or(value: float | None, default: float) -> float:
    return default if value is None else value


def _as_token_ids(file_name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """`eos_token_id` of a file: absent, one token or a list."""
    token_ids = () if value is None else value if isinstance(value, list) else (value,)
    for token_id in token_ids:
        is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_integer or not 0 <= token_id < vocab_size:
            raise ConfigError(
                f"{file_name}: eos_token_id={token_id!r} is no token id in 0..{vocab_size - 1}"
            )
    return tuple(token_ids)


def _generation_eos(folder: Path) -> Any:
    path = folder / "generation_config.json"
    return read_json_object(path).get("eos_token_id") if path.exists() else None


# Keys that a config.json may leave out.
_OPTIONAL_KEYS = frozenset(
    [
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "attn_res_block_size",
        "dtype",
        "eos_token_id",
        "first_k_dense_replace",
        "hidden_act",
        "latent_moe_use_norm",
        "max_position_embeddings",
        "mla_use_nope",
        "mla_use_output_gate",
        "moe_layer_freq",
        "moe_renormalize",
        "moe_router_activation_func",
        "num_expert_group",
        "num_experts",
        "num_nextn_predict_layers",
        "num_shared_experts",
        "q_lora_rank",
        "rms_norm_eps",
        "routed_expert_hidden_size",
        "routed_scaling_factor",
        "tie_word_embeddings",
        "topk_group",
        "topk_method",
        "torch_dtype",
    ]
)


def _apply_overrides(root: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides go where config.json has the key: at its root, or in its text_config."""
    text = root.get("text_config")
    for key, value in overrides.items():
        if key not in root and key not in (text or {}) and key not in _OPTIONAL_KEYS:
            raise ConfigError(f"config.json has no key {key!r} to override")
        is_nested = isinstance(text, dict) and key not in root
        root = _merge(root, {"text_config": {key: value}} if is_nested else {key: value})
    return root


def _merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged
