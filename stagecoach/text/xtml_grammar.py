"""Answers in XTML as a grammar: channels, calls, and arguments in the form of the renderer.

    reasoning ─ close think ─ open response ─ content ─ close response ─ tools ─ close message

Each marker is a special token, so that no text of a channel can end it. Knows no prompt but for
the channel that it leaves open.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stagecoach.errors import RequestError
from stagecoach.text import lark
from stagecoach.text.answer_form import AnswerForm, CallableFunction
from stagecoach.text.argument_schema import ArgumentForm, argument_forms
from stagecoach.text.tokenizer import Tokenizer
from stagecoach.text.xtml import CLOSE, OPEN, SEP, escape_attribute
from stagecoach.text.xtml_parser import XtmlParser

_JSON_BLOCK = 'json type="object"'
_ANY_KEY = '/([^"&]|&amp;|&quot;)+/'
# Types of arguments as the renderer names them, and what of each type is JSON.
_ANY_JSON: Mapping[str, Mapping[str, Any]] = {
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "object": {"type": "object"},
    "array": {"type": "array"},
}


def xtml_answer(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], form: AnswerForm) -> str:
    """The grammar of an answer.

    Raises:
        RequestError: field "messages": the prompt opens what is no channel of reasoning or content.
    """
    tags = _Tags(tokenizer)
    open_response = tags.open("response")
    think = f"{lark.ANY_TEXT} {tags.close('think')} {open_response}"
    channel = XtmlParser(tokenizer, prompt_token_ids=prompt_token_ids).channel
    openings = {
        "think": think,
        "response": "",
        None: lark.any_of((f"{tags.open('think')} {think}", open_response)),
    }
    if channel not in openings:
        raise RequestError("messages", f"the prompt opens the channel {channel}")
    rest = f"answer {tags.close('message')}"
    rules = [f"answer: {_answer(tags, form)}"]
    if form.functions:
        calls = "call" if form.is_one_call else "call+"
        rules += [
            f"tools: {tags.open('tools')} {calls} {tags.close('tools')}",
            f"call: {' | '.join(_call(tags, item, form) for item in form.functions)}",
        ]
    return lark.whole_grammar(f"{openings[channel]} {rest}", rules)


def _answer(tags: "_Tags", form: AnswerForm) -> str:
    close = tags.close("response")
    if form.must_call:
        return f"{close} tools"
    if not form.functions:
        return f"{form.content or lark.ANY_TEXT} {close}"
    if form.content is None:
        return f"{lark.ANY_TEXT} {close} {lark.optional('tools')}"
    # Content of a form is the whole answer, or calls are.
    return f"{form.content} {close} | {close} tools"


def _call(tags: "_Tags", function: CallableFunction, form: AnswerForm) -> str:
    opening = lark.quoted(f'call tool="{escape_attribute(function.name)}" index="')
    index = '"1"' if form.is_one_call else "/[1-9][0-9]{0,3}/"
    call = tags.open_with(f'{opening} {index} "\\""')
    return f"{call} {_arguments(tags, function)} {tags.close('call')}"


def _arguments(tags: "_Tags", function: CallableFunction) -> str:
    parameters = function.parameters
    if parameters is None:
        return f"({_any_argument(tags)})*"
    forms = argument_forms(parameters, is_lenient=function.is_lenient)
    if forms is None:
        block = lark.json_piece(parameters, is_lenient=function.is_lenient)
        return f"{tags.open(_JSON_BLOCK)} {block} {tags.close('json')}"
    return " ".join(_argument(tags, name, form) for name, form in forms.items())


def _argument(tags: "_Tags", name: str, form: ArgumentForm) -> str:
    opening = f'argument key="{escape_attribute(name)}"'
    piece = lark.any_of(
        tags.open(f'{opening} type="{type_name}"') + f" {value} {tags.close('argument')}"
        for type_name, value in form.values
    )
    return piece if form.is_required else f"{piece}?"


def _any_argument(tags: "_Tags") -> str:
    values = {"string": lark.ANY_TEXT}
    values |= {type_name: lark.json_piece(schema) for type_name, schema in _ANY_JSON.items()}
    opening = lark.quoted('argument key="')
    return lark.any_of(
        tags.open_with(f"{opening} {_ANY_KEY} " + lark.quoted(f'" type="{type_name}"'))
        + f" {value} {tags.close('argument')}"
        for type_name, value in values.items()
    )


class _Tags:
    """Writes tags."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._open = lark.special_token(tokenizer.special_id(OPEN))
        self._close = lark.special_token(tokenizer.special_id(CLOSE))
        self._sep = lark.special_token(tokenizer.special_id(SEP))

    def open(self, text: str) -> str:
        return self.open_with(lark.quoted(text))

    def open_with(self, piece: str) -> str:
        return f"{self._open} {piece} {self._sep}"

    def close(self, name: str) -> str:
        return f"{self._close} {lark.quoted(name)} {self._sep}"
