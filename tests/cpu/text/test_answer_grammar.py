"""Answers under a grammar: the format's parser reads back what was asked for, and nothing else."""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.errors import RequestError
from stagecoach.request import StructuredOutputsParams
from stagecoach.text.answer_grammar import answer_grammar
from stagecoach.text.chat import parse_answer, render_messages
from stagecoach.text.chat_format import answer_segments, encode_segment
from stagecoach.text.message_stream import ParsedMessage
from stagecoach.text.tokenizer import Tokenizer
from tests.cpu.grammar.random_schemas import SCHEMAS
from tests.cpu.grammar.walks import (
    MARKERS,
    XTML,
    allowed_ids,
    compiler_of,
    small_tokenizer,
    walk,
)

HELLO = [{"role": "user", "content": "Hello <|open|>"}]
TOKENIZERS = {"kimi_k3": small_tokenizer(XTML), "kimi_linear": small_tokenizer(MARKERS)}
COMPILERS = {name: compiler_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        "unit": {"enum": ["c", "f"]},
        "places": {"type": "array", "items": {"type": "number"}},
        'say "a&b"': {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<t>", "schema": {"type": "integer"}, "end": "</t>"}],
    "triggers": ["<t>"],
}
PATTERN = {"type": "object", "properties": {"word": {"type": "string", "pattern": "^[ab]+$"}}}


def function(name: str, parameters: Any = None, *, strict: bool | None = None) -> dict[str, Any]:
    fields = {"name": name, "parameters": parameters, "strict": strict}
    given_fields = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": given_fields}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [function("weather", WEATHER, strict=True), function("find", PATTERN)]


def ids_of(tokenizer: Tokenizer, *parts: str) -> list[int]:
    """Tokens of `parts`, each a special token's name or a text."""
    return [
        token_id
        for part in parts
        for token_id in (
            [tokenizer.special_id(part)]
            if part in tokenizer.special_names
            else tokenizer.encode(part)
        )
    ]


def prompt_of(model_type: str, *, thinking: bool) -> list[int]:
    tokenizer = TOKENIZERS[model_type]
    if model_type == "kimi_k3":
        return render_messages(model_type, tokenizer, HELLO, thinking=thinking)
    opening = ["<think>"] if thinking else ["<think>", "</think>"]
    return ids_of(tokenizer, "Hello", "<|im_end|>", "assistant", *opening)


def answer_of(
    model_type: str, random: Random, *, thinking: bool = False, **asked: Any
) -> ParsedMessage:
    """A random answer under the grammar of what is asked, as the format's parser reads it."""
    tokenizer, prompt = TOKENIZERS[model_type], prompt_of(model_type, thinking=thinking)
    grammar = answer_grammar(model_type, tokenizer, prompt_token_ids=prompt, **asked)
    assert grammar is not None
    constraint = COMPILERS[model_type].compile(StructuredOutputsParams(grammar=grammar))
    output = walk(constraint, tokenizer, random)
    return parse_answer(
        model_type, tokenizer, [*output, tokenizer.eos_token_ids[0]], prompt_token_ids=prompt
    )


def accepts(grammar: str, model_type: str, token_ids: Sequence[int]) -> bool:
    """Whether the whole answer, with its end, obeys."""
    constraint = COMPILERS[model_type].compile(StructuredOutputsParams(grammar=grammar))
    constraint.advance(tuple(token_ids))
    return constraint.error is None and constraint.is_finished


def obeys(text: str, schema: Mapping[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


model_types = st.sampled_from(list(TOKENIZERS))
randoms = st.integers(0, 2**32).map(Random)


PHONE = {"type": "string", "pattern": "^\\d{2,4}(/\\w+)?$"}
KEYS = st.lists(st.sampled_from(["a", 'k"&', "é", "n"]), unique=True, max_size=3)


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters of a function: a plain object, or one that needs a JSON object of its own."""
    schema = draw(SCHEMAS)
    parameters: dict[str, Any] = {"type": "object", "$defs": schema.pop("$defs")}
    keys = draw(KEYS)
    simple = [{"type": "string"}, {"type": ["string", "null"]}, {"const": "a<b"}, PHONE, schema]
    parameters["properties"] = {key: draw(st.sampled_from(simple)) for key in keys}
    parameters["required"] = keys[: draw(st.integers(0, 3))]
    parameters["additionalProperties"] = draw(st.booleans())
    if draw(st.booleans()):
        parameters["minProperties"] = 0  # nothing to obey, but no plain object any more
    return parameters


@settings(max_examples=50)
@given(
    model_types,
    st.lists(objects(), min_size=1, max_size=3),
    st.sampled_from(["auto", "required", "named", "none"]),
    st.none() | SCHEMAS,
    st.tuples(st.booleans(), st.booleans()),
    randoms,
)
def test_answers_are_what_was_asked_for(
    model_type: str,
    parameters: list[dict[str, Any]],
    choice: str,
    content: dict[str, Any] | None,
    flags: tuple[bool, bool],
    random: Random,
) -> None:
    thinking, parallel = flags
    names = ["f", 'g"&h' if model_type == "kimi_k3" else "g.h", "i"][: len(parameters)]
    by_name = dict(zip(names, parameters, strict=True))
    name = random.choice(list(by_name))
    answer = answer_of(
        model_type,
        random,
        thinking=thinking,
        content=None if content is None else StructuredOutputsParams(json=content),
        tools=[function(name, schema, strict=True) for name, schema in by_name.items()],
        tool_choice=named(name) if choice == "named" else choice,
        parallel_tool_calls=parallel,
    )
    calls = answer.tool_calls
    for call in calls:
        assert obeys(call.arguments, by_name[call.name]), call
    if choice in ("required", "named"):
        assert calls and answer.content == ""
    if choice == "named":
        assert [call.name for call in calls] == [name]
    if choice == "none":
        assert not calls
    if not parallel:
        assert len(calls) <= 1
    if content is not None:
        assert answer.content == "" if calls else obeys(answer.content, content)
    assert thinking or answer.reasoning == ""


@settings(max_examples=30)
@given(model_types, randoms)
def test_calls_of_lenient_functions_are_objects(model_type: str, random: Random) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "format": "colour"}}}
    tools = [function("f", parameters), function("g", WEATHER, strict=True), function("h")]
    answer = answer_of(model_type, random, tools=tools, tool_choice="auto")
    for call in answer.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    [call, *_] = answer_of(model_type, random, tools=tools[:1], tool_choice="required").tool_calls
    assert isinstance(json.loads(call.arguments), dict)
    [call] = answer_of(model_type, random, tools=tools, tool_choice=named("h")).tool_calls
    assert json.loads(call.arguments) == {}


CALLS = [
    {"function": {"name": "weather", "arguments": {"city": 'K"ö&ln <|close|>', "days": 3}}},
    {
        "function": {
            "name": "weather",
            "arguments": {"city": "", "unit": "c", "places": [1, 0.5], 'say "a&b"': True},
        }
    },
]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    ("content", "calls", "asked", "is_accepted"),
    [
        ("", CALLS, {"tool_choice": "required"}, True),
        ("text", CALLS, {"tool_choice": "required"}, False),
        ("", CALLS, {"tool_choice": "required", "parallel_tool_calls": False}, False),
        ("", CALLS[:1], {"tool_choice": named("weather")}, True),
        ("", CALLS[:1], {"tool_choice": named("find")}, False),
        ("text", CALLS, {}, True),
        ("text", None, {}, True),
        ("text", None, {"tool_choice": "none"}, True),
        ("text", CALLS, {"tool_choice": "none"}, False),
        ('{"a": 1}', None, {"content": StructuredOutputsParams(json_object=True)}, True),
        ("text", None, {"content": StructuredOutputsParams(json_object=True)}, False),
        ("", CALLS, {"content": StructuredOutputsParams(json_object=True)}, True),
        ("yes", None, {"content": StructuredOutputsParams(choice=("yes", "no"))}, True),
        ("so <t>1</t>.", None, {"content": StructuredOutputsParams(structural_tag=TAG)}, True),
        ("so <t>a</t>.", None, {"content": StructuredOutputsParams(structural_tag=TAG)}, False),
        ("aab", None, {"content": StructuredOutputsParams(grammar="start: /a+/ b\nb: /b/")}, True),
    ],
)
def test_xtml_is_what_our_renderer_writes(
    content: str,
    calls: list[dict[str, Any]] | None,
    asked: dict[str, Any],
    is_accepted: bool,
    thinking: bool,
) -> None:
    tokenizer, prompt = TOKENIZERS["kimi_k3"], prompt_of("kimi_k3", thinking=thinking)
    message = {"content": content, "reasoning_content": "so <|close|>", "tool_calls": calls}
    token_ids = [
        token_id
        for segment in answer_segments(message, thinking=thinking)
        for token_id in encode_segment(tokenizer, segment)
    ]
    grammar = answer_grammar("kimi_k3", tokenizer, prompt_token_ids=prompt, tools=TOOLS, **asked)
    assert grammar is not None
    assert accepts(grammar, "kimi_k3", token_ids) is is_accepted


SECTION, CALL, ARGUMENTS, CALL_END, SECTION_END = MARKERS[4:]


@pytest.mark.parametrize(
    ("parts", "asked", "is_accepted"),
    [
        (["so", "</think>", "text"], {"tool_choice": "none"}, True),
        (["so", "</think>", SECTION], {"tool_choice": "none"}, False),
        (
            [
                *("</think>", SECTION, CALL, "functions.find:12", ARGUMENTS, '{"word": "ab"}'),
                *(CALL_END, CALL, "functions.find:13", ARGUMENTS, "{}", CALL_END, SECTION_END),
            ],
            {"tool_choice": "required"},
            True,
        ),
        (
            ["</think>", SECTION, CALL, "functions.find:0", ARGUMENTS, '{"word": "c"}'],
            {"tool_choice": "required"},
            False,
        ),
        (["</think>", "text"], {"tool_choice": "required"}, False),
        (["</think>", "{}"], {"content": StructuredOutputsParams(json_object=True)}, True),
    ],
)
def test_marker_answers(parts: list[str], asked: dict[str, Any], is_accepted: bool) -> None:
    tokenizer, prompt = TOKENIZERS["kimi_linear"], prompt_of("kimi_linear", thinking=True)
    grammar = answer_grammar(
        "kimi_linear", tokenizer, prompt_token_ids=prompt, tools=TOOLS, **asked
    )
    assert grammar is not None
    assert accepts(grammar, "kimi_linear", ids_of(tokenizer, *parts, "<|im_end|>")) is is_accepted


@pytest.mark.parametrize(
    ("prompt", "first"),
    [
        (["<|im_end|>", "assistant"], {"<think>", "{"}),
        (["<|im_end|>", "assistant", "<think>", "</think>"], {"{"}),
        (["<think>", "<|im_end|>", "assistant"], {"<think>", "{"}),
    ],
)
def test_reasoning_comes_once(prompt: list[str], first: set[str]) -> None:
    tokenizer = TOKENIZERS["kimi_linear"]
    grammar = answer_grammar(
        "kimi_linear",
        tokenizer,
        prompt_token_ids=ids_of(tokenizer, *prompt),
        content=StructuredOutputsParams(json_object=True),
    )
    constraint = COMPILERS["kimi_linear"].compile(StructuredOutputsParams(grammar=grammar))
    begins = {
        tokenizer.special_name(token_id) or tokenizer.token_bytes(token_id)[:1].decode()
        for token_id in allowed_ids(constraint, tokenizer)
    }
    assert begins == first


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tools": []},
        {"tools": TOOLS[1:]},
        {"tools": TOOLS[1:], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": TOOLS[1:], "parallel_tool_calls": False},
    ],
)
def test_where_nothing_is_asked_there_is_no_grammar(asked: dict[str, Any]) -> None:
    for model_type, tokenizer in TOKENIZERS.items():
        prompt = prompt_of(model_type, thinking=True)
        assert answer_grammar(model_type, tokenizer, prompt_token_ids=prompt, **asked) is None


@pytest.mark.parametrize(
    ("model_type", "asked", "field"),
    [
        ("kimi_k3", {"content": StructuredOutputsParams(json="{")}, "response_format"),
        ("kimi_k3", {"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ("kimi_k3", {"tools": TOOLS, "tool_choice": named("other")}, "tool_choice"),
        ("kimi_k3", {"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ("kimi_k3", {"tool_choice": "required"}, "tool_choice"),
        ("kimi_k3", {"tools": [{"type": "retrieval"}]}, "tools"),
        ("kimi_k3", {"tools": [function("f", {"type": "array"}, strict=True)]}, "tools"),
        ("kimi_linear", {"tools": [function("a b", strict=True)]}, "tools"),
    ],
)
def test_what_cannot_be_written_is_named(
    model_type: str, asked: dict[str, Any], field: str
) -> None:
    prompt = prompt_of(model_type, thinking=True)
    with pytest.raises(RequestError) as caught:
        answer_grammar(model_type, TOKENIZERS[model_type], prompt_token_ids=prompt, **asked)
    assert caught.value.field == field


def test_a_vocabulary_without_markers_calls_nothing() -> None:
    plain = small_tokenizer(("[EOS]",), num_eos=1)
    json_object = StructuredOutputsParams(json_object=True)
    for asked in ({"content": json_object}, {"tools": TOOLS, "tool_choice": "auto"}):
        grammar = answer_grammar("kimi_linear", plain, prompt_token_ids=[1], **asked)
        assert grammar is not None and "<[" not in grammar
    with pytest.raises(RequestError, match="no markers of tool calls"):
        answer_grammar(
            "kimi_linear", plain, prompt_token_ids=[1], tools=TOOLS, tool_choice="required"
        )


def test_a_prompt_that_opens_a_call_is_refused() -> None:
    tokenizer = TOKENIZERS["kimi_k3"]
    prompt = [
        *prompt_of("kimi_k3", thinking=False),
        *ids_of(tokenizer, "<|open|>", "tools", "<|sep|>"),
    ]
    with pytest.raises(RequestError, match="opens the channel tools"):
        answer_grammar("kimi_k3", tokenizer, prompt_token_ids=prompt, tools=TOOLS)


def test_what_no_grammar_can_hold_is_refused_of_strict_functions_alone() -> None:
    unique = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    for model_type, tokenizer in TOKENIZERS.items():
        for strict in (True, None):
            grammar = answer_grammar(
                model_type,
                tokenizer,
                prompt_token_ids=prompt_of(model_type, thinking=True),
                tools=[function("f", unique, strict=strict)],
                tool_choice="required",
            )
            params = StructuredOutputsParams(grammar=grammar)
            if strict:
                with pytest.raises(RequestError, match="uniqueItems"):
                    COMPILERS[model_type].compile(params)
            else:
                assert COMPILERS[model_type].compile(params).error is None
