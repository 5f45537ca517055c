"""`stagecoach support`: what runs on which layout, from the compatibility table."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stagecoach.compatibility import rules, support_table


def support(
    *, markdown: Annotated[bool, typer.Option(help="Print the table of the README.")] = False
) -> None:
    """Print what is supported with which stages and ranks, and what is refused and why."""
    if markdown:
        typer.echo(support_table.render_markdown(), nl=False)
        return
    features = Table(title="What runs on which layout")
    features.add_column("", overflow="fold")
    for layout, _ in support_table.LAYOUTS:
        features.add_column(layout, overflow="fold")
    for row in support_table.support_table():
        features.add_row(row.feature, *row.cells)
    refused = Table(title="What is refused before anything starts")
    for name in ("rule", "what must hold", "why"):
        refused.add_column(name, overflow="fold")
    for rule in rules.TABLE:
        refused.add_row(rule.name, rule.requires, rule.reason)
    console = Console()
    console.print(features)
    console.print(refused)
