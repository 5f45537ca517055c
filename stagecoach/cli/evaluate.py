"""`stagecoach eval`: score a model on the demo's task families through the engine."""

import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from stagecoach.config.engine import EngineConfig
from stagecoach.demo.evaluation import EvaluationReport, SpeculationReport, evaluate_model
from stagecoach.demo.tasks import FAMILIES
from stagecoach.errors import ConfigError
from stagecoach.llm import LLM, open_model
from stagecoach.request import SamplingParams


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
    num_fewshot: Annotated[
        int,
        typer.Option(help="Solved examples of the same family before each question."),
    ] = 0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 1024,
    temperature: Annotated[
        float,
        typer.Option(help="Randomness of the answers, drawn with --seed; 0: the likeliest tokens."),
    ] = 0.0,
    eval_seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
    engine_options: dict[str, Any],
) -> None:
    """Answer held-out examples and report the share answered exactly right.

    With a draft (--speculative-config), report the tokens of a verify round as well, and with
    prefix caching the share of prompt tokens that were cached. An answer that ends with an error
    counts as wrong, is named on stderr, and makes the exit status 1.
    """
    families = tuple(task or FAMILIES)
    for family in families:
        if family not in FAMILIES:
            raise ConfigError(f"--task={family}: must be one of {', '.join(FAMILIES)}")
    if limit < 1:
        raise ConfigError(f"--limit={limit}: must be at least 1")
    if num_fewshot < 0:
        raise ConfigError(f"--num-fewshot={num_fewshot}: must not be negative")
    opened = open_model(EngineConfig(model=model, **engine_options))
    opened.check_params(SamplingParams(temperature=temperature, max_tokens=max_tokens))
    with LLM(opened) as llm:
        report = evaluate_model(
            llm,
            families=families,
            limit=limit,
            seed=eval_seed,
            max_tokens=max_tokens,
            temperature=temperature,
            num_fewshot=num_fewshot,
        )
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        console = Console()
        console.print(_table(report))
        if report.speculation is not None:
            console.print(_acceptance_table(report.speculation))
    errors = [
        f"stagecoach: {item.error} (task {item.task}, example {item.index})\n"
        for item in report.wrong
        if item.error is not None
    ]
    if errors:
        sys.stderr.writelines(errors)
        raise SystemExit(1)


def _table(report: EvaluationReport) -> Table:
    table = Table("task", "exactly right", "examples", title=f"{report.model}: {report.engine}")
    if report.cached_share is not None:
        table.caption = f"{report.cached_share:.1%} of the prompts' tokens were cached"
    if report.speculation is not None:
        table.add_column("tokens a round")
    for family, score in report.tasks.items():
        row = [family, f"{score:.1%}", str(report.num_examples)]
        if report.speculation is not None:
            row.append(_shown(report.speculation.tokens_per_round_by_task[family], ".2f"))
        table.add_row(*row)
    return table


def _acceptance_table(report: SpeculationReport) -> Table:
    counts = report.counts
    table = Table(
        "place",
        "drafts verified",
        "accepted",
        title=f"{_shown(report.tokens_per_round, '.2f')} tokens a round: {counts.num_windows} "
        f"rounds accepted {counts.num_accepted_tokens} of {counts.num_draft_tokens} drafts",
    )
    for place, share in enumerate(report.acceptance_per_position, start=1):
        table.add_row(str(place), str(counts.drafted_per_position[place - 1]), _shown(share, ".1%"))
    return table


def _shown(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
