"""What does speculation gain on a CPU, and what does it cost where it cannot gain?

One run holds engines with and without the draft, for one and for two stages, and takes them in
turn, round by round; the ratio is formed pair by pair. A fixed number of requests is kept
running. Two kinds of prompts: held-out examples of the demo's tasks, and random tokens, whose
continuation no draft foresees. Answers are equal with and without by construction; the run
checks it.

    scripts/bench speculation --out bench/results/speculation.md
"""

import argparse
import queue
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import machine_line
from stagecoach import LLM, SamplingParams
from stagecoach.config.engine import SpeculativeConfig
from stagecoach.demo import tasks
from stagecoach.demo.evaluation import render_prompt

BATCHES = (1, 4, 16)
STAGES = (1, 2)
RANDOM_PROMPT_TOKENS = 64
MAX_TOKENS = 96
# Requests of one measurement: enough answers that no single one decides.
NUM_REQUESTS = {1: 12, 4: 24, 16: 48}


class Measured(NamedTuple):
    """One workload on one engine."""

    tokens_per_second: float  # output tokens, from the first request to the last answer
    decode_tokens_per_second: float  # of one request, from its first tokens to its last
    answers: tuple[tuple[int, ...], ...]


class System:
    """An engine, with or without a draft."""

    def __init__(self, model: str, draft: str | None, num_stages: int) -> None:
        self.llm = LLM(
            model,
            pipeline_parallel_size=num_stages,
            max_num_seqs=max(BATCHES),
            speculative_config=None if draft is None else SpeculativeConfig(model=draft),
            show_progress=False,
            log_level="warning",
        )

    def run(self, prompts: list[list[int]], batch: int, params: SamplingParams) -> Measured:
        """Answer all prompts, `batch` at a time."""
        client = self.llm.client
        news: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        answers: list[list[int]] = [[] for _ in prompts]
        first = [(0.0, 0)] * len(prompts)
        decode_seconds, num_decoded = 0.0, 0
        num_submitted = 0

        def submit() -> None:
            nonlocal num_submitted
            number = num_submitted
            num_submitted += 1
            client.submit(prompts[number], params, lambda item: news.put((number, item)))

        began = time.perf_counter()
        for _ in range(min(batch, len(prompts))):
            submit()
        num_open = len(prompts)
        while num_open:
            number, progress = news.get()
            if isinstance(progress, Exception):
                raise progress
            if progress.token_ids and not answers[number]:
                first[number] = (time.perf_counter(), len(progress.token_ids))
            answers[number].extend(progress.token_ids)
            if progress.finish_reason is not None:
                since, num_first = first[number]
                decode_seconds += time.perf_counter() - since
                num_decoded += len(answers[number]) - num_first
                num_open -= 1
                if num_submitted < len(prompts):
                    submit()
        elapsed = time.perf_counter() - began
        return Measured(
            tokens_per_second=sum(map(len, answers)) / elapsed,
            decode_tokens_per_second=num_decoded / decode_seconds,
            answers=tuple(map(tuple, answers)),
        )


class Workload(NamedTuple):
    """Prompts of one kind."""

    name: str
    params: SamplingParams

    def prompts(self, llm: LLM, number: int, count: int) -> list[list[int]]:
        """`count` prompts of round `number`."""
        if self.name == "random tokens":
            source = random.Random(number)
            plain = llm.config.model.vocab_size - 256
            return [
                [source.randrange(plain) for _ in range(RANDOM_PROMPT_TOKENS)] for _ in range(count)
            ]
        families = tasks.FAMILIES
        return [
            render_prompt(
                llm,
                tasks.generate(families[index % len(families)], 7, number * count + index),
            )
            for index in range(count)
        ]


WORKLOADS = (
    Workload("tasks", SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)),
    Workload("tasks, T = 1", SamplingParams(temperature=1.0, seed=5, max_tokens=MAX_TOKENS)),
    Workload(
        "random tokens",
        SamplingParams(temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True),
    ),
)


def compare(
    plain: System, drafted: System, workload: Workload, batch: int, rounds: int
) -> list[str]:
    """Cells of one row; the first round warms up and is dropped."""
    totals, decodes = [], []
    plain_rates, drafted_rates = [], []
    before = after = None
    for number in range(rounds + 1):
        prompts = workload.prompts(plain.llm, number, NUM_REQUESTS[batch])
        slow = plain.run(prompts, batch, workload.params)
        if number == 1:
            before = drafted.llm.stats().speculation
        fast = drafted.run(prompts, batch, workload.params)
        if slow.answers != fast.answers:
            differing = sum(one != two for one, two in zip(slow.answers, fast.answers, strict=True))
            sys.stderr.write(f"{workload.name}: {differing} answers differ by rounding\n")
        if number:
            totals.append(fast.tokens_per_second / slow.tokens_per_second)
            decodes.append(fast.decode_tokens_per_second / slow.decode_tokens_per_second)
            plain_rates.append(slow.tokens_per_second)
            drafted_rates.append(fast.tokens_per_second)
    after = drafted.llm.stats().speculation
    assert before is not None and after is not None
    num_windows = after.num_windows - before.num_windows
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    per_round = f"{1 + num_accepted / num_windows:.2f}" if num_windows else "none"
    return [
        f"{statistics.median(plain_rates):.0f}",
        f"{statistics.median(drafted_rates):.0f}",
        f"{statistics.median(totals):.2f} ({min(totals):.2f}–{max(totals):.2f})",
        f"{statistics.median(decodes):.2f} ({min(decodes):.2f}–{max(decodes):.2f})",
        per_round,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="checkpoint folder or name")
    parser.add_argument("--draft", default="demo-draft", help="draft checkpoint folder or name")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES, help="pipeline stages")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    lines = [
        "| workload | stages | batch | plain | with drafts | ratio | decode ratio | per round |",
        "| --- | --: | --: | --: | --: | --- | --- | --: |",
    ]
    for num_stages in arguments.stages:
        plain = System(arguments.model, None, num_stages)
        drafted = System(arguments.model, arguments.draft, num_stages)
        for workload in WORKLOADS:
            for batch in BATCHES:
                cells = compare(plain, drafted, workload, batch, arguments.rounds)
                lines.append(f"| {workload.name} | {num_stages} | {batch} | {' | '.join(cells)} |")
                sys.stderr.write(lines[-1] + "\n")
        plain.llm.close()
        drafted.llm.close()
    text = "\n".join(
        [
            "# Speculation on a CPU",
            "",
            machine_line(("torch",)),
            f"Command: `scripts/bench speculation --model {arguments.model} --draft "
            f"{arguments.draft} --rounds {arguments.rounds} --stages "
            f"{' '.join(map(str, arguments.stages))}`. Output tokens a second of all "
            f"requests together; at most {MAX_TOKENS} tokens an answer; medians of rounds, and "
            "the range of the ratios.",
            "",
            *lines,
            "",
            "Ratio: with drafts to plain, whole requests, prompts included. Decode ratio: from a "
            "request's first tokens to its last. Per round: tokens that a verify round returns.",
            "",
        ]
    )
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
