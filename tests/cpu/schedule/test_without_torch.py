"""The half that decides runs where torch is not installed (I38, I91)."""

import subprocess
import sys

BLOCK_TORCH_AND_IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["torch"] = None  # any import of it raises
import stagecoach.cache, stagecoach.schedule
names = [
    item.name
    for package in (stagecoach.cache, stagecoach.schedule)
    for item in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]
for name in names:
    importlib.import_module(name)
print(" ".join(names))
"""


def test_schedule_and_cache_import_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_TORCH_AND_IMPORT_ALL],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert {"stagecoach.schedule.scheduler", "stagecoach.cache.memory_plan"} <= set(names)
