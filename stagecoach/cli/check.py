"""`stagecoach check`: a page of verdicts on a checkpoint, before a machine is rented for it."""

import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from stagecoach.checking.run import CheckOptions, run_checks
from stagecoach.checking.verdict import Report, Verdict
from stagecoach.config.engine import SpeculativeConfig
from stagecoach.errors import ConfigError

# Characters of a line, however narrow the terminal.
_LEAST_FOUND = 6
_COLORS = {"ok": "green", "failed": "bold red", "skipped": "yellow"}


def check(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or `demo` or `tiny`.")],
    *,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Draft checkpoint folder, or `demo-draft` or `tiny-draft`; short for "
            "--speculative-config '{\"model\": FOLDER}'.",
        ),
    ] = None,
    skip_values: Annotated[
        bool,
        typer.Option("--skip-values", help="Do not look for NaN, infinity and absurd values."),
    ] = False,
    skip_layers: Annotated[
        bool, typer.Option("--skip-layers", help="Run no layer and start no engine.")
    ] = False,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Memory for the weights that are loaded together. Default: 0.6 of what is free.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdicts as one JSON object.")
    ] = False,
    engine_options: dict[str, Any],
) -> None:
    """Open everything, and run the model group by group where it does not fit the memory.

    On the CPU, whatever the checkpoint's size. What is about to be read and how long that takes is
    told first. The exit status is 1 if a check failed.
    """
    _check_options(engine_options)
    if memory_gib is not None and memory_gib <= 0:
        raise ConfigError(f"--memory-gib={memory_gib:g}: must be above 0")
    if draft is not None:
        if engine_options.get("speculative_config") is not None:
            raise ConfigError("--draft and --speculative-config both name a draft; give one")
        engine_options = {**engine_options, "speculative_config": SpeculativeConfig(model=draft)}
    options = CheckOptions(
        model=model,
        engine={**engine_options, "device": "cpu"},
        has_values=not skip_values,
        has_layers=not skip_layers,
        memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
    )
    with _Page() as page:
        report = run_checks(options, page)
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        Console().print(_table(report))
    if not report.is_ok:
        raise SystemExit(1)


def _check_options(engine_options: dict[str, Any]) -> None:
    if engine_options.get("device", "auto") not in ("auto", "cpu"):
        raise ConfigError(f"--device={engine_options['device']}: checks run on the CPU")
    if engine_options.get("load_format", "auto") == "dummy":
        raise ConfigError("--load-format=dummy: there is nothing to check in random weights")


class _Page:
    """Follows a run on stderr: what is told, each verdict, and a bar where that is a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "_Page":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def reach(self, verdict: Verdict) -> None:
        self.tell(f"{verdict.check}: {verdict.status} ({verdict.seconds:.1f} s)")
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def advance(self, task: str, done_bytes: int, total_bytes: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task(task)
        self._bar.update(self._task, description=task, completed=done_bytes, total=total_bytes)


def _table(report: Report) -> Table:
    draft = f" with {report.draft}" if report.draft is not None else ""
    verdict = "everything that was checked holds" if report.is_ok else "not fit to be served"
    title = Text(f"{report.model}{draft}, {report.layout}: {verdict}", style="table.title")
    table = Table(title=title)
    table.add_column("check", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("found", overflow="fold", min_width=_LEAST_FOUND)
    for item in report.verdicts:
        status = Text(item.status, style=_COLORS[item.status])
        table.add_row(item.check, status, Text(item.detail))
    return table
