"""The README, the pages of docs/ and the model cards name only what exists."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from stagecoach.__main__ import app
from stagecoach.compatibility import support_table

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "stagecoach"
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_PAGES = (
    _ROOT / "README.md",
    _ROOT / "CONTRIBUTING.md",
    *sorted((_ROOT / "docs").glob("*.md")),
    *sorted((_PACKAGE / "demo").glob("*.md")),
    *sorted((_ROOT / "training").glob("*/README.md")),
)
_INVARIANTS = range(1, 93)

_COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def _command(words: list[str]) -> Any:
    """The command that `words` begin with; `bench serve` is one of a group."""
    command = _COMMANDS[words[0]]
    return command.commands[words[1]] if hasattr(command, "commands") else command


def _between(marker: str) -> str:
    _, _, rest = _README.partition(f"<!-- {marker} -->\n")
    inside, found, _ = rest.partition(f"<!-- /{marker} -->")
    assert found, f"README.md lacks the markers of {marker}"
    return inside.strip()


def _code_blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _command_lines(text: str) -> list[list[str]]:
    """The lines of code blocks that are commands, in words, without their comments."""
    starts = ("stagecoach ", ".venv/bin/", "make ", "scripts/")
    lines = [
        line.removeprefix("$ ").partition("  #")[0]
        for block in _code_blocks(text)
        for line in block.replace("\\\n", "").splitlines()
    ]
    return [shlex.split(line) for line in lines if line.startswith(starts)]


def _headings(page: Path) -> set[str]:
    """What links call the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@cache
def _definitions(path: Path) -> frozenset[str]:
    """Functions and classes of a file, methods as Class.method."""
    names = set()
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, defined):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, defined)}
    return frozenset(names)


def test_the_support_table_is_the_generated_one() -> None:
    assert _between("support") == support_table.render_markdown().strip(), (
        "replace it by the output of: stagecoach support --markdown"
    )


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_commands_exist_with_their_options(page: Path) -> None:
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8")
    for program, *words in _command_lines(page.read_text(encoding="utf-8")):
        if program == "make":
            assert re.search(rf"^{words[0]}:", makefile, flags=re.MULTILINE), words
        elif program.startswith("scripts/"):
            assert (_ROOT / program).is_file(), program
            if program == "scripts/bench" and words[0].islower():
                assert (_ROOT / "bench" / f"{words[0]}.py").is_file(), words
        elif program.endswith("stagecoach"):
            command = _command(words)
            known = {name for item in command.params for name in (*item.opts, *item.secondary_opts)}
            assert {word for word in words[1:] if word.startswith("-")} <= known, words


def test_the_readme_names_every_command() -> None:
    for name in _COMMANDS:
        assert f"`{name}`" in _README or f"stagecoach {name}" in _README


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if not target.startswith("https://"):
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not heading or heading in _headings(path), f"{target}#{heading}"
    for name in re.findall(r"`([\w./-]+(?:/|\.(?:py|md|toml|txt|model)))`", text):
        # A bare file name speaks of the folder before it, or of a checkpoint's file.
        if "/" in name and "NAME" not in name:
            assert any((base / name).exists() for base in (_ROOT, _PACKAGE, _ROOT / "tests/cpu")), (
                name
            )


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_functions_classes_and_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file, name in re.findall(r"`([\w/]+\.py):(\w[\w.]*)`", text):
        assert name in _definitions(_PACKAGE / file), f"{file}:{name}"
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
        folder = "tests" if file.startswith(("e2e/", "gpu/")) else "tests/cpu"
        assert name in _definitions(_ROOT / folder / file), f"{file}::{name}"


def test_every_module_has_its_line() -> None:
    text = (_ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE)
        lines = [f"`{name}`"]
        # The modules of one operator, and families, share a line.
        if name.parent.parent == Path("kernels") or name.parent == Path("demo/families"):
            lines.append(f"`{name.parent}/`")
        assert path.name == "__init__.py" or any(line in text for line in lines), name


def test_every_invariant_has_its_line_once() -> None:
    text = (_ROOT / "docs/invariants.md").read_text(encoding="utf-8")
    listed: list[int] = []
    for cell in re.findall(r"^\| (I\d[I\d, –]*) \|", text, flags=re.MULTILINE):
        for part in cell.split(","):
            first, *last = map(int, re.findall(r"\d+", part))
            listed += range(first, (last[0] if last else first) + 1)
    assert sorted(listed) == list(_INVARIANTS)


def test_every_kind_of_field_bug_has_tests() -> None:
    text = (_ROOT / "docs/field-bugs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]\d\d) \|.*\| (.*) \|$", text, flags=re.MULTILINE)
    assert [kind for kind, _ in rows] == [
        *(f"F{number:02}" for number in (*range(1, 10), 11, 13, 14, 15)),
        *(f"G{number:02}" for number in range(1, 9)),
        *(f"H{number:02}" for number in (*range(2, 7), *range(8, 12))),
        "I01",
        "I02",
    ]
    for kind, tests in rows:
        assert re.search(r"`[\w/]+\.py::test_\w+`", tests), kind
