"""`stagecoach fuzz --processes`: schedules on engines of real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_schedules_on_real_processes(
    folder: Path, draft_folder: Path, temporary_folder: Path
) -> None:
    """With a draft, a cache and two stages, whose transports are those that users have."""
    speculation = {
        "model": str(draft_folder),
        "num_speculative_tokens": 3,
        "confidence_schedule": False,
        "watchdog": False,
    }
    done = subprocess.run(
        [
            sys.executable, "-m", "stagecoach", "fuzz", "--processes", "--model", str(folder),
            "--schedules", "1", "--seed", "3", "-pp", "2", "-tp", "1", "--num-threads", "1",
            "--max-model-len", "64", "--enable-prefix-caching",
            "--save-to", str(temporary_folder / "failures"),
            "--speculative-config", json.dumps(speculation),
        ],
        env={**os.environ, "TMPDIR": str(temporary_folder), "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["schedules"] == 1 and counts["mismatches"] == 0
    assert counts["steps"] > 0 and counts["hits"] > 0
