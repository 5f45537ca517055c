"""`stagecoach plan`: whether an engine fits its GPUs, and how fast it would be."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from stagecoach.checkpoint_folder import checkpoint_folder, draft_folder
from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.costs.machine import MACHINES, Machine
from stagecoach.errors import ConfigError
from stagecoach.planning.planner import make_plan
from stagecoach.planning.report import Plan
from stagecoach.published import DRAFTS, MODELS, published_folder

_LEAST_WIDTH, _MOST_WIDTH = 80, 1000
_NAMES = ", ".join(f"`{name}`" for name in MODELS)


def plan(
    model: Annotated[str, typer.Argument(help=f"Checkpoint folder, {_NAMES}, `demo` or `tiny`.")],
    *,
    gpu: Annotated[str, typer.Option(help=f"Kind of the GPUs: {', '.join(MACHINES)}.")] = "h200",
    gpu_memory: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="Memory of one GPU. Default: what its kind has."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Cached tokens of each request in the times of decoding. Default: 8192, or half "
            "of the longest request."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as one JSON object.")
    ] = False,
    engine_options: dict[str, Any],
) -> None:
    """Plan an engine without starting it: memory of every stage, requests by context, times.

    Needs no GPU and reads no weights: a folder with a config.json is enough. The options are
    those of `serve`; --device cpu plans for this machine's CPUs, without times. What is
    estimated is marked. The exit status is 1 where it does not fit.
    """
    if gpu not in MACHINES:
        raise ConfigError(f"--gpu={gpu}: must be one of {', '.join(MACHINES)}")
    if gpu_memory is not None and gpu_memory < 1:
        raise ConfigError(f"--gpu-memory={gpu_memory}: must be a number of bytes above 0")
    if context is not None and context < 1:
        raise ConfigError(f"--context={context}: must be at least 1")
    engine = EngineConfig(model=_folder(model), **_with_named_draft(engine_options))
    is_on_cpu = engine.device == "cpu" or engine.dtype == "float64"
    machine: Machine | None = None if is_on_cpu else MACHINES[gpu]
    made = make_plan(engine, machine, gpu_memory, context=context, model_name=model)
    if as_json:
        sys.stdout.write(msgspec.json.encode(made).decode() + "\n")
    else:
        _print(made)
    if not made.fits:
        raise SystemExit(1)


def _folder(model: str) -> str:
    return _published_or(checkpoint_folder, model, MODELS)


def _with_named_draft(options: dict[str, Any]) -> dict[str, Any]:
    """A published draft may be named as its target is."""
    speculative = options.get("speculative_config")
    if not isinstance(speculative, SpeculativeConfig):
        return options
    folder = _published_or(draft_folder, speculative.model, DRAFTS)
    return {**options, "speculative_config": dataclasses.replace(speculative, model=folder)}


def _published_or(find: Callable[[str], Path], model: str, names: tuple[str, ...]) -> str:
    """The folder of a published name; otherwise the name of whatever else there is.

    Raises:
        ConfigError: there is no such folder.
    """
    if model in names:
        return str(published_folder(model))
    try:
        find(model)
    except ConfigError as error:
        raise ConfigError(f"{error}; published are {', '.join(names)}") from None
    return model


def _print(made: Plan) -> None:
    numbers = [_memory_table(made)]
    if made.gpu:
        numbers.append(_rest_table(made))
    numbers.append(_unit_table(made))
    others: list[Table | str] = [*made.problems]
    others += [f"It would fit with {remedy}" for remedy in made.remedies]
    if made.fits:
        others.append(_context_table(made))
        if made.decode:
            others.append(_time_table(made))
        if made.partitions:
            others.append(_partition_table(made))
    console = Console()
    # Lines that a terminal breaks lose nothing; numbers that a table breaks are misread.
    unbounded = console.options.update_width(_MOST_WIDTH)
    needed = [Measurement.get(console, unbounded, table).maximum for table in numbers]
    console.width = max(console.width, _LEAST_WIDTH, *needed)
    for part in (*numbers, *others):
        console.print(part, highlight=False)


def _memory_table(made: Plan) -> Table:
    """GiB of one rank, a line a stage."""
    where = f"{made.gpu}, {_gib(made.gpu_bytes)} GiB each" if made.gpu else "CPU"
    layout = f"pp {made.pipeline_parallel_size}, tp {made.tensor_parallel_size}"
    title = f"{made.model}: {layout}, {where}, {made.dtype}\nGiB of a rank"
    columns: dict[str, tuple[str, ...]] = {
        "weights": ("weight_bytes",),
        "draft": ("drafter_bytes",),
        "pages": ("page_bytes",),
        "slots": ("slot_bytes",),
        "check-\npoints": ("checkpoint_bytes",),
        "rest ~": ("context_bytes", "activation_bytes", "graph_bytes"),
        "in all": ("total_bytes",),
        "spare": ("spare_bytes",) if made.gpu else (),
        "host": ("host_bytes",),
    }
    return _stage_table(made, title, columns, caption=_caption(made))


def _rest_table(made: Plan) -> Table:
    """What is estimated of a GPU's memory."""
    columns: dict[str, tuple[str, ...]] = {
        "driver, libraries": ("context_bytes",),
        "activations": ("activation_bytes",),
        "graphs": ("graph_bytes",),
    }
    return _stage_table(made, "GiB of the rest, estimated", columns)


