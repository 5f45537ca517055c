"""How fast is the engine on a CPU, beside mlx-lm on the same checkpoint and cores?

One run alternates both, round by round, and reports medians and the ratio pair by pair. Ours
runs through the whole engine (processes, scheduler, sampling); mlx-lm runs its own generation
loops, in float32 as ours and in the checkpoint's bfloat16. The table goes to stdout and, with
--out, into a file with the machine, the versions and the commit.

    scripts/bench cpu --out bench/results/cpu.md
"""

import argparse
import json
import queue
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import kimi_k3 as mlx_kimi_k3

from bench.report import machine_line
from stagecoach import LLM, SamplingParams
from stagecoach.checkpoint_folder import checkpoint_folder

PROMPT_TOKENS = 32
DECODE_TOKENS = 96
PREFILL_TOKENS = 2048
BATCHES = (1, 8)
PEER = "mlx-lm float32"


class StepShares(NamedTuple):
    """Where the wall time of our decode steps goes."""

    outside_forward: float  # outside the last stage's layers and head
    stage_idle: tuple[float, ...]  # not working on a step, by stage


class DecodeRun(NamedTuple):
    """One batch, from the moment every request has its first token."""

    tokens_per_second: float
    shares: StepShares


def prompt(number: int, length: int, vocab_size: int) -> list[int]:
    return [(17 * place + 101 * number) % vocab_size for place in range(length)]


class Ours:
    """Our engine at one layout, with its default number of threads."""

    def __init__(self, model: str, num_stages: int) -> None:
        self.llm = LLM(
            model, pipeline_parallel_size=num_stages, show_progress=False, log_level="warning"
        )
        # Specials stay out of the prompts, whatever the model makes of them.
        self._vocab_size = self.llm.config.model.vocab_size - 256

    def decode(self, batch: int) -> float:
        """Output tokens a second once every request has its first."""
        return self._decode(batch).tokens_per_second

    def shares(self, batch: int) -> StepShares:
        """Where the time between all first tokens and the last token goes."""
        return self._decode(batch).shares

    def prefill(self, number: int) -> float:
        """Prompt tokens a second."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        began = time.perf_counter()
        self.llm.generate(
            [prompt(number, PREFILL_TOKENS, self._vocab_size)], params, use_tqdm=False
        )
        return PREFILL_TOKENS / (time.perf_counter() - began)

    def _decode(self, batch: int) -> DecodeRun:
        client = self.llm.client
        params = SamplingParams(temperature=0.0, max_tokens=DECODE_TOKENS, ignore_eos=True)
        news: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for number in range(batch):
            client.submit(
                prompt(number, PROMPT_TOKENS, self._vocab_size),
                params,
                lambda item, number=number: news.put((number, item)),
            )
        counts = [0] * batch
        while min(counts) == 0:
            number, progress = news.get()
            counts[number] += len(progress.token_ids)
        began, num_before, before = time.perf_counter(), sum(counts), client.stats()
        while sum(counts) < batch * DECODE_TOKENS:
            number, progress = news.get()
            counts[number] += len(progress.token_ids)
        elapsed, after = time.perf_counter() - began, client.stats()
        busy = zip(after.stage_busy_seconds, before.stage_busy_seconds, strict=True)
        return DecodeRun(
            tokens_per_second=(sum(counts) - num_before) / elapsed,
            shares=StepShares(
                outside_forward=1.0 - (after.forward_seconds - before.forward_seconds) / elapsed,
                stage_idle=tuple(1.0 - (late - early) / elapsed for late, early in busy),
            ),
        )


class Mlx:
    """mlx-lm's model of the checkpoint, its experts kept as MXFP4."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        mx.set_default_device(mx.cpu)
        config = mx_config(folder)
        self.model = mlx_kimi_k3.Model(mlx_kimi_k3.ModelArgs.from_dict(config))
        weights: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            weights |= mx.load(str(path))
        if "quantization_config" in config["text_config"]:
            nn.quantize(
                self.model,
                group_size=32,
                bits=4,
                mode="mxfp4",
                class_predicate=lambda path, module: (
                    "switch_mlp" in path and hasattr(module, "to_quantized")
                ),
            )
        self.model.load_weights(list(self.model.sanitize(weights).items()), strict=True)
        if dtype is not None:
            self.model.set_dtype(dtype)
        mx.eval(self.model.parameters())
        self._vocab_size = config["text_config"]["vocab_size"] - 256

    def decode(self, batch: int) -> float:
        if batch == 1:
            return self._decode_one()
        generator = BatchGenerator(self.model, max_tokens=DECODE_TOKENS)
        generator.insert(
            [prompt(number, PROMPT_TOKENS, self._vocab_size) for number in range(batch)]
        )
        counts: dict[int, int] = {}
        began = None
        while len(counts) < batch or min(counts.values()) < DECODE_TOKENS:
            for response in next_responses(generator):
                counts[response.uid] = counts.get(response.uid, 0) + 1
            if began is None and len(counts) == batch:
                began, done_before = time.perf_counter(), sum(counts.values())
        assert began is not None
        elapsed = time.perf_counter() - began
        generator.close()
        return (sum(counts.values()) - done_before) / elapsed

    def _decode_one(self) -> float:
        tokens = mx.array(prompt(0, PROMPT_TOKENS, self._vocab_size))
        began = None
        for token, _ in generate_step(tokens, self.model, max_tokens=DECODE_TOKENS):
            int(token)
            if began is None:
                began = time.perf_counter()
        assert began is not None
        return (DECODE_TOKENS - 1) / (time.perf_counter() - began)

    def prefill(self, number: int) -> float:
        tokens = mx.array(prompt(number, PREFILL_TOKENS, self._vocab_size))
        began = time.perf_counter()
        for token, _ in generate_step(tokens, self.model, max_tokens=1):
            int(token)
        return PREFILL_TOKENS / (time.perf_counter() - began)


