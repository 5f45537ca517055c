"""Which weights are quantised, by the checkpoint and by the caller: facts and choices, no bytes.

Owns the mapping from `quantization_config` of a `config.json` to what is loaded or refused, and
the patterns of names by which matrices are quantised while they are loaded. Knows no tensor.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from stagecoach.config.keys import ConfigKeys
from stagecoach.errors import ConfigError

# How packed experts are stored, as compressed-tensors calls it.
PACKED_FORMAT = "mxfp4-pack-quantized"
PACKED_METHOD = "compressed-tensors"
_GROUP_SIZE = 32
ONLINE_METHODS = ("none", "ptpc_fp8")
_INCLUDE, _EXCLUDE = "--online-quantization-include", "--online-quantization-exclude"
# What the published recipe for Kimi-K3 keeps as it is stored.
DEFAULT_EXCLUDE = (
    "*embed_tokens.*",
    "*lm_head.*",
    "*_conv1d.*",
    "*.experts.*",
    "*.routed_expert_*",
    "*.block_sparse_moe.gate.*",
    "*norm.*",
    "*_res_proj.*",
    "*.f_a_proj.*",
    "*.f_b_proj.*",
    "*.g_a_proj.*",
    "*.g_b_proj.*",
    "*.b_proj.*",
)
_TEXT_PREFIX = "language_model."
# What 4-bit weights of that format say of themselves.
_PACKED_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": _GROUP_SIZE,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
}
_AN_EXPERT = "model.layers.1.block_sparse_moe.experts.0.w1"


@dataclass(frozen=True, slots=True)
class NamePatterns:
    """Shell patterns of published tensor names: what matches one of `include` and no `exclude`.

    A name is without the text model's prefix, as `model.layers.3.self_attn.q_proj.weight`.
    """

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE

    def selects(self, name: str) -> bool:
        return _matches(name, self.include) and not _matches(name, self.exclude)

    def check(self, names: Iterable[str], quantizable: Iterable[str]) -> None:
        """Refuse a pattern of the caller's that does nothing: a misspelling, or a vain hope.

        Args:
            names: of all of a model's tensors: what may be excluded.
            quantizable: of the matrices that can be quantised: one of them must be included.

        Raises:
            ConfigError: names the pattern and an example of a name, or what together chooses none.
        """
        known, matrices = list(names), list(quantizable)
        for option, patterns, allowed, what in (
            (_INCLUDE, self.include, matrices, "matrices that can be quantised"),
            (_EXCLUDE, self.exclude, known, "tensors"),
        ):
            for pattern in patterns:
                if pattern in ("*", *DEFAULT_EXCLUDE):
                    continue
                if not any(_matches(name, (pattern,)) for name in allowed):
                    example = allowed[len(allowed) // 2]
                    raise ConfigError(
                        f"{option}: the pattern {pattern!r} matches none of {len(allowed)} {what}, "
                        f"which have names like {example!r}"
                    )
        if not any(self.selects(name) for name in matrices):
            raise ConfigError(
                f"{_INCLUDE}={','.join(self.include)} and {_EXCLUDE}={','.join(self.exclude)}: "
                f"none of {len(matrices)} matrices is left to quantise"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationChoice:
    """How one model's weights lie in memory."""

    keeps_packed: bool = False  # MXFP4 experts as they are stored; otherwise decoded once
    fp8: NamePatterns | None = None  # matrices that are quantised while they are loaded


NO_QUANTIZATION = QuantizationChoice()


def has_packed_experts(keys: ConfigKeys) -> bool:
    """Whether `quantization_config` says that experts are stored as MXFP4.

    Which tensors really are is decided tensor by tensor, by the presence of `weight_packed`.

    Args:
        keys: the object that may hold the key `quantization_config`.

    Raises:
        ConfigError: names a method, a format or a value that this engine does not load.
    """
    if keys.get("quantization_config") is None:
        return False
    section = keys.section("quantization_config")
    method, packing = section.get("quant_method", PACKED_METHOD), section.get("format")
    if method != PACKED_METHOD:
        details = "".join(
            f", {key}={section.get(key)!r}"
            for key in ("quant_algo", "fmt", "weight_block_size", "format")
            if section.get(key) is not None
        )
        raise ConfigError(
            f"config.json: quantization_config.quant_method={method!r}{details} is not supported "
            f"({PACKED_METHOD} with format {PACKED_FORMAT})"
        )
    if packing != PACKED_FORMAT:
        raise ConfigError(
            f"config.json: quantization_config.format={packing!r} is not supported "
            f"({PACKED_FORMAT})"
        )
    for key in ("kv_cache_scheme", "transform_config"):
        if section.get(key) not in (None, {}):
            raise ConfigError(
                f"config.json: quantization_config.{key}={section.get(key)!r} is not supported "
                "(null)"
            )
    _check_groups(section.get("config_groups") or {})
    return not any(_is_ignored(rule) for rule in _rules(section.get("ignore") or []))


def has_whole_groups(expert_width: int, input_width: int, tp_size: int) -> bool:
    """Whether each rank's columns of a packed expert are whole groups of 32.

    Args:
        expert_width: of what an expert computes in between, shared out among ranks.
        input_width: of what it reads, whole on every rank.
    """
    return expert_width % (tp_size * _GROUP_SIZE) == 0 and input_width % _GROUP_SIZE == 0


def refuse_other_files(file_name: str, content: dict[str, Any]) -> NoReturn:
    """What ModelOpt writes beside config.json says how a checkpoint is quantised.

    Raises:
        ConfigError: always, as no such format is loaded.
    """
    quantization = content.get("quantization")
    algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
    raise ConfigError(
        f"{file_name}: quant_algo={algorithm!r} is not supported "
        f"({PACKED_METHOD} with format {PACKED_FORMAT}, or unquantised)"
    )


def _check_groups(groups: Any) -> None:
    if not isinstance(groups, dict):
        raise ConfigError("config.json: quantization_config.config_groups is not an object")
    for name, group in groups.items():
        path = f"config.json: quantization_config.config_groups.{name}"
        if not isinstance(group, dict):
            raise ConfigError(f"{path} is not an object")
        for key in ("input_activations", "output_activations"):
            if group.get(key) is not None:
                raise ConfigError(f"{path}.{key}={group[key]!r} is not supported (null)")
        weights = group.get("weights") or {}
        if not isinstance(weights, dict):
            raise ConfigError(f"{path}.weights is not an object")
        for key, value in _PACKED_WEIGHTS.items():
            if weights.get(key, value) != value:
                raise ConfigError(
                    f"{path}.weights.{key}={weights[key]!r} is not supported ({value!r})"
                )


def _rules(rules: Any) -> list[str]:
    if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        raise ConfigError("config.json: quantization_config.ignore must be a list of texts")
    return rules


def _is_ignored(rule: str) -> bool:
    """Whether an expert's projection falls under it; `re:` marks a regular expression."""
    if not rule.startswith("re:"):
        return rule in (_AN_EXPERT, _TEXT_PREFIX + _AN_EXPERT)
    try:
        return any(re.match(rule[3:], prefix + _AN_EXPERT) for prefix in (_TEXT_PREFIX, ""))
    except re.error as error:
        raise ConfigError(
            f"config.json: quantization_config.ignore: {rule!r} is no regular expression: {error}"
        ) from None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern.removeprefix(_TEXT_PREFIX)) for pattern in patterns)
