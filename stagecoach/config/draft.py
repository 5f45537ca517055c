"""What a draft checkpoint's `config.json` says, checked and under our names.

Owns the mapping from published keys (DSpark drafts for Kimi-K3: `k3_dspark` with MLA, and the
GQA form on Qwen3 layers) to facts of the architecture. Knows no tensor and no rank: `resolve`,
`pipeline/`, `draft/` and `schedule/` read it. What joins a draft and its target is the
business of `compatibility/rules.py`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagecoach.config.keys import ConfigKeys
from stagecoach.config.model import Taps
from stagecoach.errors import CheckpointError, ConfigError
from stagecoach.json_file import read_json_object

_MLA_ARCHITECTURES = ("K3DSparkModel",)
_GQA_ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")

# Keys, also of `dflash_config`, whose parts no code here implements, and the harmless values.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_sink_bias": (False,),
    "compression_config": (),
    "dspark_bonus_anchor": (False,),
    "dspark_draft_topk": (0,),
    "final_logit_softcapping": (),
    "hidden_act": ("silu",),
    "is_neox_style": (True,),
    "logit_scale": (1,),
    "markov_head_type": ("vanilla",),
    "mla_use_output_gate": (False,),
    "mla_use_qk_norm": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "sample_from_anchor": (True,),
    "transformer_layer_config": (),
    "use_sliding_window": (False,),
    "use_swa": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions of the draft; YaRN where `yarn_factor` is set (arXiv 2309.00071)."""

    theta: float
    yarn_factor: float | None = None
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines, so of every rotated value."""
        return self._growth(self.mscale) / self.attention_magnitude

    @property
    def attention_magnitude(self) -> float:
        """Factor of queries and of keys that MLA puts into its softmax scale instead."""
        return self._growth(self.mscale_all_dim)

    def _growth(self, mscale: float) -> float:
        if self.yarn_factor is None or self.yarn_factor <= 1:
            return 1.0
        return 0.1 * mscale * math.log(self.yarn_factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMlaConfig:
    """Latent attention of a draft layer: rotated pe parts, no output gate."""

    num_heads: int
    q_lora_rank: int | None  # None: one full-rank q_proj
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotated_width(self) -> int:
        """Values of a head's query, and of a key, that rotary positions turn."""
        return self.qk_rope_head_dim

    @property
    def cache_row_width(self) -> int:
        """Values cached per token and layer: the normed latent, then the rotated pe."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def softmax_scale(self, rope: RopeConfig | None) -> float:
        """1 / sqrt(d), times YaRN's factor once for queries and once for keys."""
        magnitude = rope.attention_magnitude if rope else 1.0
        return magnitude * magnitude / math.sqrt(self.qk_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGqaConfig:
    """Grouped-query attention of a draft layer, with a norm on each head's query and key."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def rotated_width(self) -> int:
        """Values of a head's query, and of a key, that rotary positions turn."""
        return self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Architecture of one DSpark draft."""

    taps: Taps
    hidden_size: int  # also the target's
    vocab_size: int  # also the target's
    num_layers: int
    attention: DraftMlaConfig | DraftGqaConfig
    rope: RopeConfig | None  # None: no positions
    is_causal: bool  # whether a block's token is blind to the block's later ones
    intermediate_size: int
    rms_norm_eps: float
    has_tap_norms: bool  # `fc_norm`: each tap is normed before the projection
    markov_rank: int
    has_confidence_head: bool
    confidence_reads_markov: bool
    # Calibration of the confidence of each place in the block; empty: none is known.
    confidence_temperatures: tuple[float, ...]
    mask_token_id: int
    block_length: int | None  # tokens that one pass proposes, where the file says; else k decides

    def cache_row_width(self, tp_size: int) -> int:
        """Values of one draft layer's context row on one rank."""
        if isinstance(self.attention, DraftMlaConfig):
            return self.attention.cache_row_width
        return 2 * self.attention.num_kv_heads // tp_size * self.attention.head_dim


def load_draft_config(folder: Path) -> DraftConfig:
    """Read `folder/config.json` of a draft.

    Raises:
        CheckpointError: no readable config.json.
        ConfigError: a key is missing or has a value that this engine does not implement.
    """
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder}: no config.json")
    return parse_draft_config(read_json_object(path))


