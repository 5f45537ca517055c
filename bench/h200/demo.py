"""The bundled model on a GPU beside the CPU's float32: tokens, scores, and acceptance.

Greedy answers to held-out examples. Where an answer parts from the CPU's, the CPU's margin
between its two best tokens is compared with the noise: the largest difference of log-probability
over all tokens that agree. Then scores by family, and with the draft the tokens of a verify
round. One engine after the other, each with its own processes.

    python -m bench.h200.demo --out DIR
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.h200.parts import write_part
from stagecoach import LLM, SamplingParams
from stagecoach.demo import tasks
from stagecoach.demo.evaluation import evaluate_model, render_prompt
from stagecoach.demo.example import Example
from stagecoach.outputs import RequestOutput

MAX_TOKENS = 192
DRAFT = {"model": "demo-draft", "num_speculative_tokens": 7, "watchdog": False}


class Engine(NamedTuple):
    """One way to run the model on GPUs."""

    stages: int
    dtype: str = "bfloat16"
    has_draft: bool = False
    is_eager: bool = False

    @property
    def name(self) -> str:
        draft, eager = " draft" if self.has_draft else "", " eager" if self.is_eager else ""
        return f"pp{self.stages} {self.dtype}{draft}{eager}"

    def options(self) -> dict[str, Any]:
        """Of the engine. Stages without a GPU each are threads that share one."""
        shares = torch.cuda.device_count() < self.stages
        return {
            "device": "cuda",
            "dtype": self.dtype,
            "pipeline_parallel_size": self.stages,
            "distributed_executor_backend": "uni" if shares else "mp",
            "speculative_config": DRAFT if self.has_draft else None,
            "enforce_eager": self.is_eager,
            "cudagraph_capture_sizes": (1, 16, 64),
            "gpu_memory_utilization": 0.5,
        }


ENGINES = (
    Engine(1),
    Engine(1, has_draft=True),
    Engine(2, has_draft=True),
    Engine(1, dtype="float32", has_draft=True),
    Engine(1, is_eager=True),
    Engine(2),
)


class Agreement(NamedTuple):
    """Greedy answers of two engines to the same prompts."""

    num_answers: int
    num_equal: int
    num_tokens: int  # that agree, up to where an answer parts
    noise: float  # largest difference of log-probability of a token that agrees
    margins: tuple[float, ...]  # of the reference, where answers part

    def report(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "num_unexplained": sum(margin > 2 * self.noise for margin in self.margins),
        }


def examples_of(number: int) -> list[Example]:
    """Held-out examples, so many of each family; none of those that are graded."""
    return [
        tasks.generate(family, 2, index, "held_out")
        for family in tasks.FAMILIES
        for index in range(number)
    ]


def answers(llm: LLM, examples: list[Example]) -> list[RequestOutput]:
    prompts = [render_prompt(llm, example) for example in examples]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2)
    return llm.generate(prompts, params, use_tqdm=False)


def compare(reference: list[RequestOutput], others: list[RequestOutput]) -> Agreement:
    num_equal = num_tokens = 0
    noise = 0.0
    margins = []
    for one, other in zip(reference, others, strict=True):
        [expected], [got] = one.outputs, other.outputs
        assert expected.logprobs is not None and got.logprobs is not None
        rows = zip(expected.logprobs, got.logprobs, strict=False)
        for left, right in rows:
            if left.token_id != right.token_id:
                first, second = left.top_logprobs[:2]
                margins.append(first - second)
                break
            num_tokens += 1
            noise = max(noise, abs(left.logprob - right.logprob))
        else:
            num_equal += expected.token_ids == got.token_ids
    return Agreement(len(reference), num_equal, num_tokens, noise, tuple(margins))


def measure_engine(
    options: dict[str, Any], examples: list[Example], limit: int
) -> tuple[list[RequestOutput], dict[str, float], float | None]:
    """Answers, scores by family, and tokens of a verify round where there is a draft."""
    with LLM("demo", show_progress=False, log_level="warning", **options) as llm:
        report = evaluate_model(
            llm, families=tuple(tasks.FAMILIES), limit=limit, seed=1, max_tokens=512
        )
        rounds = report.speculation.tokens_per_round if report.speculation else None
        return answers(llm, examples), report.tasks, rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2, help="most stages")
    parser.add_argument("--limit", type=int, default=30, help="examples of a family that count")
    parser.add_argument("--prompts", type=int, default=4, help="of a family, for the agreement")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    examples = examples_of(arguments.prompts)
    with LLM("demo", device="cpu", show_progress=False, log_level="warning") as llm:
        reference = answers(llm, examples)
    results: dict[str, Any] = {"agreement": {}, "scores": {}, "tokens_per_round": {}}
    for engine in ENGINES:
        if engine.stages > arguments.stages:
            continue
        got, scores, rounds = measure_engine(engine.options(), examples, arguments.limit)
        agreement = compare(reference, got).report()
        results["agreement"][engine.name] = agreement
        results["scores"][engine.name] = scores
        results["tokens_per_round"][engine.name] = rounds
        mean = sum(scores.values()) / len(scores)
        print(
            f"{engine.name:24s} equal {agreement['num_equal']}/{agreement['num_answers']} "
            f"tokens {agreement['num_tokens']} noise {agreement['noise']:.3g} "
            f"largest margin {max(agreement['margins'], default=math.nan):.3g} "
            f"unexplained {agreement['num_unexplained']} score {mean:.3f} "
            f"round {rounds if rounds is None else round(rounds, 3)}",
            flush=True,
        )
        if arguments.out:
            write_part(arguments.out, "demo", results)


if __name__ == "__main__":
    main()
