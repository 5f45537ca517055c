"""What does HTTP cost on top of the engine?

One run holds an engine in this process and a server of the same model, and takes them in turn,
round by round; the ratio is formed pair by pair. A round is a batch of requests that all start
at once. The load comes from this process, so on few cores the server also pays for the reader
of its streams. Then, with nothing else to do: the time to the first byte of a stream beside the
time to the first token offline.

    scripts/bench server --out bench/results/server.md
"""

import argparse
import asyncio
import contextlib
import queue
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.report import machine_line
from stagecoach import LLM, SamplingParams

CONCURRENCY = 16
PROMPT_TOKENS = 64
MAX_TOKENS = 128
NUM_IDLE = 40
START_SECONDS = 120.0
_LISTENING = re.compile(r"listening on (\S+)")
_ENGINE = {"max_num_seqs": CONCURRENCY, "num_threads": 1}


@contextlib.contextmanager
def serving(model: str) -> Iterator[str]:
    """The address of a server that is ready; it ends with the block."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in _ENGINE.items()]
    command = [sys.executable, "-m", "stagecoach", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: [lines.put(line) for line in process.stderr or ()])
    reader.start()
    try:
        while (found := _LISTENING.search(lines.get(timeout=START_SECONDS))) is None:
            continue
        deadline = time.monotonic() + START_SECONDS
        while httpx.get(f"{found[1]}/ready", timeout=START_SECONDS).status_code != 200:
            if time.monotonic() > deadline:
                raise SystemExit("the server does not get ready")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait()
        reader.join()
        process.stderr.close()


class Offline:
    """The engine of this process."""

    def __init__(self, model: str) -> None:
        self.llm = LLM(model, show_progress=False, log_level="warning", **_ENGINE)

    def run(self, prompts: list[list[int]]) -> float:
        """Seconds of a batch."""
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == MAX_TOKENS for output in outputs)
        return seconds

    def first_token(self, prompt: list[int]) -> float:
        """Seconds until the first token of one request."""
        params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
        start = time.perf_counter()
        stream = self.llm.stream(prompt, params)
        next(stream)
        seconds = time.perf_counter() - start
        for _ in stream:
            continue
        return seconds


class Online:
    """The server, and the client that asks it."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        limits = httpx.Limits(max_connections=CONCURRENCY)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)

    def run(self, prompts: list[list[int]], *, stream: bool) -> float:
        """Seconds of a batch."""
        start = time.perf_counter()
        ends = self._loop.run_until_complete(self._all(prompts, stream=stream))
        return max(ends) - start

    def first_byte(self, prompt: list[int]) -> float:
        """Seconds until the first event of one stream."""
        start = time.perf_counter()
        return self._loop.run_until_complete(self._first(prompt)) - start

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    async def _all(self, prompts: list[list[int]], *, stream: bool) -> list[float]:
        return await asyncio.gather(*(self._one(prompt, stream=stream) for prompt in prompts))

    async def _one(self, prompt: list[int], *, stream: bool) -> float:
        body = _body(prompt, MAX_TOKENS, stream=stream)
        if not stream:
            response = await self._client.post("/v1/completions", json=body)
            assert response.json()["usage"]["completion_tokens"] == MAX_TOKENS
            return time.perf_counter()
        last = b""
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            async for piece in response.aiter_raw():
                last = piece
        assert last.endswith(b"data: [DONE]\n\n"), last
        return time.perf_counter()

    async def _first(self, prompt: list[int]) -> float:
        body = _body(prompt, 4, stream=True)
        first: float | None = None
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_raw():
                first = first or time.perf_counter()
        assert first is not None
        return first


def _body(prompt: list[int], max_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def measure(model: str, num_rounds: int) -> list[str]:
    """Rows of the two tables."""
    random_numbers = random.Random(5)
    offline = Offline(model)
    with serving(model) as url:
        online = Online(url)

        def prompt() -> list[int]:
            return [random_numbers.randrange(256) for _ in range(PROMPT_TOKENS)]

        ways = {
            "streamed": lambda prompts: online.run(prompts, stream=True),
            "whole": lambda prompts: online.run(prompts, stream=False),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ("offline", *ways)}
        for number in range(num_rounds + 1):
            # Of each way new prompts: none finds another's in the cache.
            order = [("offline", offline.run), *ways.items()]
            random_numbers.shuffle(order)
            for name, run in order:
                taken = run([prompt() for _ in range(CONCURRENCY)])
                if number:
                    seconds[name].append(taken)
            print(f"round {number} of {num_rounds}", file=sys.stderr, flush=True)
        first_tokens = [offline.first_token(prompt()) for _ in range(NUM_IDLE)]
        first_bytes = [online.first_byte(prompt()) for _ in range(NUM_IDLE)]
        online.close()
    offline.llm.close()
    return [
        f"## {CONCURRENCY} requests at once, {PROMPT_TOKENS} tokens in, {MAX_TOKENS} out",
        "",
        "| way | tokens/s | time over offline, median of pairs | quartiles |",
        "| --- | --- | --- | --- |",
        *(_row(name, seconds[name], seconds["offline"]) for name in seconds),
        "",
        "## One request, nothing else running",
        "",
        "| | median ms | 90 % of them below |",
        "| --- | --- | --- |",
        _idle_row("first token offline", first_tokens),
        _idle_row("first byte of a stream", first_bytes),
    ]


def _row(name: str, taken: list[float], reference: list[float]) -> str:
    ratios = sorted(mine / theirs for mine, theirs in zip(taken, reference, strict=True))
    rate = CONCURRENCY * MAX_TOKENS / statistics.median(taken)
    if taken is reference:
        return f"| {name} | {rate:.0f} | 1 | |"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"| {name} | {rate:.0f} | {middle:.3f} | {low:.3f} to {high:.3f} |"


def _idle_row(name: str, taken: list[float]) -> str:
    deciles = statistics.quantiles(taken, n=10)
    return f"| {name} | {statistics.median(taken) * 1e3:.2f} | {deciles[-1] * 1e3:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="a checkpoint folder, `demo` or `tiny`")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the tables here, below its first heading")
    arguments = parser.parse_args()
    began = time.monotonic()
    rows = measure(arguments.model, arguments.rounds)
    text = "\n".join(
        [
            "# What the server costs",
            "",
            machine_line(("torch", "fastapi", "uvicorn", "httpx")),
            f"Command: `scripts/bench server --model {arguments.model} "
            f"--rounds {arguments.rounds}` ({time.monotonic() - began:.0f} s).",
            "",
            *rows,
            "",
        ]
    )
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
