"""Exact-match scores of a model on held-out examples of the task families.

Owns the way from an example to a prompt and from an answer's tokens to a grade, and the report
on how speculation went meanwhile. All examples go through one fresh engine at once, whose seed
draws the answers, so a run can be repeated.
"""

import time

import msgspec

from stagecoach.demo import tasks
from stagecoach.demo.example import Example
from stagecoach.llm import LLM
from stagecoach.outputs import RequestOutput
from stagecoach.request import SamplingParams
from stagecoach.schedule.speculation_stats import SpeculationStats, tokens_per_round
from stagecoach.text import chat_format


class WrongAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One example that was not answered exactly right."""

    task: str
    index: int
    answer: str


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the drafts of an evaluation fared; shares and means are None where nothing counts."""

    tokens_per_round: float | None  # mean tokens of a verify round
    tokens_per_round_by_task: dict[str, float | None]
    acceptance_per_position: tuple[float | None, ...]  # accepted share of drafts at places 1..k
    counts: SpeculationStats


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `stagecoach eval --json` prints."""

    model: str
    engine: str  # layout, e.g. "pp 2, tp 2, float32"; ", k 7" with up to seven drafts
    tasks: dict[str, float]  # share answered exactly right, by family
    num_examples: int  # of each family
    seed: int  # of the examples
    temperature: float
    engine_seed: int  # drew the answers at temperatures above 0
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    wrong: tuple[WrongAnswer, ...]
    speculation: SpeculationReport | None  # None: without a draft


def evaluate_model(
    llm: LLM,
    *,
    families: tuple[str, ...],
    limit: int,
    seed: int,
    max_tokens: int,
    temperature: float = 0.0,
) -> EvaluationReport:
    """Answer `limit` held-out examples of each family and grade them.

    The engine has answered nothing before: its statistics are taken for those of this call.
    """
    examples = [
        (index, tasks.generate(family, seed, index, "held_out"))
        for family in families
        for index in range(limit)
    ]
    prompts = [render_prompt(llm, example) for _, example in examples]
    params = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, skip_special_tokens=False
    )
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    outputs_of: dict[str, list[RequestOutput]] = {family: [] for family in families}
    num_right = dict.fromkeys(families, 0)
    wrong = []
    for (index, example), output in zip(examples, outputs, strict=True):
        outputs_of[example.family].append(output)
        completion = output.outputs[0]
        parsed = chat_format.parse(completion.token_ids, llm.tokenizer)
        if tasks.grade(example, parsed):
            num_right[example.family] += 1
        else:
            wrong.append(WrongAnswer(task=example.family, index=index, answer=completion.text))
    engine, counts = llm.config.engine, llm.stats().speculation
    return EvaluationReport(
        model=engine.model,
        engine=f"pp {engine.pipeline_parallel_size}, tp {engine.tensor_parallel_size}, "
        f"{llm.config.dtype}" + (f", k {llm.config.num_draft_tokens}" if counts else ""),
        tasks={family: count / limit for family, count in num_right.items()},
        num_examples=limit,
        seed=seed,
        temperature=temperature,
        engine_seed=engine.seed,
        num_prompt_tokens=sum(len(prompt) for prompt in prompts),
        num_output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds=seconds,
        wrong=tuple(wrong),
        speculation=None if counts is None else _report_speculation(counts, outputs_of),
    )


def _report_speculation(
    counts: SpeculationStats, outputs_of: dict[str, list[RequestOutput]]
) -> SpeculationReport:
    return SpeculationReport(
        tokens_per_round=tokens_per_round(counts.num_windows, counts.num_accepted_tokens),
        tokens_per_round_by_task={
            family: tokens_per_round(
                sum(output.timings.num_windows for output in outputs),
                sum(output.timings.num_accepted_tokens for output in outputs),
            )
            for family, outputs in outputs_of.items()
        },
        acceptance_per_position=tuple(
            accepted / drafted if drafted else None
            for accepted, drafted in zip(
                counts.accepted_per_position, counts.drafted_per_position, strict=True
            )
        ),
        counts=counts,
    )


def render_prompt(llm: LLM, example: Example) -> list[int]:
    """Prompt token ids of an example, up to the opening of the answer."""
    return llm.render_chat(
        example.messages,
        tools=example.tools or None,
        response_format=example.response_format,
        thinking=example.thinking,
    )