def parse_draft_config(root: dict[str, Any]) -> DraftConfig:
    """Turn a parsed `config.json` into a DraftConfig; errors as in `load_draft_config`.

    Keys of DSpark's own are read at the root, in `dflash_config`, or with `dspark_` before
    them, as published drafts and the engines that rename them have it.
    """
    is_mla = _is_mla(root)
    nested = root.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ConfigError(f"config.json: dflash_config={nested!r} must be an object")
    _check_unsupported(root, nested)
    keys = ConfigKeys(root | _own_keys(root, nested))
    hidden_size, vocab_size = keys.size("hidden_size"), keys.size("vocab_size")
    _check_equal(keys, "target_hidden_size", "hidden_size", hidden_size)
    _check_equal(keys, "draft_vocab_size", "vocab_size", vocab_size)
    has_confidence_head = keys.flag("enable_confidence_head", default=False)
    mask_token_id = keys.integer("mask_token_id")
    if mask_token_id >= vocab_size:
        raise ConfigError(
            f"config.json: mask_token_id={mask_token_id} is no token id in 0..{vocab_size - 1}"
        )
    return DraftConfig(
        taps=_parse_taps(keys, is_mla=is_mla),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_layers=keys.size("num_hidden_layers"),
        attention=_parse_mla(keys) if is_mla else _parse_gqa(keys, hidden_size),
        rope=_parse_rope(keys),
        is_causal=keys.flag("is_causal", default=keys.flag("causal", default=False)),
        intermediate_size=keys.size("intermediate_size"),
        rms_norm_eps=keys.positive("rms_norm_eps") or 1e-5,
        has_tap_norms=keys.flag("fc_norm", default=False),
        markov_rank=keys.size("markov_rank"),
        has_confidence_head=has_confidence_head,
        confidence_reads_markov=keys.flag("confidence_head_with_markov", default=True),
        confidence_temperatures=_parse_temperatures(keys, has_head=has_confidence_head),
        mask_token_id=mask_token_id,
        block_length=keys.size_or_none("block_size"),
    )


def _is_mla(root: dict[str, Any]) -> bool:
    model_type, architectures = root.get("model_type"), root.get("architectures") or []
    named = set(architectures) if isinstance(architectures, list) else {str(architectures)}
    if model_type == "k3_dspark" and named <= set(_MLA_ARCHITECTURES):
        return True
    if model_type == "qwen3" and named and named <= set(_GQA_ARCHITECTURES):
        return False
    raise ConfigError(
        f"config.json: model_type={model_type!r} with architectures={architectures!r} is no draft "
        f"that this engine knows (k3_dspark with {', '.join(_MLA_ARCHITECTURES)}; qwen3 with "
        f"{' or '.join(_GQA_ARCHITECTURES)})"
    )


# Our name of each key that may stand in several places, and its other spellings.
_OWN_KEYS = {
    "aux_hidden_stream": (),
    "block_size": ("dspark_block_size",),
    "causal": (),
    "confidence_head_with_markov": (),
    "enable_confidence_head": ("use_confidence_head",),
    "fc_norm": (),
    "is_causal": (),
    "markov_rank": ("dspark_markov_rank",),
    "mask_token_id": ("dspark_noise_token_id",),
    "target_layer_ids": ("dspark_target_layer_ids", "layer_ids"),
}


