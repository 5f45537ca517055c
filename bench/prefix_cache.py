"""What does a prefix hit save on a CPU, and what does caching cost where nothing ever hits?

Engines with and without prefix caching are loaded together and taken in turn, round by round;
ratios are formed pair by pair. Prompts are random tokens, new ones in every round, so what is
cached is only what the measurement put there. Answers with and without caching are equal but for
rounding in float32; those that differ are counted on stderr.

    scripts/bench prefix_cache --out bench/results/prefix_cache.md
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.report import machine_line
from stagecoach import LLM, RequestOutput, SamplingParams
from stagecoach.checkpoint_folder import checkpoint_folder
from stagecoach.config.engine import SpeculativeConfig
from stagecoach.config.model import ModelConfig, load_model_config, parse_model_config
from stagecoach.model.stage_memory import memory_shapes
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.pipeline.stage import whole_model

SHARED_TOKENS = 2048
OWN_TOKENS = 16
NUM_TURNS = 8
TURN_TOKENS = 240
ANSWER_TOKENS = 24
# Targets: how much sooner a hit has its first token, and what caching may cost where none is.
LEAST_RATIO = 8
MOST_OVERHEAD = 2
# As the published checkpoint has them; `model.tiny` is the writer of such configs.
KIMI_K3 = TinyShape(
    num_layers=93,
    mla_layers=(*range(3, 92, 4), 92),
    num_heads=96,
    head_dim=128,
    kv_lora_rank=512,
    rope_dim=64,
)


class Traffic(NamedTuple):
    """Requests of one kind, none of which begins like another."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int


NEVER_HITS = (
    Traffic("prompts", 4, 512, 2),
    Traffic("answers", 4, 32, 48),
    Traffic("both", 4, 192, 24),
)


class Pair(NamedTuple):
    """The same engine with prefix caching and without."""

    cached: LLM
    plain: LLM

    def close(self) -> None:
        self.cached.close()
        self.plain.close()


def start(arguments: argparse.Namespace, **options: Any) -> LLM:
    return LLM(
        arguments.model,
        max_model_len=4096,
        max_num_seqs=16,
        show_progress=False,
        log_level="error",
        **options,
    )


def start_pair(arguments: argparse.Namespace, **options: Any) -> Pair:
    return Pair(
        start(arguments, enable_prefix_caching=True, **options),
        start(arguments, enable_prefix_caching=False, **options),
    )


class Source:
    """Random plain tokens, new ones at each call; one for all engines of a run."""

    def __init__(self, llm: LLM) -> None:
        self._random = random.Random(7)
        self._num_plain = llm.config.model.vocab_size - 256

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._num_plain) for _ in range(count)]


def answer(llm: LLM, prompt: list[int], num_tokens: int) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output


def first_token_milliseconds(output: RequestOutput) -> float:
    assert output.timings.first_token_seconds is not None
    return 1000 * output.timings.first_token_seconds


def median_and_range(values: Sequence[float], spec: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{spec}} ({low:{spec}}–{high:{spec}})"


def measure_shared_prefix(llm: LLM, source: Source, rounds: int) -> list[str]:
    """Cells of one row: the first request of a prefix, one that hits, and their ratio."""
    cold, warm = [], []
    for number in range(rounds + 1):
        prefix = source.tokens(SHARED_TOKENS)
        first = answer(llm, prefix + source.tokens(OWN_TOKENS), 1)
        second = answer(llm, prefix + source.tokens(OWN_TOKENS), 1)
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == SHARED_TOKENS, second.num_cached_tokens
        if number:
            cold.append(first_token_milliseconds(first))
            warm.append(first_token_milliseconds(second))
    ratios = [one / other for one, other in zip(cold, warm, strict=True)]
    return [
        f"{statistics.median(cold):.1f}",
        f"{statistics.median(warm):.1f}",
        median_and_range(ratios, ".1f"),
    ]