def next_responses(generator: BatchGenerator) -> list[Any]:
    """One generation step of mlx-lm's batch generator."""
    _, responses = generator.next()
    return responses


def mx_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def measure(
    systems: dict[str, Any], rounds: int, run: Callable[[Any, int], float]
) -> dict[str, list[float]]:
    """Figures of each system, taken in turn; the first round warms up and is dropped."""
    figures: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name, system in systems.items():
            value = run(system, number)
            if number:
                figures[name].append(value)
    return figures


def table_rows(title: str, figures: dict[str, list[float]]) -> list[str]:
    rows = []
    for name, values in figures.items():
        ratios = [ours / peer for ours, peer in zip(values, figures[PEER], strict=True)]
        rows.append(
            f"| {title} | {name} | {statistics.median(values):.1f} | {min(values):.1f}"
            f"–{max(values):.1f} | {statistics.median(ratios):.2f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="checkpoint folder or name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    folder = checkpoint_folder(arguments.model)
    ours = {f"stagecoach pp{stages}": Ours(arguments.model, stages) for stages in (1, 2)}
    systems: dict[str, Any] = {
        **ours,
        PEER: Mlx(folder, mx.float32),
        "mlx-lm bfloat16": Mlx(folder, None),
    }
    lines = ["| figure | system | median tokens/s | range | ratio to mlx-lm float32 |"]
    lines.append("| --- | --- | --: | --: | --: |")
    for batch in BATCHES:
        figures = measure(
            systems, arguments.rounds, lambda system, _, batch=batch: system.decode(batch)
        )
        lines += table_rows(f"decode, batch {batch}", figures)
        sys.stderr.write("\n".join(lines[-len(systems) :]) + "\n")
    figures = measure(
        systems, max(2, arguments.rounds // 2), lambda system, number: system.prefill(number)
    )
    lines += table_rows(f"prefill, {PREFILL_TOKENS} tokens", figures)
    shares = {name: system.shares(BATCHES[-1]) for name, system in ours.items()}
    lines.append("")
    for name, share in shares.items():
        idle = ", ".join(f"{value:.1%}" for value in share.stage_idle)
        lines.append(
            f"{name}, decode at batch {BATCHES[-1]}: {share.outside_forward:.1%} of a step is "
            f"outside the last stage's layers and head; stages idle {idle}."
        )
    for system in ours.values():
        system.llm.close()
    text = "\n".join(
        [
            "# CPU benchmark",
            "",
            machine_line(("torch", "mlx", "mlx-lm")),
            f"Command: `scripts/bench cpu --model {arguments.model} --rounds "
            f"{arguments.rounds}`. Prompt {PROMPT_TOKENS} tokens, {DECODE_TOKENS} output "
            "tokens, greedy.",
            "",
            *lines,
            "",
        ]
    )
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
