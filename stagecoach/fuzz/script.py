"""The script of a schedule: which engine, and what it is asked in which turn.

Owns the script's form, in memory and as a JSON file that a person can read and edit, and how
the text of a prompt becomes token ids. Runs nothing.

A prompt is written in pieces, separated by blanks:

    a64       the first 64 tokens of family a; every letter is another endless text, of which
              z repeats one token and y repeats eight
    @0        the prompt and the answer of request 0, an earlier one
    [5,7,9]   these tokens
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.errors import ConfigError
from stagecoach.request import SamplingParams

_PIECE = re.compile(r"([a-z])(\d+)|@(\d+)|(\[[\d,]*\])")
_SHORT_PERIODS = {"z": 1, "y": 8}

# Options that JSON has as lists.
_LISTS = ("pp_partition", "online_quantization_include", "online_quantization_exclude")


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a schedule. Turns are those of the engine loop: one commits one result."""

    prompt: str
    params: SamplingParams = SamplingParams()
    turn: int = 0  # the first in which it may arrive
    after: int | None = None  # and not before this request has ended
    abort_after: int | None = None  # turns behind its arrival; None: it may end
    salt: str | None = None
    checkpoint_position: int | None = None


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schedule that can be run again."""

    model: str
    engine: dict[str, Any] = {}  # fields of EngineConfig, as JSON spells them
    # Share of drafts that are right, made by a drafter that knows the answers; None: the draft's.
    draft_accuracy: float | None = None
    has_ragged_windows: bool = False  # scattered lengths; otherwise as long as can be
    resets: tuple[int, ...] = ()  # turns in which the prefix cache is told to forget
    requests: tuple[Ask, ...]

    def __post_init__(self) -> None:
        for index, ask in enumerate(self.requests):
            for other in (ask.after, *_references(ask.prompt)):
                if other is not None and not 0 <= other < index:
                    raise ConfigError(f"request {index} refers to {other}, no earlier request")

    def engine_config(self) -> EngineConfig:
        """Raises ConfigError: an option that does not exist, or a value out of its range."""
        options = dict(self.engine)
        if options.get("speculative_config") is not None:
            options["speculative_config"] = SpeculativeConfig.parse(options["speculative_config"])
        for name in _LISTS:
            if options.get(name) is not None:
                options[name] = tuple(options[name])
        try:
            return EngineConfig(model=self.model, **options)
        except TypeError as error:
            raise ConfigError(f"the script's engine: {error}") from None


def prompt_token_ids(
    text: str, vocab_size: int, sequence: Callable[[int], tuple[int, ...]]
) -> tuple[int, ...]:
    """Token ids of a prompt.

    Args:
        sequence: prompt and answer of an earlier request.

    Raises:
        ConfigError: a piece of `text` is none.
    """
    token_ids: list[int] = []
    for piece in text.split():
        match = _PIECE.fullmatch(piece)
        if match is None:
            raise ConfigError(f"prompt {text!r}: {piece!r} is no piece like a64, @0 or [5,7,9]")
        family, length, reference, explicit = match.groups()
        if family:
            token_ids += family_tokens(family, int(length), vocab_size)
        elif reference:
            token_ids += sequence(int(reference))
        else:
            token_ids += json.loads(explicit)
    return tuple(token_ids)


def family_tokens(family: str, length: int, vocab_size: int) -> tuple[int, ...]:
    """The first tokens of a family's text."""
    period = _SHORT_PERIODS.get(family, length)
    tokens = tuple(_scattered(f"{family}{place}") % vocab_size for place in range(period))
    return (tokens * -(-length // period))[:length] if length else ()


def _scattered(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


def _references(prompt: str) -> list[int]:
    return [
        int(match[3]) for piece in prompt.split() if (match := _PIECE.fullmatch(piece)) and match[3]
    ]


def encode(script: Script) -> str:
    """As JSON, one request a line, nothing that has its default value."""
    fields = {
        name: value
        for name, value in _changed(script).items()
        if name not in ("requests", "engine")
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in fields.items()]
    options = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in script.engine.items()
    )
    requests = ",\n".join(f"    {json.dumps(_changed(ask))}" for ask in script.requests)
    return "\n".join(
        ["{", *lines, '  "engine": {', options, "  },", '  "requests": [', requests, "  ]", "}", ""]
    )


def decode(text: str | bytes) -> Script:
    """Raises ConfigError: not a script."""
    try:
        return msgspec.json.decode(text, type=Script)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"not a schedule of `stagecoach fuzz`: {error}") from None


def read(path: Path) -> Script:
    """Raises ConfigError: no such file, or not a script."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--replay={path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"--replay={path}: {error}") from None


def _changed(struct: msgspec.Struct) -> dict[str, Any]:
    """What differs from the defaults, as JSON has it."""
    changed = {}
    for field in msgspec.structs.fields(type(struct)):
        value = getattr(struct, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if value != default:
            is_struct = isinstance(value, msgspec.Struct)
            changed[field.name] = _changed(value) if is_struct else msgspec.to_builtins(value)
    return changed
