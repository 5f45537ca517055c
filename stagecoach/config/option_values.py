"""How options are spelt and how their values are checked one by one.

Knows no option.
"""

from typing import Any

from stagecoach.errors import ConfigError


def option(name: str) -> str:
    """The command-line spelling of an EngineConfig field."""
    return "--" + name.replace("_", "-")


def is_number(value: object, kinds: Any) -> bool:
    """True is no 1 here."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def at_least(name: str, value: int, low: int) -> None:
    """Refuse what is no integer or less, by the option's name."""
    if not is_number(value, int) or value < low:
        raise ConfigError(f"{option(name)}={value!r}: must be an integer of at least {low}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse another value, by the option's name."""
    if value not in allowed:
        raise ConfigError(f"{option(name)}={value!r}: must be one of {', '.join(allowed)}")
