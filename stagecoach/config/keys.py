"""The keys of a checkpoint's `config.json`, read one by one.

Owns how a value is checked: one that is missing or mistyped is refused by the name of its
key. Knows no key.
"""

import math
from typing import Any

from stagecoach.errors import ConfigError


class ConfigKeys:
    """One object of config.json; a missing or mistyped key is refused by name."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def section(self, key: str) -> "ConfigKeys":
        value = self._values.get(key)
        if not isinstance(value, dict):
            raise ConfigError(f"config.json: {key} is missing or not an object")
        return ConfigKeys(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if value is None and key not in self._values:
            raise ConfigError(f"config.json: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"config.json: {key}={value!r} must be a non-negative integer")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value == 0:
            raise ConfigError(f"config.json: {key}=0 must be at least 1")
        return value

    def size_or_none(self, key: str) -> int | None:
        """None where the key is absent, null or 0: the part that it sizes is absent."""
        return self.integer(key) if self.get(key) else None

    def number(self, key: str, default: float | None) -> float | None:
        value = self._values.get(key, default)
        if value is None:
            return None
        # Python's JSON reader also takes NaN and Infinity.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ConfigError(f"config.json: {key}={value!r} must be a number")
        return float(value)

    def positive(self, key: str) -> float | None:
        value = self.number(key, None)
        if value is not None and value <= 0:
            raise ConfigError(f"config.json: {key}={value:g} must be positive")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key}={value!r} must be true or false")
        return value

    def integers(self, key: str) -> frozenset[int]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ConfigError(f"config.json: {key} must be a list of layer numbers")
        return frozenset(value)

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self._values.get(key, default)
        if value not in allowed:
            raise ConfigError(
                f"config.json: {key}={value!r} is not supported ({', '.join(allowed)})"
            )
        return value
