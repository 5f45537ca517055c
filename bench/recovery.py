"""How long does nobody get a token when a worker is killed, and are the tokens the same?

One engine with `--recover`; its workers are killed one after the other while streams run, and each
stream is compared with the same one undisturbed. In float64 they are equal; in other types a
replay computes in other batches, and a rounding may fall the other way, which is counted.

    scripts/bench recovery --out bench/results/recovery.md
"""

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.report import machine_line
from stagecoach import LLM, SamplingParams

NUM_STREAMS = 8
NUM_TOKENS = 160
# Of the slowest stream, when a worker is killed.
NUM_TOKENS_BEFORE = 40
_LIMIT_SECONDS = 300.0


class Stream(threading.Thread):
    """One request, and when its tokens came."""

    def __init__(self, llm: LLM, number: int) -> None:
        super().__init__(daemon=True)
        self._llm = llm
        self._number = number
        self.token_ids: list[int] = []
        self.arrivals: list[float] = []

    def run(self) -> None:
        params = SamplingParams(
            temperature=0.8, seed=self._number, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        prompt = [1 + (37 * self._number + place) % 200 for place in range(24)]
        for output in self._llm.stream(prompt, params):
            self.token_ids = list(output.outputs[0].token_ids)
            self.arrivals.append(time.monotonic())

    @property
    def longest_gap(self) -> float:
        """Seconds between two arrivals."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max(after - before for before, after in pairs)


class Killed(NamedTuple):
    """What became of one kill."""

    victim: str
    recovery_seconds: float  # from the first sign to all workers being back
    gap_seconds: float  # without a token, the longest of any stream
    num_equal: int  # streams of the tokens of an undisturbed run


def start_streams(llm: LLM) -> list[Stream]:
    streams = [Stream(llm, number) for number in range(NUM_STREAMS)]
    for stream in streams:
        stream.start()
    return streams


def finish(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.join(_LIMIT_SECONDS)
        assert len(stream.token_ids) == NUM_TOKENS, f"{len(stream.token_ids)} tokens"


def kill(llm: LLM, victim: str, undisturbed: Sequence[Stream]) -> Killed:
    before = llm.stats()
    streams = start_streams(llm)
    while min(len(stream.token_ids) for stream in streams) < NUM_TOKENS_BEFORE:
        time.sleep(0.001)
    os.kill(llm.client.engine.process_ids[victim], signal.SIGKILL)  # type: ignore[attr-defined]
    finish(streams)
    after = llm.stats()
    assert after.num_recoveries == before.num_recoveries + 1, "more was lost than one worker"
    return Killed(
        victim,
        after.recovery_seconds - before.recovery_seconds,
        max(stream.longest_gap for stream in streams),
        sum(
            one.token_ids == other.token_ids
            for one, other in zip(streams, undisturbed, strict=True)
        ),
    )


def measure(arguments: argparse.Namespace) -> list[str]:
    """The lines of the report."""
    began = time.monotonic()
    with LLM(
        arguments.model,
        pipeline_parallel_size=arguments.pp,
        tensor_parallel_size=arguments.tp,
        dtype=arguments.dtype,
        device=arguments.device,
        max_model_len=512,
        max_num_seqs=NUM_STREAMS,
        num_threads=1,
        recover=True,
        max_recoveries=1000,
        show_progress=False,
        log_level=arguments.log_level,
    ) as llm:
        start_seconds = time.monotonic() - began
        undisturbed = start_streams(llm)
        finish(undisturbed)
        names = [name for name in llm.client.engine.process_ids if name.startswith("worker")]  # type: ignore[attr-defined]
        rows = []
        for _ in range(arguments.rounds):
            for victim in sorted(names):
                rows.append(kill(llm, victim, undisturbed))
                print(rows[-1], file=sys.stderr, flush=True)
    lines = [
        machine_line(["torch", "pyzmq"]),
        "",
        f"`{arguments.model}`, pp {arguments.pp} × tp {arguments.tp}, {arguments.dtype} on "
        f"{arguments.device}: {NUM_STREAMS} streams of {NUM_TOKENS} tokens, a worker killed when "
        f"each has {NUM_TOKENS_BEFORE}; {arguments.rounds} rounds. The start of the engine took "
        f"{start_seconds:.1f} s.",
        "",
        "| killed | recovery, s (range) | longest gap of a stream, s (range) | streams unchanged |",
        "| --- | --: | --: | --: |",
    ]
    for victim in sorted(names):
        its = [row for row in rows if row.victim == victim]
        lines.append(
            f"| `{victim}` | {_seconds([row.recovery_seconds for row in its])} | "
            f"{_seconds([row.gap_seconds for row in its])} | "
            f"{sum(row.num_equal for row in its)} of {NUM_STREAMS * len(its)} |"
        )
    return lines


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("-pp", type=int, default=2)
    parser.add_argument("-tp", type=int, default=2)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--log-level", default="error")
    parser.add_argument("--out", type=Path, help="a file for the tables; default: stdout")
    arguments = parser.parse_args()
    text = "\n".join(measure(arguments)) + "\n"
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
