"""`stagecoach demo`: the bundled model on two stages and two ranks answers a few prompts."""

import sys
import time
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from stagecoach.demo.evaluation import render_prompt
from stagecoach.demo.example import Example
from stagecoach.demo.tasks import FAMILIES, generate
from stagecoach.errors import ConfigError
from stagecoach.llm import LLM
from stagecoach.outputs import RequestOutput
from stagecoach.request import SamplingParams
from stagecoach.text import xtml

_MAX_SHOWN = 600  # characters of a long prompt
_MAX_TOKENS = 512


class _Answer(NamedTuple):
    family: str
    output: RequestOutput
    seconds: float


def demo(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Ask this instead of the built-in prompts; may be given several times.",
        ),
    ] = None,
    eval_seed: Annotated[int, typer.Option(help="Which built-in prompts.")] = 7,
    speculation: Annotated[
        bool,
        typer.Option(help="Draft with demo-draft, unless --speculative-config says otherwise."),
    ] = True,
    engine_options: dict[str, Any],
) -> None:
    """Start the bundled Kimi-K3 in miniature, split over pp 2 x tp 2 unless told otherwise."""
    if speculation:
        engine_options = {"speculative_config": {"model": "demo-draft"}, **engine_options}
    elif "speculative_config" in engine_options:
        raise ConfigError("--no-speculation and --speculative-config contradict each other")
    began = time.perf_counter()
    with LLM("demo", **engine_options) as llm:
        sys.stderr.write(f"Ready in {time.perf_counter() - began:.1f} s: {_layout(llm)}\n\n")
        answers = [
            _answer(llm, family, example) for family, example in _questions(prompt, eval_seed)
        ]
        Console().print(_table(llm, answers))
        if llm.config.engine.enable_prefix_caching:
            sys.stdout.write(_ask_again(llm, max(answers, key=_num_prompt_tokens)))


def _questions(prompts: list[str] | None, seed: int) -> list[tuple[str, Example | str]]:
    if prompts:
        return [("yours", prompt) for prompt in prompts]
    return [(family, generate(family, seed, 0, "held_out")) for family in FAMILIES]


def _answer(llm: LLM, family: str, question: Example | str) -> _Answer:
    """Show the question, then the answer as it is written."""
    if isinstance(question, Example):
        token_ids = render_prompt(llm, question)
        messages = question.messages
    else:
        messages = ({"role": "user", "content": question},)
        token_ids = llm.render_chat(messages)
    sys.stdout.write(f"[{family}] {len(token_ids)} prompt tokens\n")
    for message in messages:
        sys.stdout.write(f"{message['role']}: {_shorten(str(message.get('content') or ''))}\n")
    sys.stdout.write("assistant: ")
    params = SamplingParams(
        temperature=0.0,
        max_tokens=min(_MAX_TOKENS, llm.config.max_model_len),
        skip_special_tokens=False,
    )
    began = time.perf_counter()
    num_shown = 0
    for output in llm.stream(token_ids, params):
        text = _readable(output.outputs[0].text)
        sys.stdout.write(text[num_shown:])
        sys.stdout.flush()
        num_shown = max(num_shown, len(text))
    sys.stdout.write("\n\n")
    return _Answer(family, output, time.perf_counter() - began)


def _num_prompt_tokens(answer: _Answer) -> int:
    return len(answer.output.prompt_token_ids)


def _ask_again(llm: LLM, answer: _Answer) -> str:
    """A line that says what the prefix cache spares when a prompt comes a second time."""
    token_ids = answer.output.prompt_token_ids
    params = SamplingParams(temperature=0.0, max_tokens=1)
    [again] = llm.generate(token_ids, params, use_tqdm=False)
    first, second = (
        (output.timings.first_token_seconds or 0.0) * 1000 for output in (answer.output, again)
    )
    return (
        f"{answer.family} once more: {again.num_cached_tokens} of {len(token_ids)} prompt tokens "
        f"from the prefix cache,\nprefill {second:.0f} ms instead of {first:.0f} ms\n"
    )


def _readable(text: str) -> str:
    """Channel markers as short tags; a marker that is not complete yet stays out."""
    for marker, tag in (
        (xtml.OPEN, "<"),
        (xtml.CLOSE, "</"),
        (xtml.SEP, ">"),
        (xtml.END_OF_MESSAGE, ""),
    ):
        text = text.replace(marker, tag)
    return text


def _shorten(text: str) -> str:
    if len(text) <= _MAX_SHOWN:
        return text
    half = _MAX_SHOWN // 2
    return f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"


def _layout(llm: LLM) -> str:
    engine = llm.config.engine
    layers = " + ".join(map(str, llm.config.partition))
    drafts = f", up to {llm.config.num_draft_tokens} drafts" if llm.config.speculation else ""
    return (
        f"{engine.pipeline_parallel_size} stages ({layers} layers) x "
        f"{engine.tensor_parallel_size} tensor-parallel ranks, {llm.config.dtype}{drafts}"
    )


def _table(llm: LLM, answers: list[_Answer]) -> Table:
    """At most 80 columns wide."""
    table = Table(title=_layout(llm))
    columns = ["prompt", "tokens\nin", "prefill\nms", "tokens\nout", "tokens\na second"]
    if llm.config.speculation is not None:
        columns += ["drafts\naccepted", "tokens\na round"]
    for column in columns:
        table.add_column(column, justify="left" if column == "prompt" else "right")
    for answer in answers:
        timings = answer.output.timings
        first = timings.first_token_seconds or 0.0
        num_tokens = len(answer.output.outputs[0].token_ids)
        decode_seconds = timings.total_seconds - first
        rate = (num_tokens - 1) / decode_seconds if decode_seconds > 0 else 0.0
        row = [
            answer.family,
            str(len(answer.output.prompt_token_ids)),
            f"{first * 1000:.0f}",
            str(num_tokens),
            f"{rate:.1f}",
        ]
        if llm.config.speculation is not None:
            mean = timings.mean_acceptance_length
            row.append(f"{timings.num_accepted_tokens} of {timings.num_draft_tokens}")
            row.append("-" if mean is None else f"{mean:.2f}")
        table.add_row(*row)
    return table