def measure_conversation(pair: Pair, source: Source, rounds: int) -> list[str]:
    """Rows of a table: time to the first token of each turn, and the tokens found in the cache."""
    plain: list[list[float]] = [[] for _ in range(NUM_TURNS)]
    cached: list[list[float]] = [[] for _ in range(NUM_TURNS)]
    shapes = [(0, 0)] * NUM_TURNS
    num_differing = 0
    for number in range(rounds + 1):
        conversation: list[int] = []
        for turn in range(NUM_TURNS):
            conversation += source.tokens(TURN_TOKENS)
            slow = answer(pair.plain, conversation, ANSWER_TOKENS)
            fast = answer(pair.cached, conversation, ANSWER_TOKENS)
            num_differing += slow.outputs[0].token_ids != fast.outputs[0].token_ids
            shapes[turn] = (len(conversation), fast.num_cached_tokens)
            if number:
                plain[turn].append(first_token_milliseconds(slow))
                cached[turn].append(first_token_milliseconds(fast))
            # What the cache knows is its own engine's answer.
            conversation += fast.outputs[0].token_ids
    if num_differing:
        sys.stderr.write(f"conversation: {num_differing} answers differ by rounding\n")
    return [
        f"| {turn + 1} | {length} | {found} | {statistics.median(plain[turn]):.1f} | "
        f"{statistics.median(cached[turn]):.1f} | "
        f"{median_and_range(_ratios(plain[turn], cached[turn]), '.1f')} |"
        for turn, (length, found) in enumerate(shapes)
    ]


def measure_overhead(pair: Pair, traffic: Traffic, source: Source, rounds: int) -> list[str]:
    """Cells of one row: seconds for all requests, and what caching adds."""
    params = SamplingParams(temperature=0.0, max_tokens=traffic.num_output_tokens, ignore_eos=True)
    plain: list[float] = []
    cached: list[float] = []
    for number in range(rounds + 1):
        prompts = [source.tokens(traffic.num_prompt_tokens) for _ in range(traffic.num_requests)]
        # Whoever comes second finds the machine otherwise: take turns.
        turns = [(pair.plain, plain), (pair.cached, cached)]
        for llm, seconds in turns if number % 2 else reversed(turns):
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            elapsed = time.perf_counter() - began
            assert all(output.num_cached_tokens == 0 for output in outputs)
            if number:
                seconds.append(elapsed)
    overheads = [100 * (ratio - 1) for ratio in _ratios(cached, plain)]
    low, middle, high = statistics.quantiles(overheads, n=4)
    return [
        f"{statistics.median(plain):.3f}",
        f"{statistics.median(cached):.3f}",
        f"{middle:+.1f} ({low:+.1f} to {high:+.1f})",
    ]


def checkpoint_bytes(model: str) -> list[str]:
    """Rows of a table: one checkpoint over all layers on one rank, and a page beside it."""
    demo = load_model_config(checkpoint_folder(model))
    published = parse_model_config(kimi_k3_config(KIMI_K3))
    systems: list[tuple[str, ModelConfig, torch.dtype, int]] = [
        (f"{model}, float32, tp 1", demo, torch.float32, 1),
        ("Kimi-K3, bfloat16, tp 8", published, torch.bfloat16, 8),
    ]
    rows = []
    for name, config, dtype, tp_size in systems:
        plain, recorded = (
            memory_shapes(config, whole_model(config.num_layers), tp_size, dtype, num_drafts)
            for num_drafts in (0, 7)
        )
        rows.append(
            f"| {name} | {plain.bytes_per_slot:,} | {recorded.bytes_per_slot:,} | "
            f"{plain.bytes_per_page(64):,} |"
        )
    return rows


def _shape(traffic: Traffic) -> str:
    return f"{traffic.name}: {traffic.num_prompt_tokens} + {traffic.num_output_tokens} tokens"


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(numerators, denominators, strict=True)]


