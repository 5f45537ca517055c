"""`stagecoach support`: what runs on which layout, from the compatibility table."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stagecoach import compatibility


def support(
    *, markdown: Annotated[bool, typer.Option(help="Print the table of the README.")] = False
) -> None:
    """Print what is supported with which stages and ranks, and what is refused and why."""
    if markdown:
        typer.echo(compatibility.render_markdown())
        return
    table = Table("", *(name for name, _ in compatibility.LAYOUTS))
    for row in compatibility.support_table():
        table.add_row(row.feature, *row.cells)
    Console().print(table)
