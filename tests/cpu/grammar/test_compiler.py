"""What each field of structured outputs lets through, how much it may cost, what is refused."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.errors import RequestError
from stagecoach.request import StructuredOutputsParams
from stagecoach.text.lark import MAX_GRAMMAR_CHARS
from tests.cpu.grammar.random_schemas import SCHEMAS
from tests.cpu.grammar.walks import XTML, allowed_ids, compiler_of, small_tokenizer, walk

TOKENIZER = small_tokenizer(XTML)
COMPILER = compiler_of(TOKENIZER)


def is_whole(params: StructuredOutputsParams, text: str) -> bool:
    """Whether `text` is allowed, and may end."""
    constraint = COMPILER.compile(params)
    for token_id in TOKENIZER.encode(text):
        if token_id not in allowed_ids(constraint, TOKENIZER):
            return False
        constraint.advance((token_id,))
    return TOKENIZER.eos_token_ids[0] in allowed_ids(constraint, TOKENIZER)


@settings(max_examples=80)
@given(SCHEMAS, st.integers(0, 2**32))
def test_json_obeys_its_schema(schema: dict[str, Any], seed: int) -> None:
    constraint = COMPILER.compile(StructuredOutputsParams(json=schema))
    text = TOKENIZER.decode_bytes(walk(constraint, TOKENIZER, Random(seed))).decode()
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("params", "accepted", "refused"),
    [
        ({"json": '{"type": "integer"}'}, ["1", "-12"], ["a", "", "1.5"]),
        ({"json_object": True}, ["{}", '{"a": [1, {}]}'], ["[]", "1"]),
        ({"regex": "[a-c]+/\\d\n?"}, ["ab/1", "c/2\n"], ["ab/", "d/1", "ab/1x"]),
        ({"regex": "^(é|x)$"}, ["é", "x"], ["", "éx"]),
        ({"choice": ("a", "ab", 'say "{}" // #\n\x01😀')}, ["a", 'say "{}" // #\n\x01😀'], ["b"]),
        ({"grammar": 'start: "a" b\nb: "b" | "(" b ")"'}, ["ab", "a((b))"], ["a((b)", "b"]),
        ({"grammar": 'root ::= "a" [0-9]+ | "b"'}, ["a12", "b"], ["a", "ab"]),
    ],
)
def test_each_field(params: dict[str, Any], accepted: list[str], refused: list[str]) -> None:
    for text in accepted:
        assert is_whole(StructuredOutputsParams(**params), text), text
    for text in refused:
        assert not is_whole(StructuredOutputsParams(**params), text), text


def test_blanks_of_json_come_once() -> None:
    params = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})
    for text in ("[1,2]", "[1, 2]", "[\n  1,\n  2\n]", "[ 1 , 2 ]"):
        assert is_whole(params, text), text
    for text in ("[  1]", "[\n\n1]", "[1,\t2]", " [1]", "[1]\n", "[\n" + " " * 33 + "1]"):
        assert not is_whole(params, text), text


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": "{"}, "json is no JSON"),
        ({"json": "[1]"}, "json must be a JSON object"),
        ({"json": {"type": "text"}}, "Invalid type: text"),
        (
            {"json": {"oneOf": [{"type": "string"}, {"minLength": 3}]}},
            "oneOf constraints are not supported$",
        ),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"$ref": "#"}}, "no text obeys it"),
        ({"json": {"$ref": "#/$defs/none"}}, "failed to compile JSON schema"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "failed to compile"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": 'start: "a"\nb: ('}, r"2\(5\): Expected"),
        ({"grammar": 'start: "a" <|none|>'}, "unknown special token"),
        ({"grammar": 'root ::= ("a"'}, "grammar is no GBNF"),
        ({"grammar": '%llguidance {"allow_invalid_utf8": true}\nstart: /a/'}, "must be of texts"),
        ({"regex": "a", "json_object": True}, "exactly one of"),
        ({}, "exactly one of"),
        ({"grammar": f'start: "{"a" * MAX_GRAMMAR_CHARS}"'}, f"at most {MAX_GRAMMAR_CHARS}"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_in_one_line(params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        COMPILER.compile(StructuredOutputsParams(**params))
    assert caught.value.field == "structured_outputs"
    assert "\n" not in caught.value.reason and len(caught.value.reason) < 400
    assert "%llguidance" not in caught.value.reason


def nested_schema(depth: int, around: Callable[[Any], Any]) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = around(schema)
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"json": nested_schema(400, lambda inner: {"items": inner})},
    "deeper than Python": {"json": '{"items":' * 30_000 + "{}" + "}" * 30_000},
    "huge enum": {"json": {"enum": [f"value {number}" for number in range(15_000)]}},
    "huge choice": {"choice": tuple(f"value {number}" for number in range(15_000))},
    "many products": {
        "json": {
            "allOf": [{"anyOf": [{"minItems": 4 * i + j} for j in range(4)]} for i in range(9)]
        }
    },
    "reference loop": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "huge counts": {"json": {"items": {"type": "null"}, "minItems": 10**5, "maxItems": 10**6}},
    "many multiples": {"json": {"type": "integer", "multipleOf": 999_999_937}},
    "nested counts": {"regex": "((a{1,100}){1,100}){1,100}"},
    "counts of anything": {"regex": "(.{1,1000}){1,1000}"},
    "states that double": {"regex": ".*a.{300}b"},
    "ambiguity": {"grammar": 'start: a\na: a a | "x" | ""'},
    "brackets that never close": {"grammar": f'start: "a" // {"<[" * 140_000}'},
    "far too long": {"grammar": "~" * 20_000_000},
    "long right sides": {"grammar": f"start: {'a ' * 3000}\na: b b b\nb: /x?/"},
}


@pytest.mark.parametrize("params", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_grammar_costs_little(params: dict[str, Any]) -> None:
    began = time.process_time()
    random = Random(0)
    try:
        constraint = COMPILER.compile(StructuredOutputsParams(**params))
    except RequestError:
        constraint = None
    for _ in range(30 if constraint is not None else 0):
        assert constraint is not None
        constraint.advance((random.choice(allowed_ids(constraint, TOKENIZER)),))
        if constraint.error is not None or constraint.is_finished:
            break
    assert time.process_time() - began < 10


def test_one_text_is_compiled_once_and_grammars_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    compiler = compiler_of(TOKENIZER)
    compile_new = compiler._compile

    def counted(grammar: str) -> Any:
        made.append(grammar)
        return compile_new(grammar)

    monkeypatch.setattr(compiler, "_compile", counted)
    texts = ["ab", "abc"]
    asked = [StructuredOutputsParams(regex=texts[number % 2]) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        constraints = list(pool.map(compiler.compile, asked))
    for _ in range(2):
        with pytest.raises(RequestError, match="unclosed group"):
            compiler.compile(StructuredOutputsParams(regex="("))
    assert len(made) == 3
    # Each has its own place.
    constraints[0].advance(tuple(TOKENIZER.encode("ab")))
    assert allowed_ids(constraints[0], TOKENIZER) == sorted(TOKENIZER.eos_token_ids)
    assert allowed_ids(constraints[2], TOKENIZER) != sorted(TOKENIZER.eos_token_ids)


def test_only_the_latest_are_kept() -> None:
    compiler = compiler_of(TOKENIZER)
    for number in range(70):
        compiler.compile(StructuredOutputsParams(regex=f"a{{{number}}}"))
    long = "b" * 250_000
    for number in range(6):
        compiler.compile(StructuredOutputsParams(choice=(f"{number}{long}",)))
    kept = list(compiler._compiled)
    assert len(kept) <= 64 and sum(map(len, kept)) <= 1_000_000
    assert long in kept[-1] and kept[-1].count("5b") == 1


def test_a_limit_that_one_request_reaches_is_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of a compiled grammar share its limits."""
    limits = llguidance.LLParserLimits(max_lexer_states=400, verbose_errors=False)
    monkeypatch.setattr("stagecoach.grammar.compiler._limits", lambda: limits)
    compiler = compiler_of(TOKENIZER)
    lengths = []
    for number in range(3):
        constraint = compiler.compile(StructuredOutputsParams(regex="(.*a.{12}b|.*c.{14}d)*"))
        random = Random(number)
        length = 0
        while constraint.error is None and length < 300:
            allowed_ids(constraint, TOKENIZER)
            constraint.advance((random.choice(b"abcde"),))
            length += 1
        assert constraint.error is not None and "states" in constraint.error
        lengths.append(length)
    assert min(lengths) > 5


def test_a_compiled_grammar_is_copied_so_many_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What copies find out adds up to a limit."""
    monkeypatch.setattr("stagecoach.grammar.compiler._MAX_COPIES", 3)
    compiler = compiler_of(TOKENIZER)
    matchers = set()
    for _ in range(7):
        compiler.compile(StructuredOutputsParams(regex="abc"))
        [future] = compiler._compiled.values()
        matchers.add(future.result().matcher)
    assert len(matchers) == 3


def test_any_tokens_that_give_the_bytes_are_allowed() -> None:
    constraint = COMPILER.compile(StructuredOutputsParams(regex="abc"))
    allowed = {TOKENIZER.token_bytes(item) for item in allowed_ids(constraint, TOKENIZER)}
    assert allowed == {b"a", b"ab", b"abc"}
