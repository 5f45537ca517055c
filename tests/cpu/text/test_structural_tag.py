"""Structural tags of both forms: what is let through, what is refused by name."""

from typing import Any

import pytest

from stagecoach.errors import RequestError
from stagecoach.request import StructuredOutputsParams
from tests.cpu.grammar.walks import XTML, allowed_ids, compiler_of, small_tokenizer

TOKENIZER = small_tokenizer(XTML)
COMPILER = compiler_of(TOKENIZER)

COUNT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=foo>", "schema": COUNT, "end": "</f>"},
        {"begin": "<f=bar>", "schema": {"type": "string"}, "end": "</f>"},
        {"begin": "[x]", "schema": {"type": "integer"}, "end": ""},
    ],
    "triggers": ["<f=", "[x"],
}
DIGITS = {"type": "regex", "pattern": "[0-9]+"}


def newer(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(trigger: str, *tags: dict[str, Any], **flags: bool) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), **flags}


def separated(**flags: bool) -> dict[str, Any]:
    tags = [tag("<t>", DIGITS, ["</t>", "!"])]
    return {"type": "tags_with_separator", "tags": tags, "separator": ", ", **flags}


def is_whole(structural_tag: Any, parts: tuple[str, ...]) -> bool:
    """Whether `parts`, texts and names of special tokens behind a !, are a whole output."""
    constraint = COMPILER.compile(StructuredOutputsParams(structural_tag=structural_tag))
    token_ids = [
        token_id
        for part in parts
        for token_id in (
            [TOKENIZER.special_id(part[1:])] if part[:1] == "!" else TOKENIZER.encode(part)
        )
    ]
    constraint.advance(tuple(token_ids))
    ends = set(TOKENIZER.eos_token_ids)
    return constraint.error is None and ends <= set(allowed_ids(constraint, TOKENIZER))


SPECIAL = tag("<|open|>a", {"type": "any_text"}, "<|close|>")
ANY = {"type": "any_text"}
ANY_JSON = {"type": "json_schema", "json_schema": True}

CASES: list[tuple[Any, list[tuple[str, ...]], list[tuple[str, ...]]]] = [
    (
        OLDER,
        [
            ("hello",),
            (),
            ('a <f=foo>{"a":1}</f> b [y',),
            ('<f=foo>{"a": 1}</f><f=bar>"q"</f> t [x]12 z',),
            ("a <f",),
        ],
        [('<f=foo>{"b":1}</f>',), ("<f=baz>",), ('<f=bar>"a"',), ("[x1",), ("a", "!<|open|>")],
    ),
    (newer(const("a<|pad|>b")), [("a", "!<|pad|>", "b")], [("a<|pad|>b",), ("a",)]),
    (newer(tag("<t>", ANY, "</t>")), [("<t>a<</t>",)], [("<t>a</t>b",), ("<t>a",)]),
    (newer(SPECIAL), [("!<|open|>", "axyz", "!<|close|>")], [("<|open|>axyz", "!<|close|>")]),
    (newer(separated()), [(), ("<t>1</t>, <t>2!",)], [("<t>1</t><t>2!",), ("<t>1",)]),
    (newer(separated(at_least_one=True)), [("<t>1!",)], [(), ("<t>1!, ",)]),
    (newer(separated(stop_after_first=True)), [(), ("<t>1!",)], [("<t>1!, <t>2!",)]),
    (
        newer(
            {
                "type": "sequence",
                "elements": [
                    const("A"),
                    {"type": "or", "elements": [const("b"), ANY_JSON]},
                    triggered("<|sep|>", tag("<|sep|>k", ANY, "<|close|>"), at_least_one=True),
                ],
            }
        ),
        [
            ("Ab so", "!<|sep|>", "k any", "!<|close|>", "q"),
            ("A[1, 2]", "!<|sep|>", "k", "!<|close|>"),
        ],
        [("Ab so",), ("Ac", "!<|sep|>", "k", "!<|close|>"), ("Ab", "!<|sep|>", "x")],
    ),
    (
        newer(triggered("<t", tag("<t>", DIGITS, "</t>"), stop_after_first=True)),
        [("a",), ("a <t>1</t>",)],
        [("a <t>1</t>b",), ("a <t",)],
    ),
]


@pytest.mark.parametrize(("structural_tag", "accepted", "refused"), CASES)
def test_what_is_let_through(
    structural_tag: Any, accepted: list[tuple[str, ...]], refused: list[tuple[str, ...]]
) -> None:
    for parts in accepted:
        assert is_whole(structural_tag, parts), parts
    for parts in refused:
        assert not is_whole(structural_tag, parts), parts


@pytest.mark.parametrize(
    ("structural_tag", "message"),
    [
        ("{", "structural_tag is no JSON"),
        ({"type": "structural_tag"}, "triggers must be a list"),
        ({**OLDER, "triggers": ["<g"]}, "must open with exactly one of the triggers"),
        ({**OLDER, "triggers": ["<f=", "<f", "["]}, "must open with exactly one of the triggers"),
        ({**OLDER, "structures": ["<f="]}, "structures: must be an object"),
        (newer({"type": "qwen_xml_parameter"}), "'qwen_xml_parameter' is not supported"),
        (newer({"elements": []}), "format type None is not supported"),
        (newer({**ANY, "excludes": ["a"]}), "excludes of any_text is not supported"),
        (newer({"type": "sequence", "elements": [ANY, const("a")]}), "any_text must be"),
        (newer({"type": "sequence", "elements": []}), "elements must be a list"),
        (newer(tag("a", triggered("<t", tag("<t>", ANY, "x")), "b")), "triggered_tags must come"),
        (newer(tag("a", ANY, ["b", "<|close|>"])), "any_text must end in texts, or in single"),
        (newer(triggered("a<|sep|>", tag("a<|sep|>b", ANY, "c"))), "or one special token"),
        (newer(tag("a", DIGITS, None)), "the end of a tag must be"),
        (newer(const("")), "value must be a text that is not empty"),
    ],
)
def test_what_cannot_be_said_exactly_is_named(structural_tag: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        is_whole(structural_tag, ())
    assert caught.value.field == "structured_outputs"


def test_formats_are_not_nested_for_ever() -> None:
    form = const("a")
    for _ in range(40):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(RequestError, match="nested deeper than"):
        is_whole(newer(form), ("a",))
