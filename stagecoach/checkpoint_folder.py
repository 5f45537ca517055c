"""From the name of a model or a draft to the folder with its checkpoint.

Owns the names that need no path and the user's cache folder; the one module that asks the
environment where that folder is. Reads nothing inside a checkpoint.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from stagecoach.config.engine import option, speculation_key
from stagecoach.errors import ConfigError

_PACKAGE = Path(__file__).parent
_TINY_SEED = 0


def checkpoint_folder(model: str) -> Path:
    """The folder of `--model`: `demo` (packaged), `tiny` (made on first use) or a path.

    A folder that happens to be called demo or tiny is reached as ./demo or ./tiny.

    Raises:
        ConfigError: there is no such folder.
    """
    if model == "demo":
        folder = _PACKAGE / "demo" / "checkpoint"
    elif model == "tiny":
        folder = _made_folder("tiny", _write_tiny_model)
    else:
        folder = Path(model).expanduser()
    return _existing(folder, f"{option('model')}={model}", "demo or tiny")


def draft_folder(model: str) -> Path:
    """The folder of a draft: `demo-draft` (packaged, for `demo`), `tiny-draft` or a path.

    `tiny-draft` is made on first use, for `tiny`. Errors as of `checkpoint_folder`.
    """
    if model == "demo-draft":
        folder = _PACKAGE / "demo" / "draft_checkpoint"
    elif model == "tiny-draft":
        folder = _made_folder("tiny-draft", _write_tiny_draft)
    else:
        folder = Path(model).expanduser()
    return _existing(folder, f"{speculation_key('model')}={model}", "demo-draft or tiny-draft")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/stagecoach, by default ~/.cache/stagecoach; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification tells to ignore a relative path.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "stagecoach"


def _existing(folder: Path, given: str, names: str) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{given}: {folder} is not a folder (give a checkpoint folder, {names})")
    return folder


def _made_folder(name: str, write: Callable[[Path], None]) -> Path:
    """A checkpoint in the cache folder, written if this version never wrote it."""
    folder = cache_folder() / f"{name}-{_writer_digest()}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed, so that nobody ever sees half of it.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
    try:
        write(unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write_tiny_model(folder: Path) -> None:
    # Late, because it needs torch, and all that only asks for a path should not.
    from stagecoach.model import tiny

    tiny.write_tiny_model(folder, tiny.kimi_k3_config(tiny.TinyShape()), _TINY_SEED)


def _write_tiny_draft(folder: Path) -> None:
    # Late for the same reason.
    from stagecoach.draft import tiny

    tiny.write_tiny_draft(folder, tiny.mla_draft_config(tiny.TinyDraftShape()), _TINY_SEED)


def _writer_digest() -> str:
    """Changes with the code that writes the checkpoints, so that none is ever stale."""
    digest = hashlib.blake2b(digest_size=6)
    for package in ("model", "draft"):
        for path in sorted((_PACKAGE / package).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