def _own_keys(root: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """Values of DSpark's own keys from wherever they stand; places must not disagree."""
    found: dict[str, Any] = {}
    for key, spellings in _OWN_KEYS.items():
        given = {
            f"{place}{name}": values[name]
            for place, values in (("", root), ("dflash_config.", nested))
            for name in (key, *spellings)
            if values.get(name) is not None
        }
        if not given:
            continue
        first, *others = given.values()
        if any(other != first for other in others):
            listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ConfigError(f"config.json: {listed} disagree")
        found[key] = first
    return found


def _check_unsupported(root: dict[str, Any], nested: dict[str, Any]) -> None:
    for place, values in (("", root), ("dflash_config.", nested)):
        for key, harmless in _UNSUPPORTED.items():
            value = values.get(key)
            if value is not None and value not in harmless:
                raise ConfigError(f"config.json: {place}{key}={value!r} is not supported")
    layer_types = root.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise ConfigError(
            f"config.json: layer_types={layer_types!r} is not supported (full_attention)"
        )


def _check_equal(keys: ConfigKeys, key: str, other: str, expected: int) -> None:
    value = keys.size_or_none(key)
    if value is not None and value != expected:
        raise ConfigError(
            f"config.json: {key}={value} with {other}={expected} is not supported: they must be "
            "equal"
        )


def _parse_taps(keys: ConfigKeys, *, is_mla: bool) -> Taps:
    layers = keys.get("target_layer_ids")
    is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not is_list or not layers:
        raise ConfigError(
            f"config.json: target_layer_ids={layers!r} must be a list of layer numbers"
        )
    if len(set(layers)) < len(layers) or min(layers) < -1:
        raise ConfigError(
            f"config.json: target_layer_ids={layers} must be different layers, or -1 for the "
            "embedding"
        )
    # The GQA form gives the depth of the target by this key.
    if is_mla:
        _check_equal(keys, "num_target_layers", "taps in target_layer_ids", len(layers))
    # Where the key is missing: the MLA drafts were trained on running sums, the GQA ones on
    # mixtures. The wrong one loads as well and is hardly ever accepted.
    stream = keys.choice(
        "aux_hidden_stream", ("prefix", "attn_res"), default="prefix" if is_mla else "attn_res"
    )
    return Taps(tuple(sorted(layers)), are_mixtures=stream == "attn_res")


def _parse_mla(keys: ConfigKeys) -> DraftMlaConfig:
    num_heads = keys.size("num_attention_heads")
    _check_equal(keys, "num_key_value_heads", "num_attention_heads", num_heads)
    rope_dim = keys.size("qk_rope_head_dim")
    if rope_dim % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim={rope_dim} must be even")
    return DraftMlaConfig(
        num_heads=num_heads,
        q_lora_rank=keys.size_or_none("q_lora_rank"),
        kv_lora_rank=keys.size("kv_lora_rank"),
        qk_nope_head_dim=keys.size("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=keys.size("v_head_dim"),
    )


def _parse_gqa(keys: ConfigKeys, hidden_size: int) -> DraftGqaConfig:
    num_heads = keys.size("num_attention_heads")
    num_kv_heads = keys.size("num_key_value_heads")
    head_dim = keys.size("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads={num_kv_heads} must divide "
            f"num_attention_heads={num_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim={head_dim} must be even")
    return DraftGqaConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _parse_rope(keys: ConfigKeys) -> RopeConfig | None:
    if keys.flag("mla_use_nope", default=False):
        return None
    name = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    rope = keys.section(name) if keys.get(name) else ConfigKeys({})
    theta = rope.positive("rope_theta") or keys.positive("rope_theta")
    if theta is None:
        raise ConfigError("config.json: rope_theta is missing")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("yarn", "deepseek_yarn"):
        raise ConfigError(
            f"config.json: {name}.rope_type={kind!r} is not supported (default, yarn)"
        )
    for key, harmless in (("attention_factor", None), ("attn_factor", 1), ("truncate", True)):
        if rope.get(key, harmless) != harmless:
            raise ConfigError(f"config.json: {name}.{key}={rope.get(key)!r} is not supported")
    factor = rope.positive("factor")
    if factor is None:
        raise ConfigError(f"config.json: {name}.factor is missing")
    return RopeConfig(
        theta=theta,
        yarn_factor=factor,
        original_max_position_embeddings=rope.size("original_max_position_embeddings"),
        beta_fast=rope.positive("beta_fast") or 32.0,
        beta_slow=rope.positive("beta_slow") or 1.0,
        mscale=rope.number("mscale", None) or 1.0,
        mscale_all_dim=rope.number("mscale_all_dim", None) or 0.0,
    )


def _parse_temperatures(keys: ConfigKeys, *, has_head: bool) -> tuple[float, ...]:
    values = keys.get("confidence_temperatures") or []
    is_list = isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    if not is_list or not all(0 < value < math.inf for value in values):
        raise ConfigError(
            f"config.json: confidence_temperatures={values!r} must be a list of positive numbers"
        )
    if values and not has_head:
        raise ConfigError("config.json: confidence_temperatures without enable_confidence_head")
    return tuple(map(float, values))
