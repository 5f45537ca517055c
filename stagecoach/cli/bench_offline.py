"""`stagecoach bench latency` and `bench throughput`: an engine in this program, without HTTP.

Owns the options, in the shape of vLLM's commands of these names; the figures are defined in
benchmarks/offline.py.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from stagecoach.benchmarks import data_sets, report
from stagecoach.benchmarks.offline import measure_latency, summarize_throughput
from stagecoach.benchmarks.vocabulary import TokenizerVocabulary, alphabet
from stagecoach.config.engine import EngineConfig
from stagecoach.engine.step_trace import decode_use, prefill_use
from stagecoach.errors import ConfigError
from stagecoach.llm import LLM, OpenedModel, Prompt, open_model
from stagecoach.outputs import RequestOutput
from stagecoach.request import SamplingParams

_OutputJson = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the result as JSON to this file.")
]
_Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the last steps as a trace that Perfetto opens."),
]
_Model = Annotated[str, typer.Option(help="Checkpoint folder, or `demo` or `tiny`.")]
_Completions = Annotated[int, typer.Option("-n", "--n", help="Completions of each prompt.")]


def latency(
    *,
    model: _Model = "demo",
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt, all random.")] = 32,
    output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Prompts of a batch.")] = 8,
    n: _Completions = 1,
    num_iters_warmup: Annotated[int, typer.Option(help="Batches before those that count.")] = 10,
    num_iters: Annotated[int, typer.Option(help="Batches that count.")] = 30,
    output_json: _OutputJson = None,
    trace: _Trace = None,
    engine_options: dict[str, Any],
) -> None:
    """Time one batch of requests from beginning to end, again and again.

    The batch is the same each time, so the prefix cache is off unless switched on.
    """
    for option, value in (
        ("--batch-size", batch_size),
        ("--input-len", input_len),
        ("--output-len", output_len),
        ("--num-iters", num_iters),
    ):
        if value < 1:
            raise ConfigError(f"{option}={value}: must be at least 1")
    _make_room(output_json, trace)
    opened = open_model(EngineConfig(model=model, **engine_options))
    conversations = data_sets.random_requests(
        _alphabet(opened),
        _rng(opened),
        num_requests=batch_size,
        input_len=input_len,
        output_len=output_len,
    )
    prompts, params = _as_requests(conversations, n, opened)
    with LLM(opened) as llm:

        def run_batch() -> None:
            _check(llm.generate(prompts, params, use_tqdm=False))

        result = measure_latency(run_batch, num_warmups=num_iters_warmup, num_iterations=num_iters)
        used = _write_trace(llm, trace)
    sys.stdout.write(f"Avg latency: {result['avg_latency']:.6f} seconds\n")
    sys.stdout.write(f"Std latency: {result['std_latency']:.6f} seconds\n")
    for percentage, seconds in result["percentiles"].items():
        sys.stdout.write(f"{percentage}% percentile latency: {seconds:.6f} seconds\n")
    sys.stdout.write(used)
    if output_json is not None:
        report.save(output_json, result)


def throughput(
    *,
    model: _Model = "demo",
    dataset_name: Annotated[
        Literal["random", "sharegpt", "prefix-repetition"], typer.Option(help="What is asked.")
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ShareGPT file, for sharegpt.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts of the run.")] = 1000,
    input_len: Annotated[
        int,
        typer.Option(
            "--input-len", "--random-input-len", help="Tokens of a random prompt of its own."
        ),
    ] = 1024,
    output_len: Annotated[
        int | None,
        typer.Option(
            "--output-len",
            "--random-output-len",
            help="Tokens of an answer; default: 128, or as in the file.",
        ),
    ] = None,
    random_range_ratio: Annotated[
        float, typer.Option(help="Random lengths lie within this share of the given ones.")
    ] = 0.0,
    random_prefix_len: Annotated[
        int, typer.Option(help="Tokens that all prompts begin with, beside their own.")
    ] = 0,
    prefix_repetition_prefix_len: Annotated[
        int, typer.Option(help="Tokens of a shared beginning; the rest is --input-len.")
    ] = 256,
    prefix_repetition_num_prefixes: Annotated[
        int, typer.Option(help="Number of different shared beginnings.")
    ] = 10,
    n: _Completions = 1,
    output_json: _OutputJson = None,
    trace: _Trace = None,
    engine_options: dict[str, Any],
) -> None:
    """Complete many prompts at once and report requests and tokens a second."""
    if num_prompts < 1:
        raise ConfigError(f"--num-prompts={num_prompts}: must be at least 1")
    if (dataset_path is None) is (dataset_name == "sharegpt"):
        raise ConfigError(f"--dataset-name={dataset_name}: --dataset-path goes with sharegpt only")
    _make_room(output_json, trace)
    opened = open_model(EngineConfig(model=model, **engine_options))
    rng = _rng(opened)
    if dataset_path is not None:
        conversations = data_sets.share_gpt_requests(
            dataset_path,
            TokenizerVocabulary(opened.tokenizer),
            rng,
            num_requests=num_prompts,
            output_len=output_len,
        )
    elif dataset_name == "prefix-repetition":
        conversations = data_sets.prefix_repetition_requests(
            _alphabet(opened),
            rng,
            num_requests=num_prompts,
            num_prefixes=prefix_repetition_num_prefixes,
            prefix_len=prefix_repetition_prefix_len,
            suffix_len=input_len,
            output_len=128 if output_len is None else output_len,
        )
    else:
        conversations = data_sets.random_requests(
            _alphabet(opened),
            rng,
            num_requests=num_prompts,
            input_len=input_len,
            output_len=128 if output_len is None else output_len,
            range_ratio=random_range_ratio,
            prefix_len=random_prefix_len,
        )
    prompts, params = _as_requests(conversations, n, opened)
    with LLM(opened) as llm:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed_seconds = time.perf_counter() - start
        used = _write_trace(llm, trace)
    _check(outputs)
    result = summarize_throughput(
        elapsed_seconds,
        num_requests=len(outputs),
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(
            len(completion.token_ids) for output in outputs for completion in output.outputs
        ),
    )
    sys.stdout.write(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens: {result['num_prompt_tokens']}\n"
        f"Total num output tokens: {result['num_output_tokens']}\n{used}"
    )
    if output_json is not None:
        report.save(output_json, result)


def _make_room(*paths: Path | None) -> None:
    """Find out now, and not behind the run, that a file cannot be written."""
    for path in paths:
        if path is not None:
            report.make_room(path)


def _write_trace(llm: LLM, path: Path | None) -> str:
    """Write the trace, if one is asked for, and say how busy its stages were."""
    if path is None:
        return ""
    try:
        plans = llm.write_trace(path).plans
    except OSError as error:
        raise ConfigError(f"--trace={path}: cannot be written ({error.strerror})") from None
    lines = []
    for name, use in (("prefill", prefill_use(plans)), ("decode", decode_use(plans))):
        if use is not None:
            shares = " ".join(f"{share:.3f}" for share in use.busy_shares)
            lines.append(
                f"Busy share of each stage, {name}, {use.num_plans} plans: {shares} "
                f"(bound {use.bound:.3f})\n"
            )
    return "".join(lines)


def _alphabet(opened: OpenedModel) -> Sequence[int]:
    return alphabet(TokenizerVocabulary(opened.tokenizer), opened.config.engine.seed)


def _rng(opened: OpenedModel) -> np.random.Generator:
    return np.random.default_rng(opened.config.engine.seed)


def _as_requests(
    conversations: list[data_sets.Conversation], num_completions: int, opened: OpenedModel
) -> tuple[list[Prompt], list[SamplingParams]]:
    """Prompts, and how each is answered."""
    requests = [request for [request] in conversations]
    params = [
        SamplingParams(
            n=num_completions,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=request.num_output_tokens,
        )
        for request in requests
    ]
    for item in params:
        opened.check_params(item)
    return [request.prompt for request in requests], params


def _check(outputs: list[RequestOutput]) -> None:
    """End with status 1 where an answer is broken: its time means nothing."""
    errors = [item.error for output in outputs for item in output.outputs if item.error]
    if errors:
        sys.stderr.write(f"stagecoach: {len(errors)} answers failed; first: {errors[0]}\n")
        raise SystemExit(1)
