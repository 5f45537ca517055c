"""Exact-match scores of a model on held-out examples of the task families.

Owns the way from an example to a prompt and from an answer's tokens to a grade. All examples
go through one engine at once; the answers are greedy, so the scores are reproducible.
"""

import time

import msgspec

from stagecoach.demo import tasks
from stagecoach.demo.example import Example
from stagecoach.llm import LLM
from stagecoach.request import SamplingParams
from stagecoach.text import chat_format


class WrongAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One example that was not answered exactly right."""

    task: str
    index: int
    answer: str


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `stagecoach eval --json` prints."""

    model: str
    engine: str  # layout, e.g. "pp 2, tp 2, float32"
    tasks: dict[str, float]  # share answered exactly right, by family
    num_examples: int  # of each family
    seed: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    wrong: tuple[WrongAnswer, ...]


def evaluate_model(
    llm: LLM, *, families: tuple[str, ...], limit: int, seed: int, max_tokens: int
) -> EvaluationReport:
    """Answer `limit` held-out examples of each family and grade them."""
    examples = [
        (index, tasks.generate(family, seed, index, "held_out"))
        for family in families
        for index in range(limit)
    ]
    prompts = [render_prompt(llm, example) for _, example in examples]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, skip_special_tokens=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    num_right = dict.fromkeys(families, 0)
    wrong = []
    for (index, example), output in zip(examples, outputs, strict=True):
        completion = output.outputs[0]
        parsed = chat_format.parse(completion.token_ids, llm.tokenizer)
        if tasks.grade(example, parsed):
            num_right[example.family] += 1
        else:
            wrong.append(WrongAnswer(task=example.family, index=index, answer=completion.text))
    engine = llm.config.engine
    return EvaluationReport(
        model=engine.model,
        engine=f"pp {engine.pipeline_parallel_size}, tp {engine.tensor_parallel_size}, "
        f"{llm.config.dtype}",
        tasks={family: count / limit for family, count in num_right.items()},
        num_examples=limit,
        seed=seed,
        num_prompt_tokens=sum(len(prompt) for prompt in prompts),
        num_output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds=seconds,
        wrong=tuple(wrong),
    )


def render_prompt(llm: LLM, example: Example) -> list[int]:
    """Prompt token ids of an example, up to the opening of the answer."""
    return llm.render_chat(
        example.messages,
        tools=example.tools or None,
        response_format=example.response_format,
        thinking=example.thinking,
    )
