"""Where the time of a step goes: kernels by name while requests decode, and in a prefill.

The Kimi-Linear shape; the worker that chooses tokens is shown. At each concurrency a quarter of a
second of decoding is recorded; for every kernel the table has calls and microseconds a step.
A rank that begins to record holds up the others: the first part of a recording is left out.
"between" is the time during which no kernel ran. With two ranks a stage both are shown, and how
long each waits for the other at the exchanges (`exchanges.py`).

    python -m bench.h200.profile --concurrency 1,64,256 --out DIR
"""

import argparse
import json
import queue
import random
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.h200 import engine, exchanges, shapes
from bench.h200.parts import write_part
from stagecoach import LLM, SamplingParams

RECORD_SECONDS = 0.4
_UNSETTLED = 0.35  # of a recording
NUM_SHOWN = 24
_TIMEOUT_SECONDS = 60.0


def kernels_of(path: Path) -> list[tuple[str, float, float]]:
    """(name, begin, microseconds) of every kernel and copy of a trace, by begin."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        (str(event["name"]), float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("cat") in kinds
    ]
    return sorted(found, key=lambda item: item[1])


def settled(kernels: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Those of the later part of a recording."""
    if not kernels:
        return []
    first, last = kernels[0][1], kernels[-1][1]
    begin = first + _UNSETTLED * (last - first)
    return [kernel for kernel in kernels if kernel[1] >= begin]


def short(name: str) -> str:
    """A kernel's name without its template arguments."""
    return re.sub(r"<.*", "", name.removeprefix("void "))[-48:]


def summarize(kernels: list[tuple[str, float, float]], num_steps: int) -> dict[str, Any]:
    """Time a step by kernel, and the time that none ran."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    covered, end = 0.0, kernels[0][1]
    for name, begin, duration in kernels:
        totals[short(name)][0] += 1
        totals[short(name)][1] += duration
        covered += max(0.0, begin + duration - max(begin, end))
        end = max(end, begin + duration)
    whole = end - kernels[0][1]
    rows = [
        {
            "kernel": name,
            "calls": round(calls / num_steps, 1),
            "us": round(duration / num_steps, 1),
        }
        for name, (calls, duration) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]
    return {
        "num_steps": num_steps,
        "step_us": whole / num_steps,
        "between_us": (whole - covered) / num_steps,
        "kernels": rows,
    }


def record(llm: LLM, seconds: float | None, work: Any) -> tuple[list[list[Any]], int]:
    """Kernels of the last stage's ranks while `work` runs, or for so many seconds; and steps."""
    with tempfile.TemporaryDirectory() as folder:
        before = llm.stats().num_steps
        llm.client.start_profile(folder, _TIMEOUT_SECONDS)
        if seconds is None:
            work()
        else:
            time.sleep(seconds)
        answer = llm.client.stop_profile(_TIMEOUT_SECONDS)
        if answer.error is not None:
            raise RuntimeError(answer.error)
        num_steps = llm.stats().num_steps - before
        # The first of them chooses tokens.
        tp_size = llm.config.engine.tensor_parallel_size
        ranks = [kernels_of(Path(path)) for path in sorted(answer.paths)[-tp_size:]]
        return ranks, max(1, num_steps)


def profile_decode(llm: LLM, concurrency: int, source: random.Random) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
    news: queue.SimpleQueue[int] = queue.SimpleQueue()
    started: set[int] = set()
    ids = [
        llm.client.submit(
            engine.random_prompt(source, engine.PROMPT_TOKENS, llm.config.model.vocab_size),
            params,
            lambda item, number=number: news.put(number),
        )
        for number in range(concurrency)
    ]
    while len(started) < concurrency:
        started.add(news.get(timeout=_TIMEOUT_SECONDS))
    ranks, _ = record(llm, RECORD_SECONDS, None)
    llm.client.abort(ids)
    ranks = [settled(kernels) for kernels in ranks]
    # One choice of tokens a step, whatever else was counted around the recording.
    num_steps = max(1, sum("count_accepted" in name for name, _, _ in ranks[0]))
    result = summarize(ranks[0], num_steps)
    if len(ranks) == 2:
        result["second_rank"] = summarize(ranks[1], num_steps)
        first, second = map(exchanges.exchanges_of, ranks)
        result["exchanges"] = exchanges.summarize(exchanges.pair(first, second))
    return result


def show(title: str, result: dict[str, Any]) -> None:
    print(
        f"== {title}: step {result['step_us']:.0f} us, between {result['between_us']:.0f} us, "
        f"{sum(row['calls'] for row in result['kernels']):.0f} kernels",
        flush=True,
    )
    second = result.get("second_rank", {"kernels": []})
    others = {row["kernel"]: row["us"] for row in second["kernels"]}
    for row in result["kernels"][:NUM_SHOWN]:
        other = f"| {others.get(row['kernel'], 0.0):9.1f} " if others else ""
        print(f"  {row['us']:9.1f} {other}us {row['calls']:7.1f} x  {row['kernel']}", flush=True)
    if "exchanges" in result:
        print("\n".join(exchanges.table(result["exchanges"])), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engine.add_options(parser)
    parser.add_argument("--concurrency", default="1,64,256")
    parser.add_argument("--prefill", type=int, default=8192, help="0: none")
    arguments = parser.parse_args()
    concurrencies = [int(item) for item in arguments.concurrency.split(",") if item]
    options = engine.engine_options(arguments)
    options["cudagraph_capture_sizes"] = tuple(sorted({1, *concurrencies}))
    source = random.Random(0)
    folder = shapes.write_folder(engine.SHAPES[arguments.shape]())
    results = {}
    with LLM(str(folder), show_progress=False, **options) as llm:
        vocab_size = llm.config.model.vocab_size
        for length in (1024, arguments.prefill or 1024):
            engine.run_batch(llm, [engine.random_prompt(source, length, vocab_size)], 2)
        for concurrency in concurrencies:
            title = f"decode at {concurrency}"
            results[title] = profile_decode(llm, concurrency, source)
            show(title, results[title])
            while llm.stats().num_running:  # an abort is a message
                time.sleep(0.01)
        if arguments.prefill:
            prompt = engine.random_prompt(source, arguments.prefill, vocab_size)
            ranks, _ = record(llm, None, lambda: engine.run_batch(llm, [prompt], 1))
            title = f"prefill of {arguments.prefill}"
            results[title] = summarize(ranks[0], 1)
            show(title, results[title])
    if arguments.out:
        write_part(arguments.out, f"profile-pp{arguments.pp}-tp{arguments.tp}", results)


if __name__ == "__main__":
    main()
