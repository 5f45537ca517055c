"""Exact-match scores of a model on held-out examples of the task families.

Owns the way from an example, and solved ones before it, to a prompt and from an answer's tokens to
a grade, and the report on how speculation and prefix caching went meanwhile. All examples go
through one fresh engine at once, whose seed draws the answers, so a run can be repeated.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stagecoach.demo import tasks
from stagecoach.demo.example import Example
from stagecoach.llm import LLM
from stagecoach.outputs import RequestOutput
from stagecoach.request import SamplingParams
from stagecoach.schedule.speculation_stats import SpeculationStats, tokens_per_round
from stagecoach.text.chat import parse_answer


class WrongAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One example that was not answered exactly right."""

    task: str
    index: int
    answer: str
    error: str | None = None  # why there is no whole answer


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
    num_fewshot: int  # solved examples before each
    seed: int  # of the examples
    temperature: float
    engine_seed: int  # drew the answers at temperatures above 0
    num_prompt_tokens: int
    cached_share: float | None  # of the prompt tokens; None: no prefix caching
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
    num_fewshot: int = 0,
) -> EvaluationReport:
    """Answer `limit` held-out examples of each family and grade them.

    The engine has answered nothing before: its statistics are taken for those of this call.

    Args:
        num_fewshot: solved examples of the same family that come before each question as earlier
            turns, the same ones for all its questions.
    """
    examples = [
        (index, tasks.generate(family, seed, index, "held_out"))
        for family in families
        for index in range(limit)
    ]
    shots = {family: draw_shots(family, seed, num_fewshot) for family in families}
    prompts = [render_prompt(llm, example, shots[example.family]) for _, example in examples]
    params = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, skip_special_tokens=False
    )
    began = time.perf_counter()
    if num_fewshot and llm.config.engine.enable_prefix_caching:
        # All questions start together: what they share has to be there before.
        shared = [
            llm.render_chat(_solved(shots[family]), add_generation_prompt=False)
            for family in families
        ]
        llm.generate(shared, SamplingParams(max_tokens=1), use_tqdm=False)
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    outputs_of: dict[str, list[RequestOutput]] = {family: [] for family in families}
    num_right = dict.fromkeys(families, 0)
    wrong = []
    for (index, example), output in zip(examples, outputs, strict=True):
        outputs_of[example.family].append(output)
        completion = output.outputs[0]
        parsed = parse_answer(
            llm.config.model.model_type,
            llm.tokenizer,
            completion.token_ids,
            prompt_token_ids=output.prompt_token_ids,
        )
        if tasks.grade(example, parsed):
            num_right[example.family] += 1
        else:
            wrong.append(
                WrongAnswer(
                    task=example.family,
                    index=index,
                    answer=completion.text,
                    error=completion.error,
                )
            )
    engine, stats = llm.config.engine, llm.stats()
    counts = stats.speculation
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
    return EvaluationReport(
        model=engine.model,
        engine=f"pp {engine.pipeline_parallel_size}, tp {engine.tensor_parallel_size}, "
        f"{llm.config.dtype}" + (f", k {llm.config.num_draft_tokens}" if counts else ""),
        tasks={family: count / limit for family, count in num_right.items()},
        num_examples=limit,
        num_fewshot=num_fewshot,
        seed=seed,
        temperature=temperature,
        engine_seed=engine.seed,
        num_prompt_tokens=num_prompt_tokens,
        cached_share=num_cached_tokens / num_prompt_tokens if stats.prefix_cache else None,
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


def draw_shots(family: str, seed: int, count: int) -> tuple[Example, ...]:
    """`count` examples to show solved, none of which is ever asked: the shortest of four times
    as many, since all of them stand before every question."""
    drawn = [tasks.generate(family, seed, index, "train") for index in range(4 * count)]
    return tuple(sorted(drawn, key=lambda example: len(str(example.messages)))[:count])


def render_prompt(llm: LLM, example: Example, shots: Sequence[Example] = ()) -> list[int]:
    """Prompt token ids of an example behind solved ones, up to the opening of the answer.

    A declaration of tools at the front would differ from question to question, and nothing would
    be shared; so behind shots each example's tools are declared where it begins.
    """
    return llm.render_chat(
        [*_solved(shots), *(_late_tools(example) if shots else ()), *example.messages],
        tools=None if shots else example.tools or None,
        response_format=example.response_format,
        thinking=example.thinking,
    )


def _solved(shots: Sequence[Example]) -> list[Mapping[str, Any]]:
    """The turns of examples with their answers."""
    return [
        message
        for shot in shots
        for message in (*_late_tools(shot), *shot.messages, shot.answer_message)
    ]


def _late_tools(example: Example) -> tuple[Mapping[str, Any], ...]:
    return ({"role": "system", "tools": example.tools},) if example.tools else ()
