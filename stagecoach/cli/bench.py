"""`stagecoach bench serve`: load against any OpenAI-compatible server, and what it measured.

Owns the order of a run; data, load and figures are the work of benchmarks/.
"""

import asyncio
import dataclasses
import inspect
import sys
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stagecoach.benchmarks import data_sets, report
from stagecoach.benchmarks.arrivals import arrival_seconds
from stagecoach.benchmarks.connection import (
    first_model,
    request_headers,
    setup_client,
    wait_until_ready,
)
from stagecoach.benchmarks.data_sets import Conversation
from stagecoach.benchmarks.load import ENDPOINTS, LoadGenerator, LoadResult, Target
from stagecoach.benchmarks.metrics import (
    RequestRecord,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    summarize,
)
from stagecoach.benchmarks.vocabulary import Vocabulary, alphabet, server_vocabulary
from stagecoach.cli.bench_options import ServeOptions
from stagecoach.errors import ServerError


def serve(**arguments: Any) -> None:
    """Send requests to an OpenAI-compatible server and report throughput and latency.

    Prompts of random tokens unless --dataset-name says otherwise. Exit status 1 if all failed.
    """
    options = ServeOptions(**arguments)
    metrics = parse_metrics(options.percentile_metrics)
    percentiles = parse_percentiles(options.metric_percentiles)
    bounds = parse_goodput(options.goodput or ())
    metadata = options.metadata_fields()
    rng = np.random.default_rng(options.seed)
    target, conversations = _prepare(options, rng)
    arrivals = arrival_seconds(len(conversations), options.request_rate, options.burstiness, rng)
    ran = asyncio.run(_run(target, options, conversations, arrivals))
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": target.model,
        "num_prompts": options.num_prompts,
        **metadata,
        "request_rate": report.rate_or_inf(options.request_rate),
        "burstiness": report.rate_or_inf(options.burstiness),
        "max_concurrency": options.max_concurrency,
        **summarize(*ran, percentile_metrics=metrics, percentiles=percentiles, goodput=bounds),
    }
    whole = result | (report.details(ran.records) if options.save_detailed else {})
    sys.stdout.write(
        report.to_json(whole) + "\n"
        if options.as_json
        else report.table(result, metrics, percentiles)
    )
    if options.save_result:
        path = report.result_path(options.result_dir, options.result_filename, result)
        report.save(path, whole)
    _tell_failures(ran.records)


# The command line reads the signature: one flag for each field.
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in dataclasses.fields(ServeOptions)
    ]
)
serve.__annotations__ = {field.name: field.type for field in dataclasses.fields(ServeOptions)}


def _prepare(options: ServeOptions, rng: np.random.Generator) -> tuple[Target, list[Conversation]]:
    """Ask the server for what the run needs to know, and make its requests."""
    headers = request_headers(options.api_key, options.header or ())
    fields = options.request_fields()
    with setup_client(options.url, headers) as client:
        if options.ready_check_timeout_sec > 0:
            wait_until_ready(client, options.ready_check_timeout_sec)
        model = options.model or first_model(client)
        vocabulary = server_vocabulary(client, model)
        if not vocabulary.is_exact:
            sys.stderr.write("The server has no /tokenize: a word counts as a token.\n")
        conversations = _make_conversations(options, vocabulary, rng)
    target = Target(
        base_url=options.url,
        endpoint=options.endpoint or ENDPOINTS[options.backend],
        backend=options.backend,
        model=model,
        headers=headers,
        fields=fields,
        request_id_prefix=options.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-",
        timeout_seconds=options.request_timeout_sec,
        continuous_usage=options.continuous_usage,
    )
    return target, conversations


def _make_conversations(
    options: ServeOptions, vocabulary: Vocabulary, rng: np.random.Generator
) -> list[Conversation]:
    if options.dataset_path is not None:
        made = _from_file(options, options.dataset_path, vocabulary, rng)
    else:
        made = _from_random_tokens(options, alphabet(vocabulary, options.seed), rng)
    is_text = options.backend == "openai-chat" or not vocabulary.is_exact
    return data_sets.as_text(made, vocabulary) if is_text else made


def _from_file(
    options: ServeOptions, path: Path, vocabulary: Vocabulary, rng: np.random.Generator
) -> list[Conversation]:
    if options.dataset_name == "sharegpt":
        return data_sets.share_gpt_requests(
            path,
            vocabulary,
            rng,
            num_requests=options.num_prompts,
            output_len=options.sharegpt_output_len,
        )
    return data_sets.share_gpt_conversations(
        path,
        vocabulary,
        rng,
        num_requests=options.num_prompts,
        num_turns=options.multi_turn_num_turns,
        output_len=options.random_output_len,
    )


def _from_random_tokens(
    options: ServeOptions, token_ids: Sequence[int], rng: np.random.Generator
) -> list[Conversation]:
    if options.dataset_name == "prefix-repetition":
        return data_sets.prefix_repetition_requests(
            token_ids,
            rng,
            num_requests=options.num_prompts,
            num_prefixes=options.prefix_repetition_num_prefixes,
            prefix_len=options.prefix_repetition_prefix_len,
            suffix_len=options.prefix_repetition_suffix_len,
            output_len=options.prefix_repetition_output_len,
        )
    if options.dataset_name == "multi-turn":
        return data_sets.multi_turn_conversations(
            token_ids,
            rng,
            num_requests=options.num_prompts,
            num_turns=options.multi_turn_num_turns,
            input_len=options.random_input_len,
            output_len=options.random_output_len,
            prefix_len=options.random_prefix_len,
        )
    return data_sets.random_requests(
        token_ids,
        rng,
        num_requests=options.num_prompts,
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
    )


async def _run(
    target: Target,
    options: ServeOptions,
    conversations: list[Conversation],
    arrivals: list[float],
) -> LoadResult:
    """The trial, the warm-ups, then the run itself."""
    generator = LoadGenerator(
        target,
        max_concurrency=options.max_concurrency,
        turn_delay_seconds=options.multi_turn_delay_sec,
    )
    async with generator:
        first = conversations[0][:1]
        if options.ready_check_timeout_sec > 0:
            [trial] = (await generator.run([first], [0.0])).records
            if trial.answer is None:
                raise ServerError(f"the first request failed: {trial.error}")
        await generator.run([first] * options.num_warmups, [0.0] * options.num_warmups)
        with _progress(is_shown=not options.disable_tqdm) as bar:
            task = bar.add_task("Requests", total=options.num_prompts)

            def advance(_: RequestRecord) -> None:
                bar.update(task, advance=1)

            return await generator.run(conversations, arrivals, on_finish=advance)


def _progress(*, is_shown: bool) -> Progress:
    """A bar on stderr that vanishes when done; none where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not (is_shown and console.is_terminal),
        transient=True,
    )


def _tell_failures(records: list[RequestRecord]) -> None:
    """The number of failed requests and the first one's error, on stderr; status 1 if all."""
    errors = [record.error for record in records if record.answer is None]
    if errors:
        sys.stderr.write(f"{len(errors)} of {len(records)} requests failed; first: {errors[0]}\n")
    if len(errors) == len(records):
        raise SystemExit(1)
