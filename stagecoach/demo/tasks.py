"""The task families by name: drawing examples, and grading answers.

An example is a function of family, seed, index, and split. The splits are disjoint by
construction: a prompt's own hash says which split it belongs to (`Example.split`), and drawing
goes on until a prompt of the wanted split comes up. Families that are not scored have no splits.
"""

import json
from random import Random

from stagecoach.demo.example import Example, Split
from stagecoach.demo.families import (
    arithmetic,
    extraction,
    lists_dates,
    multi_turn,
    retrieval,
    small_talk,
    tool_calls,
)
from stagecoach.text.message_stream import ParsedMessage, ToolCall

# The families that are scored.
FAMILIES = (
    arithmetic.FAMILY,
    tool_calls.FAMILY,
    extraction.FAMILY,
    retrieval.FAMILY,
    multi_turn.FAMILY,
    lists_dates.FAMILY,
)

_DRAWERS = {
    module.FAMILY: module.draw
    for module in (
        arithmetic,
        tool_calls,
        extraction,
        retrieval,
        multi_turn,
        lists_dates,
        small_talk,
    )
}
ALL_FAMILIES = tuple(_DRAWERS)


def generate(family: str, seed: int, index: int, split: Split = "held_out") -> Example:
    """The example number `index` of a family under `seed`."""
    drawer = _DRAWERS.get(family)
    if drawer is None:
        raise ValueError(f"unknown task family {family!r}; there are {', '.join(ALL_FAMILIES)}")
    random = Random(f"{family}/{seed}/{index}/{split}")
    while True:
        example = drawer(random)
        if example.split == split or family not in FAMILIES:
            return example


def grade(example: Example, parsed: ParsedMessage) -> bool:
    """Whether an answer is exactly right: tool calls and JSON by value, words by letter.

    The think channel is not graded.
    """
    expected = example.expected
    if [_call_value(call) for call in parsed.tool_calls] != [
        _call_value(call) for call in expected.tool_calls
    ]:
        return False
    if example.response_format is not None:
        return _json_value(parsed.content) == _json_value(expected.content)
    return parsed.content.strip() == expected.content.strip()


def _call_value(call: ToolCall) -> tuple[str, object]:
    return call.name, _json_value(call.arguments)


def _json_value(text: str) -> object:
    """The value of JSON text, tagged, so that text that is no JSON equals no JSON."""
    try:
        return "json", json.dumps(json.loads(text), sort_keys=True)
    except json.JSONDecodeError:
        return "text", text
