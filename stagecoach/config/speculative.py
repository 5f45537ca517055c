"""The keys of `--speculative-config`: how a draft is named and used.

Owns these keys and their own ranges. What joins one with another option, or with a fact of the
draft, is judged in `compatibility/rules.py`.
"""

import dataclasses
from dataclasses import dataclass, field

from stagecoach.config.option_values import is_number, option
from stagecoach.errors import ConfigError

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
    online_quantization: str = field(
        default="none",
        metadata={
            "doc": "follow: the draft's linear layers are quantised like the target's, by "
            "--online-quantization; none: they stay as they are stored"
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={"doc": "of the draft's context rows: auto, that of activations; bfloat16; fp8"},
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise _speculation_error("model", self.model, "a folder or a draft's name")
        most = MAX_SPECULATIVE_TOKENS
        if not is_number(self.num_speculative_tokens, int) or not (
            1 <= self.num_speculative_tokens <= most
        ):
            raise _speculation_error(
                "num_speculative_tokens", self.num_speculative_tokens, f"an integer in 1..{most}"
            )
        for name, allowed in (
            ("method", DRAFT_METHODS),
            ("acceptance", ACCEPTANCE_RULES),
            ("online_quantization", ("none", "follow")),
            ("kv_cache_dtype", ("auto", "bfloat16", "fp8")),
        ):
            if getattr(self, name) not in allowed:
                raise _speculation_error(name, getattr(self, name), f"one of {', '.join(allowed)}")
        for name in ("confidence_schedule", "watchdog"):
            if not isinstance(getattr(self, name), bool | None):
                raise _speculation_error(name, getattr(self, name), "true, false or null")
        length, longest = self.synthetic_acceptance_length, self.num_speculative_tokens + 1
        # A NaN is in no range either.
        if length is not None and not (is_number(length, int | float) and 1 <= length <= longest):
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


def speculation_key(name: str) -> str:
    """How errors spell a key of `--speculative-config`."""
    return f"{option('speculative_config')} {name}"


def _speculation_error(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{speculation_key(name)}={value!r}: must be {allowed}")
