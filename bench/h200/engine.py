"""The engine at real sizes: decode at several concurrencies, and prefill.

Prompts of 1,024 random ids, 256 tokens out, greedy, all requests handed over at once; a step is
(time(256 out) - time(1 out)) / 255, median of the runs. Weights are random, the prefix cache is
off. With --accept a draft of random weights proposes 7 tokens, of which so many stand on average.
A line a point, and with --out a JSON part.

    python -m bench.h200.engine -pp 2 --concurrency 1,8,64,256 --prefill 8192,131072 --out DIR
    python -m bench.h200.engine --shape kimi-k3-slice --accept 3.84 --concurrency 1,8,32
"""

import argparse
import gc
import queue
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.h200 import shapes
from bench.h200.parts import write_part
from stagecoach import LLM, SamplingParams
from stagecoach.config.engine import CACHE_DTYPES, PACKED_MODES
from stagecoach.config.quantization import ONLINE_METHODS

PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 256
MAX_BATCHED_TOKENS = 8192
NUM_DRAFT_TOKENS = 7
SHAPES = {"kimi-linear": shapes.kimi_linear_48b, "kimi-k3-slice": shapes.kimi_k3_slice}


class Batch(NamedTuple):
    """One batch from the hand-over to the last token."""

    seconds: float
    first_token_seconds: float  # mean over the requests
    token_seconds: float  # between tokens of a request, mean over the requests


def random_prompt(source: random.Random, length: int, vocab_size: int) -> list[int]:
    return source.choices(range(512, vocab_size), k=length)


def run_batch(llm: LLM, prompts: list[list[int]], num_output_tokens: int) -> Batch:
    """All prompts at once; returns when all have `num_output_tokens`."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    news: queue.SimpleQueue[tuple[int, Any, float]] = queue.SimpleQueue()
    gc.collect()
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        llm.client.submit(
            prompt,
            params,
            lambda item, number=number: news.put((number, item, time.perf_counter())),
        )
    counts = [0] * len(prompts)
    first, last = [0.0] * len(prompts), [0.0] * len(prompts)
    while sum(counts) < num_output_tokens * len(prompts):
        number, item, now = news.get(timeout=240)
        if isinstance(item, BaseException):
            raise item
        if item.error:
            raise RuntimeError(item.error)
        if not counts[number]:
            first[number] = now
        counts[number] += len(item.token_ids)
        last[number] = now
    gaps = [
        (end - start) / max(1, num_output_tokens - 1)
        for start, end in zip(first, last, strict=True)
    ]
    return Batch(
        seconds=max(last) - began,
        first_token_seconds=statistics.mean(first) - began,
        token_seconds=statistics.mean(gaps),
    )


def measure_decode(
    llm: LLM, concurrency: int, runs: int, source: random.Random, output: int = OUTPUT_TOKENS
) -> dict[str, Any]:
    """Step time and rates at one concurrency: medians."""
    vocab_size = llm.config.model.vocab_size

    def prompts() -> list[list[int]]:
        return [random_prompt(source, PROMPT_TOKENS, vocab_size) for _ in range(concurrency)]

    run_batch(llm, prompts(), 16)  # what this size meets first
    before = llm.stats()
    long = [run_batch(llm, prompts(), output) for _ in range(runs)]
    after = llm.stats()
    short = [run_batch(llm, prompts(), 1) for _ in range(runs)]
    long_seconds = statistics.median(item.seconds for item in long)
    step = (long_seconds - statistics.median(item.seconds for item in short)) / (output - 1)
    num_steps = after.num_steps - before.num_steps
    return {
        "concurrency": concurrency,
        "step_ms": 1e3 * step,
        "request_ms": 1e3 * statistics.median(item.token_seconds for item in long),
        "output_tokens_per_second": concurrency * output / long_seconds,
        "decode_tokens_per_second": concurrency / step,
        "first_token_ms": 1e3 * statistics.median(item.first_token_seconds for item in long),
        "prefill_tokens_per_second": concurrency
        * PROMPT_TOKENS
        / statistics.median(item.seconds for item in short),
        "run_seconds": [item.seconds for item in long],
        "loop_ms_per_step": 1e3 * (after.loop_seconds - before.loop_seconds) / num_steps,
        "stage_busy_share": [
            (late - early) / sum(item.seconds for item in long)
            for late, early in zip(after.stage_busy_seconds, before.stage_busy_seconds, strict=True)
        ],
    }


def measure_prefill(llm: LLM, length: int, runs: int, source: random.Random) -> dict[str, Any]:
    """One prompt, one token out."""
    vocab_size = llm.config.model.vocab_size
    before = llm.stats()
    batches = [run_batch(llm, [random_prompt(source, length, vocab_size)], 1) for _ in range(runs)]
    after = llm.stats()
    seconds = statistics.median(item.seconds for item in batches)
    total = sum(item.seconds for item in batches)
    return {
        "length": length,
        "seconds": seconds,
        "tokens_per_second": length / seconds,
        "runs": [item.seconds for item in batches],
        "stage_busy_share": [
            (late - early) / total
            for late, early in zip(after.stage_busy_seconds, before.stage_busy_seconds, strict=True)
        ],
    }


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "device": "cuda",
        "load_format": "dummy",
        "pipeline_parallel_size": arguments.pp,
        "tensor_parallel_size": arguments.tp,
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "max_model_len": arguments.max_model_len,
        "enable_prefix_caching": False,
        "enforce_eager": arguments.enforce_eager,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "online_quantization": arguments.online_quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "mxfp4_experts": arguments.mxfp4_experts,
        "log_level": arguments.log_level,
    }
    if arguments.accept:
        follows = arguments.online_quantization != "none"
        options["speculative_config"] = {
            "model": str(shapes.write_folder(shapes.kimi_k3_draft(), is_draft=True)),
            "num_speculative_tokens": NUM_DRAFT_TOKENS,
            "synthetic_acceptance_length": arguments.accept,
            "online_quantization": "follow" if follows else "none",
            "kv_cache_dtype": arguments.kv_cache_dtype,
        }
    if arguments.pp_partition:
        options["pp_partition"] = tuple(map(int, arguments.pp_partition.split(",")))
    return options


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",") if item]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="kimi-linear")
    parser.add_argument("--accept", type=float, help="mean tokens of a verify round")
    parser.add_argument("-pp", type=int, default=1)
    parser.add_argument("-tp", type=int, default=1)
    parser.add_argument("--pp-partition", default="")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=MAX_BATCHED_TOKENS)
    parser.add_argument("--max-model-len", type=int, default=8704)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--enforce-eager", action="store_true")
    add_formats(parser)
    parser.add_argument(
        "--capture-sizes", type=_numbers, help="of graphs; by default those that are measured"
    )
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--out", type=Path)


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Options of what is narrower than the activations; a draft has the target's."""
    parser.add_argument("--online-quantization", choices=ONLINE_METHODS, default="none")
    parser.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, default="auto")
    parser.add_argument("--mxfp4-experts", choices=PACKED_MODES, default="auto")


