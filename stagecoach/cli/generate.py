"""`stagecoach generate`: complete prompts and print them, or one JSON object."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from stagecoach.config.engine import EngineConfig
from stagecoach.errors import RequestError
from stagecoach.llm import LLM, Prompt, open_model
from stagecoach.outputs import RequestOutput
from stagecoach.request import SamplingParams, StructuredOutputsParams
from stagecoach.schedule.speculation_stats import tokens_per_round

_DEFAULT_MAX_TOKENS = 256


def generate(
    *,
    model: Annotated[str, typer.Option(help="Checkpoint folder, or `demo` or `tiny`.")] = "demo",
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A prompt; may be given several times."),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text file with one prompt a line.")
    ] = None,
    prompt_token_ids: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON", help="A prompt as token ids, as in `[1, 2, 3]`; @FILE: one a line."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Each prompt is a user's message in Kimi-K3's chat format."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with `outputs` and `stats`.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="Randomness of the choice; 0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Choose among the likeliest tokens that have this mass.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Choose among that many likeliest tokens; 0: among all.")
    ] = 0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this share of the likeliest.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken off the logit of each token that the output has.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken off for each time that the output has the token.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divides the logits of tokens of the prompt and the output.")
    ] = 1.0,
    logit_bias: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Added to logits by token id, as in `{"42": -100}`.'),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most output tokens. Default: 256, or less if the model is shorter."),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(help="Output tokens before anything but --max-tokens ends it.")
    ] = 0,
    sampling_seed: Annotated[
        int | None, typer.Option(help="Seed of every prompt. Default: derived from --seed.")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Completions of each prompt.")] = 1,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text that ends the output; may be repeated."),
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(metavar="INT", help="A token that ends the output; may be repeated."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Report each output token's log-probability, and that many others."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the tokens of the prompt.")
    ] = None,
    structured_outputs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='What the text must obey, as in `{"regex": "[0-9]+"}`; others are json, '
            "json_object, choice, grammar and structural_tag. @FILE: it stands in a file.",
        ),
    ] = None,
    cache_salt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only prompts with the same salt share cached prefixes: one for each tenant.",
        ),
    ] = None,
    engine_options: dict[str, Any],
) -> None:
    """Complete one or many prompts. One prompt without --json is printed as it is written.

    Prompts of one run that begin alike share the work on that beginning: the prefix cache keeps
    pages and states, and `num_cached_tokens` of --json says how much of a prompt it spared.
    """
    prompts = _collect_prompts(prompt, prompt_file, prompt_token_ids)
    wanted = SamplingParams(
        n=n,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_parse_logit_bias(logit_bias),
        seed=sampling_seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=_parse_structured_outputs(structured_outputs),
        skip_special_tokens=not chat,
    )
    opened = open_model(EngineConfig(model=model, **engine_options))
    params = _with_max_tokens(wanted, opened.config.max_model_len)
    opened.check_params(params)
    with LLM(opened) as llm:
        if chat:
            prompts = [
                llm.render_chat([{"role": "user", "content": text}])
                if isinstance(text, str)
                else text
                for text in prompts
            ]
        if as_json:
            outputs = llm.generate(prompts, params, cache_salt=cache_salt)
            sys.stdout.write(_to_json(outputs, llm) + "\n")
        elif len(prompts) == 1 and n == 1:
            outputs = [_print_stream(llm, prompts[0], params, cache_salt)]
        else:
            outputs = llm.generate(prompts, params, cache_salt=cache_salt)
            _print_blocks(outputs)
        if not as_json:
            _tell_cached_tokens(outputs)
            _tell_acceptance(outputs)
    _end_with_errors(outputs)


def _collect_prompts(
    prompt: list[str] | None, prompt_file: Path | None, prompt_token_ids: list[str] | None
) -> list[Prompt]:
    prompts: list[Prompt] = list(prompt or ())
    if prompt_file is not None:
        try:
            prompts += prompt_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError("prompt_file", f"{prompt_file}: {error}") from None
    for text in prompt_token_ids or ():
        prompts += _parse_token_ids(text)
    if not prompts:
        raise RequestError("prompt", "none given; use --prompt TEXT")
    return prompts


def _parse_token_ids(text: str) -> list[list[int]]:
    """One prompt, or those of the file that `@FILE` names."""
    lines = [text]
    if text.startswith("@"):
        try:
            lines = Path(text[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError("prompt_token_ids", f"{text}: {error}") from None
    try:
        return [msgspec.json.decode(line, type=list[int]) for line in lines]
    except msgspec.DecodeError:
        raise RequestError(
            "prompt_token_ids", f"must be a JSON list of integers, not {text!r}"
        ) from None


def _parse_logit_bias(text: str | None) -> dict[int, float]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[int, float])
    except msgspec.DecodeError:
        raise RequestError(
            "logit_bias", f"must be a JSON object of numbers by token id, not {text!r}"
        ) from None


def _parse_structured_outputs(text: str | None) -> StructuredOutputsParams | None:
    if text is None:
        return None
    try:
        data = Path(text[1:]).read_bytes() if text.startswith("@") else text
        return msgspec.json.decode(data, type=StructuredOutputsParams)
    except (OSError, msgspec.DecodeError) as error:
        raise RequestError("structured_outputs", f"{text}: {error}") from None


def _with_max_tokens(params: SamplingParams, max_model_len: int) -> SamplingParams:
    if params.max_tokens is not None:
        return params
    return msgspec.structs.replace(params, max_tokens=min(_DEFAULT_MAX_TOKENS, max_model_len))


def _print_stream(
    llm: LLM, prompt: Prompt, params: SamplingParams, cache_salt: str | None
) -> RequestOutput:
    num_printed = 0
    for output in llm.stream(prompt, params, cache_salt=cache_salt):
        text = output.outputs[0].text
        sys.stdout.write(text[num_printed:])
        sys.stdout.flush()
        num_printed = len(text)
    sys.stdout.write("\n")
    return output


def _print_blocks(outputs: list[RequestOutput]) -> None:
    for number, output in enumerate(outputs):
        for completion in output.outputs:
            sys.stdout.write(f"--- prompt {number}, completion {completion.index}\n")
            sys.stdout.write(completion.text + "\n")


def _tell_cached_tokens(outputs: list[RequestOutput]) -> None:
    """One line on stderr, where the prefix cache spared work."""
    num_cached = sum(output.num_cached_tokens for output in outputs)
    if num_cached:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        sys.stderr.write(f"{num_cached} of {num_prompt} prompt tokens came from the cache\n")


def _end_with_errors(outputs: list[RequestOutput]) -> None:
    """Exit status 1, and a line for each completion that ended with an error."""
    errors = [
        f"stagecoach: {completion.error} (prompt {number}, completion {completion.index})\n"
        for number, output in enumerate(outputs)
        for completion in output.outputs
        if completion.error is not None
    ]
    if errors:
        sys.stderr.writelines(errors)
        raise SystemExit(1)


def _tell_acceptance(outputs: list[RequestOutput]) -> None:
    """One line on stderr, where drafts were verified."""
    timings = [output.timings for output in outputs]
    num_windows = sum(item.num_windows for item in timings)
    num_drafts = sum(item.num_draft_tokens for item in timings)
    num_accepted = sum(item.num_accepted_tokens for item in timings)
    mean = tokens_per_round(num_windows, num_accepted)
    if mean is not None:
        sys.stderr.write(
            f"{num_windows} verify rounds accepted {num_accepted} of {num_drafts} drafts: "
            f"{mean:.2f} tokens a round\n"
        )


def _to_json(outputs: list[RequestOutput], llm: LLM) -> str:
    """`outputs` has one entry a completion, in the order of prompts."""
    entries = [
        {
            "prompt_index": number,
            "index": completion.index,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": completion.token_ids,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "error": completion.error,
            "logprobs": None
            if completion.logprobs is None
            else [_logprob_object(entry) for entry in completion.logprobs],
            "prompt_logprobs": None
            if output.prompt_logprobs is None
            else [
                None if entry is None else _logprob_object(entry)
                for entry in output.prompt_logprobs
            ],
            "num_cached_tokens": output.num_cached_tokens,
            "timings": {
                **msgspec.to_builtins(output.timings),
                "mean_acceptance_length": output.timings.mean_acceptance_length,
            },
        }
        for number, output in enumerate(outputs)
        for completion in output.outputs
    ]
    told = llm.stats()
    stats = msgspec.to_builtins(told)
    for name in ("type", "query_id"):
        stats.pop(name)
    if told.speculation is not None:
        stats["speculation"]["mean_acceptance_length"] = told.speculation.mean_acceptance_length
    if told.prefix_cache is not None:
        stats["prefix_cache"]["hit_rate"] = told.prefix_cache.hit_rate
    return msgspec.json.encode({"outputs": entries, "stats": stats}).decode()


def _logprob_object(entry: Any) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}
