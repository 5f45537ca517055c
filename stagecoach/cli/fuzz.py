"""`stagecoach fuzz`: random schedules on a model and an engine, each compared with one-shot."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from stagecoach.config.engine import SpeculativeConfig
from stagecoach.errors import CapacityError, CheckpointError, ConfigError
from stagecoach.fuzz import script as scripts
from stagecoach.fuzz.campaign import Campaign, Failure, Limits, Runs, Totals
from stagecoach.fuzz.given import find_given, refuse_options
from stagecoach.fuzz.play import Player
from stagecoach.fuzz.processes import ProcessPlayer
from stagecoach.fuzz.script import Script

_DEFAULT_SECONDS = 60.0


def fuzz(
    *,
    model: Annotated[str, typer.Option(help="Checkpoint folder, or `demo` or `tiny`.")] = "tiny",
    seconds: Annotated[
        float | None,
        typer.Option(help="Stop after that long. Default: 60, unless --schedules says when."),
    ] = None,
    schedules: Annotated[int | None, typer.Option(help="Stop after that many schedules.")] = None,
    max_mismatches: Annotated[
        int, typer.Option(help="Stop after that many schedules that failed.")
    ] = 10,
    processes: Annotated[
        bool,
        typer.Option(
            "--processes",
            help="Run each schedule on an engine of real processes. Slower by far, and requests "
            "arrive by what has been answered so far, so a run is not exactly repeatable.",
        ),
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Run the schedule in this file and no other; engine options on the command line "
            "win over those in the file.",
        ),
    ] = None,
    save_to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where schedules that fail are written.")
    ] = Path("fuzz-failures"),
    shrink_seconds: Annotated[
        float, typer.Option(help="Time for making a schedule that fails short; 0: leave it.")
    ] = 60.0,
    engine_options: dict[str, Any],
) -> None:
    """Run random schedules and compare every request with what it returns alone.

    Each schedule is an engine and a few requests: prompts of lengths around every boundary that
    share beginnings or go on from earlier answers, greedy and sampled, some of them aborted;
    stages and ranks, chunk budgets, drafts, pools so small that requests are preempted and cached
    prefixes evicted. Any engine option that is given is fixed, all others are drawn, so what is
    tried is your own configuration under traffic of every kind. Free memory is filled with NaN.

    A request must return the tokens of a one-shot run: alone, one stage, one rank, no cache, no
    drafts, its prompt in one chunk. That is exact in float64, in which everything runs. The same
    --seed and options draw the same schedules.

    A schedule that fails is made as short as can be and written to a file for --replay. The last
    line of stdout is a JSON object with the counts. The exit status is 1 if anything failed.
    """
    try:
        _check_limits(seconds, schedules, max_mismatches)
        refuse_options(engine_options, is_exact=not processes)
        options = as_json_options(engine_options)
        seed = options.get("seed", 0)
        # Of a small model's operators each is too short to share: threads only wait for each other.
        torch.set_num_threads(max(1, options.get("num_threads") or 1))
        player: Runs = ProcessPlayer() if processes else Player()
        if replay is None:
            totals = _fuzz(
                Campaign(find_given(model, options, is_costly=processes), seed, player, save_to),
                Limits(
                    _DEFAULT_SECONDS if seconds is None and schedules is None else seconds,
                    schedules,
                    max_mismatches,
                    shrink_seconds,
                ),
            )
        else:
            totals = _replay(player, scripts.read(replay), options)
    except (ConfigError, CapacityError, CheckpointError) as error:
        raise typer.BadParameter(str(error)) from None
    sys.stdout.write(json.dumps(msgspec.structs.asdict(totals)) + "\n")
    if totals.mismatches:
        raise typer.Exit(1)


def as_json_options(engine_options: dict[str, Any]) -> dict[str, Any]:
    """Engine options as they stand in a script, whose dtype is always float64."""
    options = {name: value for name, value in engine_options.items() if name != "dtype"}
    speculation = options.get("speculative_config")
    if isinstance(speculation, SpeculativeConfig):
        # What follows the clock is off unless it was asked for.
        options["speculative_config"] = {"confidence_schedule": False, "watchdog": False} | {
            name: value
            for name, value in msgspec.to_builtins(speculation).items()
            if value is not None
        }
    if options.get("pp_partition") is not None:
        options["pp_partition"] = list(options["pp_partition"])
    return options


def _check_limits(seconds: float | None, schedules: int | None, max_mismatches: int) -> None:
    if seconds is not None and seconds <= 0:
        raise ConfigError(f"--seconds={seconds:g}: must be above 0")
    for name, count in (("schedules", schedules), ("max-mismatches", max_mismatches)):
        if count is not None and count < 1:
            raise ConfigError(f"--{name}={count}: must be at least 1")


def _fuzz(campaign: Campaign, limits: Limits) -> Totals:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading")

        def on_schedule(totals: Totals) -> None:
            counts = msgspec.structs.asdict(totals).items()
            bar.update(task, description=", ".join(f"{count} {name}" for name, count in counts))

        def show(failure: Failure) -> None:
            console.print(described(failure), markup=False, highlight=False, soft_wrap=True)

        try:
            campaign.run(limits, on_schedule, show)
        except KeyboardInterrupt:
            console.print("interrupted")
    return campaign.totals


def described(failure: Failure) -> str:
    """A failure for a person: what is wrong, the shortest script, and how to run it again."""
    shrunk = failure.shrunk
    lines = [f"\n{failure.name} failed: {failure.finding.kind}: {failure.finding.text}"]
    if shrunk.num_runs:
        lines += [
            f"shrunk in {shrunk.num_runs} runs from {len(failure.script.requests)} requests to "
            f"{len(shrunk.script.requests)}, which fail so: {shrunk.finding.kind}: "
            f"{shrunk.finding.text}"
        ]
    lines += [scripts.encode(shrunk.script), f"replay: stagecoach fuzz --replay {failure.path}\n"]
    return "\n".join(lines)


def _replay(player: Runs, script: Script, options: dict[str, Any]) -> Totals:
    script = msgspec.structs.replace(script, engine=script.engine | options)
    outcome = player.play(script)
    totals = Totals()
    totals.add(outcome)
    console = Console(stderr=True, markup=False, highlight=False)
    for index, played in enumerate(outcome.requests):
        answer = played.answer
        ending = "aborted" if played.is_aborted else answer.finish_reason
        console.print(
            f"request {index}: {len(answer.token_ids)} tokens, {played.num_cached_tokens} prompt "
            f"tokens from the cache, {ending}"
        )
    if outcome.finding is not None:
        console.print(f"{outcome.finding.kind}: {outcome.finding.text}")
    return totals
