"""From the name of a model to the folder with its checkpoint.

Owns the names that need no path and the user's cache folder; the one module that asks the
environment where that folder is. Reads nothing inside a checkpoint.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

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
        return _existing(_PACKAGE / "demo" / "checkpoint", model)
    if model == "tiny":
        return _tiny_folder()
    return _existing(Path(model).expanduser(), model)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/stagecoach, by default ~/.cache/stagecoach; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification tells to ignore a relative path.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "stagecoach"


def _existing(folder: Path, model: str) -> Path:
    if not folder.is_dir():
        raise ConfigError(
            f"--model={model}: {folder} is not a folder (give a checkpoint folder, demo or tiny)"
        )
    return folder


def _tiny_folder() -> Path:
    folder = cache_folder() / f"tiny-{_writer_digest()}"
    if folder.is_dir():
        return folder
    # Late, because it needs torch, and all that only asks for a path should not.
    from stagecoach.model import tiny

    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed, so that nobody ever sees half of it.
    draft = Path(tempfile.mkdtemp(prefix="tiny-", dir=folder.parent))
    try:
        tiny.write_tiny_model(draft, tiny.kimi_k3_config(tiny.TinyShape()), _TINY_SEED)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _writer_digest() -> str:
    """Changes with the code that writes the checkpoint, so that none is ever stale."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted((_PACKAGE / "model").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
