"""Engine options on a command line, made from EngineConfig itself.

Owns the way from flags and a YAML file to an EngineConfig: a flag wins over the file, the
file over the default. Every field of EngineConfig is a flag of every command that starts an
engine; its doc line is the flag's help.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from stagecoach.config import EngineConfig, option
from stagecoach.errors import ConfigError

_PANEL = "Engine options"
_DEFAULTS = {item.name: item.default for item in dataclasses.fields(EngineConfig)}


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(engine_options: dict, ...)` a flag for every EngineConfig field but `model`."""
    parameters = [
        parameter
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "engine_options"
    ]
    flags = [_parameter(item) for item in dataclasses.fields(EngineConfig) if item.name != "model"]
    config_flag = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(
                "--config",
                help="YAML file of engine options, one `name: value` a line; flags win over it.",
                rich_help_panel=_PANEL,
            ),
        ],
    )

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        given = {
            name: _parse(name, value)
            for name in [flag.name for flag in flags]
            if (value := arguments.pop(name)) is not None
        }
        path = arguments.pop("config")
        from_file = {} if path is None else read_config_file(path)
        command(engine_options={**from_file, **given}, **arguments)

    signature = inspect.Signature(
        [
            *(item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters),
            *flags,
            config_flag,
        ]
    )
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {
        name: item.annotation for name, item in signature.parameters.items()
    }
    return wrapped


def read_config_file(path: Path) -> dict[str, Any]:
    """Engine options of a YAML file; names with dashes or underscores.

    Raises:
        ConfigError: the file cannot be read, or holds a name that is no option.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config={path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config={path}: must hold `name: value` lines")
    options = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in _DEFAULTS or name == "model":
            raise ConfigError(f"--config={path}: {key} is not an engine option")
        options[name] = _parse(name, value)
    return options


def _parameter(item: "dataclasses.Field[Any]") -> inspect.Parameter:
    names = [*item.metadata.get("flags", ()), option(item.name)]
    is_flag = item.default is False
    kind: Any = {int: int, bool: bool}.get(item.type, str)  # type: ignore[call-overload]
    if item.type == (int | None):
        kind = int
    shown = None if item.default in (None, dataclasses.MISSING) or is_flag else str(item.default)
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            kind | None,
            typer.Option(
                *names,
                help=item.metadata["doc"] + (f" [default: {shown}]" if shown else ""),
                show_default=False,
                rich_help_panel=_PANEL,
                **({} if is_flag else {"metavar": kind.__name__.upper()}),
            ),
        ],
    )


def _parse(name: str, value: Any) -> Any:
    """Values that a command line or YAML cannot type by itself."""
    if name == "pp_partition" and not isinstance(value, tuple):
        parts = value if isinstance(value, list) else str(value).split(",")
        try:
            return tuple(int(part) for part in parts)
        except ValueError:
            raise ConfigError(f"--pp-partition={value}: must be numbers, as in 5,4") from None
    if name == "hf_overrides" and isinstance(value, str):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--hf-overrides: not valid JSON ({error})") from None
        if not isinstance(parsed, dict):
            raise ConfigError("--hf-overrides: must be a JSON object")
        return parsed
    return value
