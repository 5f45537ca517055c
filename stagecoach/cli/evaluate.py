"""`stagecoach eval`: score a model on the demo's task families through the engine."""

import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from stagecoach.demo.evaluation import EvaluationReport, evaluate_model
from stagecoach.demo.tasks import FAMILIES
from stagecoach.errors import ConfigError
from stagecoach.llm import LLM


def evaluate(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder in the Kimi-K3 chat format, or `demo`.")
    ] = "demo",
    *,
    limit: Annotated[
        int, typer.Option(help="Examples of each task family, from seeds never trained on.")
    ] = 100,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAMILY",
            help=f"One of {', '.join(FAMILIES)}; may be repeated. Default: all.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 1024,
    eval_seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
    engine_options: dict[str, Any],
) -> None:
    """Answer held-out examples greedily and report the share answered exactly right."""
    families = tuple(task or FAMILIES)
    for family in families:
        if family not in FAMILIES:
            raise ConfigError(f"--task={family}: must be one of {', '.join(FAMILIES)}")
    if limit < 1:
        raise ConfigError(f"--limit={limit}: must be at least 1")
    with LLM(model, **engine_options) as llm:
        report = evaluate_model(
            llm, families=families, limit=limit, seed=eval_seed, max_tokens=max_tokens
        )
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        Console().print(_table(report))


def _table(report: EvaluationReport) -> Table:
    table = Table("task", "exactly right", "examples", title=f"{report.model}: {report.engine}")
    for family, score in report.tasks.items():
        table.add_row(family, f"{score:.1%}", str(report.num_examples))
    return table
