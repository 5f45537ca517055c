"""What must be the same on all hosts of one engine, and what differs.

Owns the comparison that is made before any weight is read. Options that say where a process runs
or what it calls its files may differ; everything else that could change a token, a shape or an
order may not.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path

import msgspec

from stagecoach.config.engine import EngineConfig, ResolvedConfig, option
from stagecoach.version import __version__

_MAY_DIFFER = {
    # What they were settled to is compared.
    *("device", "dtype", "max_model_len", "pp_partition"),
    *("model", "node_rank", "master_addr", "master_port", "network_interface"),
    "host_key_file",
    *("distributed_timeout_seconds", "num_threads", "log_level"),
}
_INDEX = "model.safetensors.index.json"


class Identity(msgspec.Struct, frozen=True):
    """One host's answers; each value is named by what its user would call it."""

    values: dict[str, str]

    def difference(self, other: "Identity") -> str | None:
        """The first thing that differs, as `name: its value here, its value there`."""
        for name in {**self.values, **other.values}:
            mine, theirs = self.values.get(name, "nothing"), other.values.get(name, "nothing")
            if mine != theirs:
                return f"{name}: {mine} there, {theirs} here"
        return None


def identity_of(config: ResolvedConfig) -> Identity:
    """Of this process: versions, options, and what the checkpoint folders hold."""
    values = {
        "version of stagecoach": __version__,
        "version of torch": _version("torch"),
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
    }
    if config.device == "cuda":
        values["version of triton"] = _version("triton")
    values["device"] = config.device
    for item in dataclasses.fields(EngineConfig):
        if item.name not in _MAY_DIFFER:
            values[option(item.name)] = _text(item.name, getattr(config.engine, item.name))
    values |= {
        "dtype": config.dtype,
        "length of the longest request": str(config.max_model_len),
        "layers of each stage": ",".join(map(str, config.partition)),
        "checkpoint": _checkpoint(config.checkpoint, is_read=config.dummy_seed is None),
    }
    if config.speculation is not None:
        folder = config.speculation.checkpoint
        values["draft checkpoint"] = _checkpoint(folder, is_read=config.dummy_seed is None)
    return Identity(values)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _text(name: str, value: object) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if name == "speculative_config" and isinstance(value, dict):
        # Folders may have other names; their contents are compared.
        value = {key: item for key, item in value.items() if key != "model"}
    return json.dumps(value, sort_keys=True, default=str)


def _checkpoint(folder: Path, *, is_read: bool) -> str:
    """A digest of config and index, and of the names and sizes of the weight files."""
    digest = hashlib.sha256()
    for name in ("config.json", *((_INDEX,) if is_read else ())):
        path = folder / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    if is_read:
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]