def measure_points(
    llm: LLM, arguments: argparse.Namespace, source: random.Random
) -> Iterator[tuple[str, dict[str, Any]]]:
    """("decode" or "prefill", point), one after the other."""
    for concurrency in arguments.concurrency:
        # Long runs scatter less.
        runs = arguments.runs or (3 if concurrency < 64 else 2)
        point = measure_decode(llm, concurrency, runs, source)
        if arguments.shape == "kimi-linear":
            point["limit_ms"] = 1e3 * shapes.decode_limit_seconds(
                concurrency,
                PROMPT_TOKENS + OUTPUT_TOKENS / 2,
                num_stages=arguments.pp,
                tp_size=arguments.tp,
                sizes=shapes.linear_bytes(
                    has_fp8_weights=arguments.online_quantization == "ptpc_fp8",
                    has_fp8_rows=arguments.kv_cache_dtype == "fp8",
                ),
            )
            point["fraction_of_limit"] = point["limit_ms"] / point["step_ms"]
        yield "decode", point
    for length in arguments.prefill:
        yield "prefill", measure_prefill(llm, length, 5 if length <= 16384 else 2, source)


def describe(point: dict[str, Any]) -> str:
    """One line of a point."""
    busy = " ".join(f"{share:.0%}" for share in point["stage_busy_share"])
    if "length" in point:
        return (
            f"{point['length']:7d}: {point['seconds']:.3f} s "
            f"{point['tokens_per_second']:8.0f} tok/s busy {busy}"
        )
    limit = ""
    if "limit_ms" in point:
        limit = f"limit {point['limit_ms']:6.2f} ({point['fraction_of_limit']:.0%}) "
    return (
        f"{point['concurrency']:4d}: step {point['step_ms']:7.2f} ms {limit}"
        f"request {point['request_ms']:7.2f} ms "
        f"{point['output_tokens_per_second']:8.0f} tok/s out "
        f"{point['decode_tokens_per_second']:8.0f} decoding; "
        f"loop {point['loop_ms_per_step']:.2f} ms/step busy {busy}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--concurrency", type=_numbers, default=[1, 8, 64, 256])
    parser.add_argument(
        "--runs", type=int, help="of each point; by default 3, from 64 requests on 2"
    )
    parser.add_argument("--prefill", type=_numbers, default=[8192])
    parser.add_argument("--name", help="of the part; by default SHAPE-ppN-tpN")
    arguments = parser.parse_args()
    source = random.Random(0)
    folder = shapes.write_folder(SHAPES[arguments.shape]())
    options = engine_options(arguments)
    # A cohort is the share of the requests that one of the stages runs.
    sizes = {-(-count // arguments.pp) for count in arguments.concurrency}
    options["cudagraph_capture_sizes"] = tuple(arguments.capture_sizes or sorted(sizes))
    began = time.perf_counter()
    with LLM(str(folder), show_progress=False, **options) as llm:
        start_seconds = time.perf_counter() - began
        print(f"started in {start_seconds:.1f} s", flush=True)
        began = time.perf_counter()
        vocab_size = llm.config.model.vocab_size
        for length in (PROMPT_TOKENS, *arguments.prefill):  # kernels that a shape meets first
            run_batch(llm, [random_prompt(source, length, vocab_size)], 2)
        print(f"warm in {time.perf_counter() - began:.1f} s", flush=True)
        results: dict[str, Any] = {
            "shape": arguments.shape,
            "accept": arguments.accept,
            "online_quantization": arguments.online_quantization,
            "kv_cache_dtype": arguments.kv_cache_dtype,
            "mxfp4_experts": arguments.mxfp4_experts,
            "pp": arguments.pp,
            "tp": arguments.tp,
            "has_graphs": not arguments.enforce_eager,
            "start_seconds": start_seconds,
            "decode": [],
            "prefill": [],
        }
        for kind, point in measure_points(llm, arguments, source):
            results[kind].append(point)
            print(f"{kind} {describe(point)}", flush=True)
            if arguments.out:
                name = arguments.name or f"{arguments.shape}-pp{arguments.pp}-tp{arguments.tp}"
                write_part(arguments.out, name, results)


if __name__ == "__main__":
    main()
