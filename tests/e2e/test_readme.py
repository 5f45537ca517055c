"""The Python examples of the README run as they stand, on a model that is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
# The first line that each prints.
_FIRST_LINES = (r"ParsedMessage\(", r"0 of \d+ prompt tokens cached")


@pytest.mark.parametrize("number", range(len(_FIRST_LINES)))
def test_a_python_example_runs(folder: Path, temporary_folder: Path, number: int) -> None:
    examples = re.findall(
        r"^```python\n(.*?)^```",
        (_ROOT / "README.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    assert len(examples) == len(_FIRST_LINES)
    example = examples[number]
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
    assert re.match(_FIRST_LINES[number], done.stdout)
