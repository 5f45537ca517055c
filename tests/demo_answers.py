"""Answers of the bundled model to an example of each task family, with its draft or without."""

from typing import Any, NamedTuple

from stagecoach import LLM, RequestOutput, SamplingParams
from stagecoach.demo.evaluation import EvaluationReport, evaluate_model, render_prompt
from stagecoach.demo.tasks import ALL_FAMILIES, generate
from stagecoach.schedule.speculation_stats import SpeculationStats, tokens_per_round

# The model is sure of itself: at 1 it mostly says what it says at 0.
TEMPERATURES = (0.0, 1.0, 2.0)
# Windows of fixed length, so that counts repeat themselves.
SPECULATION = {"model": "demo-draft", "confidence_schedule": False, "watchdog": False}


class Answers(NamedTuple):
    """What one engine answered, all requests as one batch."""

    outputs: dict[float, list[RequestOutput]]  # by temperature
    stats: SpeculationStats | None

    def token_ids(self, temperature: float) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs[temperature]]

    def tokens_per_round(self, temperature: float) -> float:
        timings = [output.timings for output in self.outputs[temperature]]
        mean = tokens_per_round(
            sum(item.num_windows for item in timings),
            sum(item.num_accepted_tokens for item in timings),
        )
        assert mean is not None, "nothing was verified"
        return mean


def evaluate(
    *, limit: int, seed: int, num_fewshot: int, max_num_seqs: int, **options: Any
) -> EvaluationReport:
    """Scores of two task families in float64, where neither batches nor stages decide a token."""
    with LLM(
        "demo",
        dtype="float64",
        distributed_executor_backend="uni",
        num_threads=1,
        max_model_len=2048,
        max_num_seqs=max_num_seqs,
        show_progress=False,
        log_level="warning",
        **options,
    ) as llm:
        return evaluate_model(
            llm,
            families=("tool_calls", "multi_turn"),
            limit=limit,
            seed=seed,
            max_tokens=64,
            num_fewshot=num_fewshot,
        )


def answer(**options: Any) -> Answers:
    """Run an engine in float64, where no rounding decides between tokens."""
    with LLM(
        "demo",
        dtype="float64",
        max_model_len=512,
        num_threads=1,
        show_progress=False,
        log_level="warning",
        **options,
    ) as llm:
        prompts = [
            min((render_prompt(llm, generate(name, 3, number)) for number in range(8)), key=len)
            for name in ALL_FAMILIES
        ]
        outputs = llm.generate(
            prompts * len(TEMPERATURES),
            [
                SamplingParams(temperature=temperature, seed=number, max_tokens=24)
                for temperature in TEMPERATURES
                for number in range(len(prompts))
            ],
        )
        stats = llm.stats().speculation
    parts = [
        outputs[start : start + len(prompts)] for start in range(0, len(outputs), len(prompts))
    ]
    return Answers(dict(zip(TEMPERATURES, parts, strict=True)), stats)
