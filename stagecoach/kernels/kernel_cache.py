"""Machine code of kernels that was compiled before, on disk.

Owns one folder, Triton's (`~/.triton/cache`, or what TRITON_CACHE_DIR says), in which our CUDA C++
lies too. Files are named by all that went into them and replaced in one piece, so any number of
processes share it. A folder that cannot be written is no error.
"""

import hashlib
import itertools
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from triton import knobs
from triton.runtime.cache import get_cache_manager

from stagecoach.observe.log import get_logger

_LOG = get_logger(__name__)
_CUBIN = "kernel.cubin"
_PACKAGE = Path(__file__).parents[1]
_SOURCES = (".py", ".cu", ".cuh")


def use_writable_folder(parent: Path | None = None) -> None:
    """Where the folder cannot be written, use another from now on, as all that is started does.

    Args:
        parent: of the other; by default that of temporary files. It is this user's alone, since
            what lies there is run.
    """
    usual = Path(knobs.cache.dir)
    if _is_writable(usual):
        return
    other = (parent or Path(tempfile.gettempdir())) / f"stagecoach-kernels-{os.getuid()}"
    if not _is_writable(other) or not _is_own(other):
        _LOG.warning("neither %s nor %s can be used for compiled kernels", usual, other)
        return
    _LOG.warning(
        "%s cannot be written: compiled kernels are kept in %s (TRITON_CACHE_DIR names another)",
        usual,
        other,
    )
    knobs.cache.dir = str(other)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def digest(parts: Iterable[bytes]) -> str:
    """A name for machine code that was made of these parts, in this order."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()


def source_digest() -> str:
    """Of all that this package's kernels, and the code that launches them, are written in."""
    files = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in _SOURCES)
    parts = ((str(path.relative_to(_PACKAGE)).encode(), path.read_bytes()) for path in files)
    return digest(itertools.chain.from_iterable(parts))


def find(name: str) -> bytes | None:
    """What was stored under a digest; None where there is nothing."""
    try:
        path = get_cache_manager(name).get_file(_CUBIN)
        return None if path is None else Path(path).read_bytes()
    except OSError:
        return None


def store(name: str, code: bytes) -> None:
    """Keep it for whoever asks next, if that can be."""
    try:
        get_cache_manager(name).put(code, _CUBIN, binary=True)
    except OSError as error:
        _LOG.debug("machine code is not kept: %s", error)
