"""The command line: `stagecoach COMMAND`.

Owns the list of commands and the exit status: 0 only if the command did what it says. Results
go to stdout, everything else to stderr.
"""

import sys

import typer

from stagecoach.cli import bench, bench_offline
from stagecoach.cli.chat import chat
from stagecoach.cli.check import check
from stagecoach.cli.demo import demo
from stagecoach.cli.evaluate import evaluate
from stagecoach.cli.fuzz import fuzz
from stagecoach.cli.generate import generate
from stagecoach.cli.options import with_engine_options, with_server_options
from stagecoach.cli.plan import plan
from stagecoach.cli.serve import serve
from stagecoach.cli.support import support
from stagecoach.errors import StagecoachError

app = typer.Typer(
    name="stagecoach",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    help="Serve Kimi-K3-class models across pipeline stages and tensor-parallel ranks.",
)
for _name, _command, _summary in (
    (
        "serve",
        with_engine_options(with_server_options(serve)),
        "Serve a model to clients of OpenAI and Anthropic.",
    ),
    ("generate", with_engine_options(generate), "Complete one or many prompts."),
    (
        "demo",
        with_engine_options(
            demo, pipeline_parallel_size=2, tensor_parallel_size=2, log_level="warning"
        ),
        "Show the bundled model at work.",
    ),
    ("eval", with_engine_options(evaluate), "Score a model on held-out tasks."),
    (
        "fuzz",
        with_engine_options(fuzz, log_level="warning"),
        "Try random schedules and compare every answer.",
    ),
    (
        "check",
        with_engine_options(check, pipeline_parallel_size=2, log_level="warning"),
        "Verify a checkpoint, layer by layer where it does not fit.",
    ),
    ("plan", with_engine_options(plan), "Whether an engine fits its GPUs, and how fast it is."),
    ("chat", chat, "Talk to a model behind a server."),
    ("support", support, "What runs on which layout, and what is refused."),
):
    app.command(_name, short_help=_summary)(_command)

bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for _name, _command, _summary in (
    ("serve", bench.serve, "Load on a server, and what it measured."),
    (
        "latency",
        with_engine_options(bench_offline.latency, enable_prefix_caching=False),
        "Seconds of one batch.",
    ),
    ("throughput", with_engine_options(bench_offline.throughput), "Tokens a second."),
):
    bench_app.command(_name, short_help=_summary)(_command)
_SUMMARY = "Measure a server or an engine."
app.add_typer(bench_app, name="bench", short_help=_SUMMARY, help=_SUMMARY)


def main() -> None:
    """Run one command; errors that were raised on purpose are one line on stderr."""
    try:
        app()
    except StagecoachError as error:
        sys.stderr.write(f"stagecoach: {type(error).__name__}: {error}\n")
        raise SystemExit(1) from None
    except BrokenPipeError:
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
