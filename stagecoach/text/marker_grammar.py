"""Answers of models whose markers are single special tokens, as a grammar; see marker_parser.

    reasoning ─ </think> ─ content ─ section of calls

Knows no prompt but for the place that it leaves open.
"""

import re
from collections.abc import Sequence

from stagecoach.errors import RequestError
from stagecoach.text import lark
from stagecoach.text.answer_form import AnswerForm, CallableFunction
from stagecoach.text.marker_parser import MarkerParser
from stagecoach.text.tokenizer import Tokenizer

_THINK = ("<think>", "</think>")
_CALLS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_ANY_OBJECT = {"type": "object"}
_NAME = re.compile(r"[^\s:]+")


def marker_answer(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], form: AnswerForm) -> str:
    """The grammar of an answer.

    Raises:
        RequestError: field "tools", "tool_choice" or "messages": the format has no word for it.
    """
    rules: list[str] = []
    functions = form.functions
    if functions and not _has(tokenizer, _CALLS):
        if form.must_call:
            raise RequestError("tool_choice", "the model's vocabulary has no markers of tool calls")
        functions = ()
    if functions:
        section_begin, call_begin, arguments_begin, call_end, section_end = (
            lark.special_token(tokenizer.special_id(name)) for name in _CALLS
        )
        calls = "call" if form.is_one_call else "call+"
        bodies = lark.any_of(_body(function, arguments_begin) for function in functions)
        rules += [
            f"tools: {section_begin} {calls} {section_end}",
            f"call: {call_begin} {bodies} {call_end}",
        ]
    content = form.content or lark.ANY_TEXT
    if form.must_call:
        answer = "tools"
    elif not functions:
        answer = content
    elif form.content is None:
        answer = f"{content} {lark.optional('tools')}"
    else:
        answer = f"{content} | tools"
    rules.append(f"answer: {answer}")
    return lark.whole_grammar(f"{_opening(tokenizer, prompt_token_ids)} answer", rules)


def _opening(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> str:
    """What comes before content: reasoning, where the model has it and the prompt does not."""
    if not _has(tokenizer, _THINK):
        return ""
    begin, end = (lark.special_token(tokenizer.special_id(name)) for name in _THINK)
    parser = MarkerParser(
        tokenizer,
        prompt_token_ids=prompt_token_ids,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    if parser.place == "reasoning":
        return f"{lark.ANY_TEXT} {end}"
    if parser.place != "content":
        raise RequestError("messages", f"the prompt opens a tool call: its {parser.place}")
    return "" if parser.has_reasoned else lark.optional(f"{begin} {lark.ANY_TEXT} {end}")


def _body(function: CallableFunction, arguments_begin: str) -> str:
    if not _NAME.fullmatch(function.name):
        raise RequestError(
            "tools", f"the chat format has no function named {function.name!r:.60}: no blank, no :"
        )
    header = lark.quoted(f"functions.{function.name}:")
    parameters = _ANY_OBJECT if function.parameters is None else function.parameters
    arguments = lark.json_piece(parameters, is_lenient=function.is_lenient)
    return f"{header} /[0-9]{{1,4}}/ {arguments_begin} {arguments}"


def _has(tokenizer: Tokenizer, names: Sequence[str]) -> bool:
    return set(names) <= set(tokenizer.special_names)
