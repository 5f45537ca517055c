"""Options on a command line, made from EngineConfig and ServerSettings themselves.

Owns the way from flags and a YAML file to an EngineConfig: a flag wins over the file, the
file over the default. Every field of EngineConfig is a flag of every command that starts an
engine, every field of ServerSettings one of `serve`; its doc line is the flag's help.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from stagecoach.api.settings import ServerSettings
from stagecoach.config.engine import EngineConfig, SpeculativeConfig, option
from stagecoach.errors import ConfigError
from stagecoach.observe import log

_FIELDS = {item.name: item for item in dataclasses.fields(EngineConfig) if item.name != "model"}
_METAVARS = {
    "pp_partition": "INT,INT,...",
    "cudagraph_capture_sizes": "INT,INT,...",
    "hf_overrides": "JSON",
    "speculative_config": "JSON",
    "dtype": "NAME",
    "online_quantization_include": "PATTERNS",
    "online_quantization_exclude": "PATTERNS",
}


def with_engine_options(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Give `command(engine_options: dict, ...)` a flag for every EngineConfig field but `model`.

    `defaults` replace those of EngineConfig.
    """
    flags = [_parameter(item, defaults.get(name, item.default)) for name, item in _FIELDS.items()]
    config_flag = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(
                "--config",
                metavar="FILE",
                help="YAML file of engine options, one `name: value` a line; flags win over it.",
            ),
        ],
    )

    def options(config: Path | None = None, **given: Any) -> dict[str, Any]:
        from_file = {} if config is None else read_config_file(config)
        parsed = {name: _parse(name, value) for name, value in given.items()}
        options = {**defaults, **from_file, **parsed}
        _configure_log(options.get("log_level", _FIELDS["log_level"].default))
        return options

    return _with_flags(command, "engine_options", [*flags, config_flag], options)


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(server_options: dict, ...)` a flag for every field of ServerSettings."""
    # The log's level is an option of the engine, too.
    fields = [item for item in dataclasses.fields(ServerSettings) if item.name != "log_level"]
    flags = [_parameter(item, item.default) for item in fields]

    def options(**given: Any) -> dict[str, Any]:
        return {
            name: tuple(_texts(name, value)) if isinstance(value, list) else value
            for name, value in given.items()
        }

    return _with_flags(command, "server_options", flags, options)


def _texts(name: str, given: list[str]) -> Iterator[str]:
    """Those of a flag that may be repeated; origins may be in one JSON list, as vLLM has them."""
    for text in given:
        if name == "allowed_origins" and text.startswith("["):
            try:
                yield from msgspec.json.decode(text, type=list[str])
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{option(name)}={text}: no JSON list of texts: {error}"
                ) from None
        else:
            yield text


def _with_flags(
    command: Callable[..., None],
    name: str,
    flags: Sequence[inspect.Parameter],
    read: Callable[..., dict[str, Any]],
) -> Callable[..., None]:
    """`command` with these flags instead of its parameter `name`, which gets what `read` makes
    of those that are given."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        values = {flag.name: arguments.pop(flag.name) for flag in flags}
        given = {flag: value for flag, value in values.items() if value is not None}
        command(**{name: read(**given)}, **arguments)

    kept = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != name
    ]
    signature = inspect.Signature([*kept, *flags])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {item.name: item.annotation for item in signature.parameters.values()}
    return wrapped


def read_config_file(path: Path) -> dict[str, Any]:
    """Engine options of a YAML file; names with dashes or underscores, null for the default.

    Raises:
        ConfigError: the file cannot be read, holds a name that is no option or the same name
            twice, or a value of another type than the option's.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config={path}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config={path}: must hold `name: value` lines")
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name == "model":
            raise ConfigError(f"--config={path}: the model is chosen on the command line only")
        if name not in _FIELDS:
            raise ConfigError(f"--config={path}: {key} is not an engine option")
        if name in options:
            raise ConfigError(f"--config={path}: {key} is there twice")
        options[name] = _typed(path, name, value)
    return {name: value for name, value in options.items() if value is not None}


def _typed(path: Path, name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        return msgspec.convert(_parse(name, value), type=_FIELDS[name].type)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--config={path}: {name}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"--config={path}: {error}") from None


def _configure_log(level: str) -> None:
    """For what is logged in this process; the others do it for themselves."""
    # A wrong level is refused with all other options, when the engine starts.
    if level in log.LEVELS:
        log.configure("stagecoach", level=level)


def _parameter(item: "dataclasses.Field[Any]", default: Any) -> inspect.Parameter:
    kind = _kind(item)
    is_flag = kind is bool
    long_name = item.metadata.get("option", option(item.name))
    # The second spelling lets a command line win over a file that says true.
    if is_flag:
        long_name += f"/--no-{long_name.removeprefix('--')}"
    names = [*item.metadata.get("flags", ()), long_name]
    is_told = default is not False and default not in (None, dataclasses.MISSING, (), "")
    shown = str(default) if is_told else None
    metavar = item.metadata.get("metavar", _METAVARS.get(item.name, kind.__name__.upper()))
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            kind | None,
            typer.Option(
                *names,
                help=_help(item) + (f"  [default: {shown}]" if shown else ""),
                show_default=False,
                envvar=item.metadata.get("envvar"),
                **({} if is_flag else {"metavar": metavar}),
            ),
        ],
    )


def _kind(item: "dataclasses.Field[Any]") -> Any:
    """What a command line takes for it: bool, int, float, text, or texts."""
    for kind in (bool, int, float):
        if item.type in (kind, kind | None):
            return kind
    return list[str] if item.type == tuple[str, ...] else str


def _help(item: "dataclasses.Field[Any]") -> str:
    doc: str = item.metadata["doc"]
    if item.name != "speculative_config":
        return doc
    keys = []
    for item in dataclasses.fields(SpeculativeConfig):
        is_told = item.default not in (None, dataclasses.MISSING)
        keys.append(
            f"{item.name}: {item.metadata['doc']}{f'; default {item.default}' if is_told else ''}"
        )
    # Click wraps each of these paragraphs by itself.
    return "\n\n".join([f"{doc} Its keys:", *keys])


def _parse(name: str, value: Any) -> Any:
    """Values that a command line or YAML cannot type by itself."""
    if name in ("pp_partition", "cudagraph_capture_sizes") and isinstance(value, str | int):
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            raise ConfigError(f"{option(name)}={value}: must be numbers, as in 5,4") from None
    if name.startswith("online_quantization_") and isinstance(value, str):
        return tuple(value.split(","))
    if name in ("hf_overrides", "speculative_config") and isinstance(value, str):
        value = _parse_object(name, value)
    return SpeculativeConfig.parse(value) if name == "speculative_config" else value


def _parse_object(name: str, text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option(name)}={text}: not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{option(name)}={text}: must be a JSON object")
    return parsed