def _stage_table(
    made: Plan, title: str, columns: dict[str, tuple[str, ...]], *, caption: str | None = None
) -> Table:
    """Sums of fields in GiB; columns of nothing are left out."""
    sizes = {
        name: [sum(getattr(stage, field) for field in fields) for stage in made.stages]
        for name, fields in columns.items()
    }
    kept = [name for name, of_stages in sizes.items() if any(of_stages)]
    table = Table(title=title, caption=caption)
    table.add_column("stage:\nlayers", no_wrap=True)
    _add_numbers(table, kept)
    for stage in made.stages:
        last = stage.first_layer + stage.num_layers - 1
        numbers = [_gib(sizes[name][stage.stage]) for name in kept]
        table.add_row(f"{stage.stage}: {stage.first_layer}..{last}", *numbers)
    return table


def _unit_table(made: Plan) -> Table:
    """Bytes of what is counted, a line a stage."""
    columns = {"a page": "bytes_per_page", "a state slot": "bytes_per_slot"}
    title = "Bytes of each"
    if len(made.stages) > 1:
        title += "; to the next stage, over all its ranks"
        columns |= {
            "of a token": "boundary_bytes_per_token",
            "of a decode step": "boundary_bytes_per_step",
            "of a chunk": "boundary_bytes_per_chunk",
        }
    table = Table("stage", title=title)
    _add_numbers(table, columns)
    for stage in made.stages:
        numbers = [f"{getattr(stage, field):,}" for field in columns.values()]
        table.add_row(str(stage.stage), *numbers)
    return table


def _caption(made: Plan) -> str:
    if not made.fits:
        return "does not fit; ~: estimated"
    text = (
        f"{made.num_pages - 1:,} pages, slots for {made.max_num_seqs} requests and "
        f"{made.num_checkpoints} checkpoints"
    )
    if made.gpu:
        text += "; ~: estimated"
    if made.num_host_pages or made.num_host_slots:
        text += f"; on the host {made.num_host_pages:,} pages, {made.num_host_slots} checkpoints"
    return text


def _context_table(made: Plan) -> Table:
    table = Table(title="Requests by length")
    _add_numbers(table, ("tokens of a request", "at once, as planned", "at most"))
    for item in made.contexts:
        table.add_row(f"{item.context:,}", f"{item.planned:,}", f"{item.most:,}")
    table.caption = "at most: no checkpoints, --max-num-seqs so high"
    return table


def _time_table(made: Plan) -> Table:
    basis = "rates measured" if made.is_measured else "rates scaled from an H200's"
    table = Table("what", "ms", title=f"Estimated times ({basis})")
    _add_numbers(table, ("tokens/s",))
    for item in made.decode:
        busy = " + ".join(f"{1e3 * seconds:.2f}" for seconds in item.stage_seconds[:4])
        more = " + ..." if len(item.stage_seconds) > 4 else ""
        table.add_row(
            f"decode step, {item.num_requests} at once, {item.context:,} tokens cached",
            f"{1e3 * item.step_seconds:.2f}" + (f" ({busy}{more})" if more or "+" in busy else ""),
            f"{item.tokens_per_second:,.0f}",
        )
    for prompt in made.prefill:
        table.add_row(
            f"prompt of {prompt.prompt_tokens:,} tokens, alone",
            f"{1e3 * prompt.seconds:.0f}",
            f"{prompt.tokens_per_second:,.0f}",
        )
    rate = made.prefill[0].saturated_tokens_per_second
    table.add_row("many prompts", "", f"{rate:,.0f}")
    if made.num_draft_tokens:
        table.caption = (
            f"a step verifies {made.num_draft_tokens} drafts a request; tokens/s are without "
            "those that are accepted"
        )
    return table


def _partition_table(made: Plan) -> Table:
    table = Table("most even in", title="Partitions")
    table.add_column("layers", overflow="fold")
    numbers = (
        f"at most of\n{made.max_model_len:,}",
        f"step of {made.partitions[0].num_requests},\nms",
        "prefill\ntokens/s",
    )
    _add_numbers(table, numbers)
    for item in made.partitions:
        table.add_row(
            ", ".join(item.balances),
            ",".join(map(str, item.partition)),
            f"{item.most_requests:,}" if item.fits else "does not fit",
            f"{1e3 * item.step_seconds:.2f}",
            f"{item.prefill_tokens_per_second:,.0f}",
        )
    return table


def _add_numbers(table: Table, names: Iterable[str]) -> None:
    """Columns that are neither broken nor cut."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
