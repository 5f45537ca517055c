"""Answers with one-token markers: think tags and K2's sections of tool calls."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.text.marker_parser import MarkerParser
from stagecoach.text.message_stream import NO_STOPS, ParsedMessage, StopRules, ToolCall, parse_whole
from tests.cpu.text.piece_tokenizer import PieceTokenizer, cut, deltas_of, pieces_of, sum_of

MARKERS = (
    "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
    "<|im_end|>",
)  # fmt: skip
SECTION, CALL, ARGUMENTS, CALL_END, SECTION_END = MARKERS[2:7]

Pieces = Sequence[bytes | str]


def parser_of(
    answer: str | Pieces, prompt: str = "", rules: StopRules = NO_STOPS
) -> tuple[MarkerParser, list[int]]:
    tokenizer = PieceTokenizer()
    pieces = pieces_of(answer, MARKERS) if isinstance(answer, str) else answer
    parser = MarkerParser(
        tokenizer,
        prompt_token_ids=tokenizer.ids(pieces_of(prompt, MARKERS)),
        eos_token_ids=tokenizer.ids(["<|im_end|>"]),
        rules=rules,
    )
    return parser, tokenizer.ids(pieces)


def message_of(answer: str | Pieces, prompt: str = "") -> ParsedMessage:
    return parse_whole(*parser_of(answer, prompt))


def call(header: str, arguments: str) -> str:
    return f"{CALL}{header}{ARGUMENTS}{arguments}{CALL_END}"


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("", "just text<|im_end|>", ParsedMessage("", "just text")),
        ("", "<think>a</think>b", ParsedMessage("a", "b")),
        ("<think>", "a</think>b", ParsedMessage("a", "b")),
        ("<think>old<|im_end|>new", "b", ParsedMessage("", "b")),
        ("<think></think>", "b", ParsedMessage("", "b")),
        ("<think>", "cut", ParsedMessage("cut")),
        ("", "a</think>b", ParsedMessage("", "ab")),
        (
            "",
            f'so{SECTION}{call("functions.f:0", chr(123) + chr(125))}\n'
            f'{call(" g:1 ", "[1]")}{SECTION_END}',
            ParsedMessage("", "so", (ToolCall("f", "{}"), ToolCall("g", "[1]"))),
        ),
        ("", f"{CALL}functions.f:0{ARGUMENTS}", ParsedMessage("", "", (ToolCall("f", ""),))),
        ("", call("f", ""), ParsedMessage("", "", (ToolCall("f", "{}"),))),
        ("", f"{CALL}functions.f:0{CALL_END}", ParsedMessage("", "functions.f:0")),
        ("", call("  ", '{"lost?": 1}'), ParsedMessage("", '{"lost?": 1}')),
        ("", call("", "a") + f"{SECTION_END}b", ParsedMessage("", "ab")),
        ("", f"{SECTION}{CALL}functions.get_we", ParsedMessage()),
    ],
)  # fmt: skip
def test_messages(prompt: str, answer: str, expected: ParsedMessage) -> None:
    assert message_of(answer, prompt) == expected
    parser, token_ids = parser_of(answer, prompt)
    assert sum_of(deltas_of(parser, token_ids)).message() == expected


def test_ids_are_those_of_the_format() -> None:
    [told] = message_of(call("functions.get_weather:3", "{}")).tool_calls
    assert (told.name, told.id) == ("get_weather", "functions.get_weather:3")


def test_arguments_arrive_while_they_are_written() -> None:
    parser, token_ids = parser_of(f'{CALL}f:0{ARGUMENTS}{{"a": "b')
    deltas = [parser.push([token_id]) for token_id in token_ids]
    said = ["".join(item.arguments for item in delta.tool_calls) for delta in deltas]
    assert said[-8:] == list('{"a": "b')


def test_a_marker_ends_a_begun_character() -> None:
    pieces = ["<think>", b"a\xf0\x9f", "</think>", b"\x98\x80b"]
    assert message_of(pieces) == ParsedMessage("a\ufffd", "\ufffd\ufffdb")


def test_special_tokens_that_are_no_markers_are_skipped_or_shown() -> None:
    tokenizer = PieceTokenizer()
    token_ids = tokenizer.ids(["<think>", b"a", "<|pad|>", "</think>", b"b", "<|im_end|>"])
    for skip, expected in (
        (True, ParsedMessage("a", "b")),
        (False, ParsedMessage("a<|pad|>", "b<|im_end|>")),
    ):
        parser = MarkerParser(tokenizer, skip_special_tokens=skip)
        assert parse_whole(parser, token_ids) == expected
        assert parser.num_reasoning_tokens == 1


def test_reasoning_tokens_are_counted_without_markers() -> None:
    for prompt, expected in (("", 3), ("<think>so far", 6)):
        parser, token_ids = parser_of("abc<think>def</think>gh", prompt)
        parser.push(token_ids)
        assert parser.num_reasoning_tokens == expected


def test_content_tokens_are_those_that_say_content() -> None:
    parser, token_ids = parser_of("ab<think>def</think>gh<|tool_calls_section_begin|>i", "so far")
    parser.push(token_ids)
    assert list(parser.content_tokens) == [0, 1, 7, 8]


def test_a_stop_string_ends_the_answer() -> None:
    parser, token_ids = parser_of("<think>aEN</think>DbENDc", rules=StopRules(("END",)))
    assert parse_whole(parser, token_ids) == ParsedMessage("aEN", "Db")
    assert parser.stop_match is not None and parser.stop_match.num_tokens == 10


PIECES = st.lists(
    st.sampled_from([*MARKERS, b"a", b"b:0", "é😀".encode(), b"\xff", b"{", b" ", b"<think>"]),
    max_size=25,
)


@given(PIECES, st.lists(st.integers(0, 5), max_size=8), st.sampled_from(["", "<think>", CALL]))
def test_any_split_gives_one_message(pieces: Pieces, sizes: list[int], prompt: str) -> None:
    parser, token_ids = parser_of(pieces, prompt)
    assert sum_of(deltas_of(parser, token_ids, sizes)).message() == message_of(pieces, prompt)


@given(PIECES, st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_the_message_is_that_of_the_bytes(pieces: Pieces, sizes: list[int]) -> None:
    assert message_of(cut(pieces, sizes)) == message_of(pieces)


@given(PIECES)
def test_text_is_content_where_no_marker_is(pieces: Pieces) -> None:
    ordinary = [piece for piece in pieces if isinstance(piece, bytes)]
    text = b"".join(ordinary).decode("utf-8", errors="replace")
    assert message_of(ordinary) == ParsedMessage("", text)
