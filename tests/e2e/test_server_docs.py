"""The examples of docs/server.md, as they stand there."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server_process import serving

_PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def _examples() -> list[str]:
    block = _PAGE.partition("<!-- examples -->")[2].partition("<!-- /examples -->")[0]
    lines = block.replace("```sh", "").replace("```", "")
    return [example for example in re.split(r"\n\n+", lines.strip()) if example]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_examples_do_what_they_say(temporary_folder: Path) -> None:
    examples = _examples()
    assert len(examples) == 7
    with serving("demo", temporary_folder) as server:
        for example in examples:
            assert example.startswith("curl ")
            command = example.replace("http://localhost:8000", server.url)
            done = subprocess.run(
                ["bash", "-c", f"{command} -sS --fail-with-body"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, (example, done.stdout, done.stderr)
            if '"stream": true' in example:
                assert done.stdout.endswith("data: [DONE]\n\n")
                assert '"usage":{"prompt_tokens"' in done.stdout
            else:
                assert json.loads(done.stdout)