def measure(arguments: argparse.Namespace) -> list[str]:
    """The tables, in Markdown."""
    hits = [
        "| stages | computed, ms | hit, ms | ratio |",
        "| --: | --: | --: | --- |",
    ]
    conversation = [
        "| turn | prompt | cached | computed, ms | cached, ms | ratio |",
        "| --: | --: | --: | --: | --: | --- |",
    ]
    overhead = [
        "| requests | draft | without, s | with, s | overhead, % |",
        "| --- | --- | --: | --: | --- |",
    ]

    control = [
        "| requests | without, s | without, s | difference, % |",
        "| --- | --: | --: | --- |",
    ]

    def add(table: list[str], *rows: str) -> None:
        table += rows
        sys.stderr.write("\n".join(rows) + "\n")

    pair = start_pair(arguments)
    source, rounds = Source(pair.plain), arguments.rounds
    add(hits, f"| 1 | {' | '.join(measure_shared_prefix(pair.cached, source, rounds))} |")
    add(conversation, *measure_conversation(pair, source, rounds))
    drafted = start_pair(arguments, speculative_config=SpeculativeConfig(model=arguments.draft))
    for name, systems in (("none", pair), (arguments.draft, drafted)):
        for traffic in NEVER_HITS:
            cells = measure_overhead(systems, traffic, source, arguments.overhead_rounds)
            add(overhead, f"| {_shape(traffic)} | {name} | {' | '.join(cells)} |")
    # What the measurement itself brings: an engine without caching in the place of the one with.
    with start(arguments, enable_prefix_caching=False) as other:
        for traffic in NEVER_HITS:
            cells = measure_overhead(
                Pair(other, pair.plain), traffic, source, arguments.overhead_rounds
            )
            add(control, f"| {_shape(traffic)} | {' | '.join(cells)} |")
    pair.close()
    drafted.close()
    with start(arguments, pipeline_parallel_size=2) as staged:
        add(hits, f"| 2 | {' | '.join(measure_shared_prefix(staged, source, rounds))} |")
    return [
        "## Time to the first token behind a shared prefix",
        "",
        f"{SHARED_TOKENS} shared tokens and {OWN_TOKENS} of the request's own. Target: a ratio of "
        f"{LEAST_RATIO} at least.",
        "",
        *hits,
        "",
        "## A conversation",
        "",
        f"Time to the first token of each turn; a turn adds {TURN_TOKENS} tokens, an answer "
        f"{ANSWER_TOKENS}.",
        "",
        *conversation,
        "",
        "## Traffic that never hits",
        "",
        f"Seconds for {NEVER_HITS[0].num_requests} requests at once, prompt + output tokens each. "
        "In brackets the middle half of the rounds' overheads, since single rounds are short. "
        f"Target: less than {MOST_OVERHEAD} %.",
        "",
        *overhead,
        "",
        "Two engines without caching, measured in the same way, differ by:",
        "",
        *control,
        "",
        "## Bytes of a checkpoint",
        "",
        "Over all layers, on one rank; states are float32. A page of 64 tokens stands beside it.",
        "",
        "| model | k = 0 | k = 7 | page |",
        "| --- | --: | --: | --: |",
        *checkpoint_bytes(arguments.model),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="checkpoint folder or name")
    parser.add_argument("--draft", default="demo-draft", help="draft checkpoint folder or name")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--overhead-rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    tables = measure(arguments)
    text = "\n".join(
        [
            "# Prefix caching on a CPU",
            "",
            machine_line(("torch",)),
            f"Command: `scripts/bench prefix_cache --model {arguments.model} --draft "
            f"{arguments.draft} --rounds {arguments.rounds} --overhead-rounds "
            f"{arguments.overhead_rounds}`. Medians of rounds, and in brackets the range of the "
            "ratios round by round.",
            "",
            *tables,
        ]
    )
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
