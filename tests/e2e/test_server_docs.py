"""The examples of README and docs/ for a running server, as they stand there."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess

_ROOT = Path(__file__).parents[2]
_MARKS = ("<!-- examples -->", "<!-- /examples -->")
_PAGES = [
    page
    for page in (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
    if _MARKS[0] in page.read_text(encoding="utf-8")
]
# What the streams of each protocol end with.
_LAST_EVENTS = {
    "/v1/responses": "event: response.completed\n",
    "/v1/messages": "event: message_stop\n",
}
_LAST_DATA = "data: [DONE]"


def _examples(page: Path) -> list[str]:
    found = []
    for rest in page.read_text(encoding="utf-8").split(_MARKS[0])[1:]:
        block, mark, _ = rest.partition(_MARKS[1])
        assert mark, f"{page.name}: an example without its end"
        lines = block.replace("```sh", "").replace("```", "")
        found += [example for example in re.split(r"\n\n+", lines.strip()) if example]
    return found


def test_the_pages_that_have_examples_are_found() -> None:
    assert {"README.md", "server.md", "clients.md"} <= {page.name for page in _PAGES}


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_the_examples_do_what_they_say(demo_server: ServerProcess, page: Path) -> None:
    examples = _examples(page)
    assert examples
    for example in examples:
        assert example.startswith("curl "), example
        command = example.replace("http://localhost:8000", demo_server.url)
        done = subprocess.run(
            ["bash", "-c", f"{command} -sS --fail-with-body"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (example, done.stdout, done.stderr)
        if re.search(r'"stream": *true', example):
            *_, last = done.stdout.strip().split("\n\n")
            ends = [end for path, end in _LAST_EVENTS.items() if path in example]
            assert last.startswith(ends[0] if ends else _LAST_DATA), (example, last)
            assert "include_usage" not in example or '"usage":{"prompt_tokens"' in done.stdout
        elif done.stdout.startswith(("{", "[")):
            assert json.loads(done.stdout)
        else:
            assert done.stdout.strip(), example


_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _python_examples(page: Path) -> list[str]:
    examples = _PYTHON.findall(page.read_text(encoding="utf-8"))
    return [example for example in examples if "http://localhost:8000" in example]


@pytest.mark.parametrize("page", [*filter(_python_examples, _PAGES)], ids=lambda page: page.name)
def test_the_python_examples_run(
    demo_server: ServerProcess, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for example in _python_examples(page):
        exec(example.replace("http://localhost:8000", demo_server.url), {})
        assert capsys.readouterr().out.strip()
