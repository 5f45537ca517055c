"""The Python example of the README runs as it stands, on a model that is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_the_python_example_runs(folder: Path, temporary_folder: Path) -> None:
    [example] = re.findall(
        r"^```python\n(.*?)^```",
        (_ROOT / "README.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    assert example.count('LLM("demo"') == 1
    program = example.replace('LLM("demo"', f"LLM({str(folder)!r}, log_level='warning'")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(temporary_folder), "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ParsedMessage(")
