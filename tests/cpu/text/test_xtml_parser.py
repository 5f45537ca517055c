"""K3 answers: one message however the tokens are split; nothing lost, nothing leaked."""

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.text.chat_format import Segment, answer_segments
from stagecoach.text.detokenizer import StopMatch
from stagecoach.text.message_stream import (
    NO_STOPS,
    MessageDelta,
    ParsedMessage,
    StopRules,
    ToolCall,
    parse_whole,
)
from stagecoach.text.xtml_parser import XtmlParser
from tests.cpu.text.piece_tokenizer import (
    MARKERS,
    PieceTokenizer,
    cut,
    deltas_of,
    pieces_of,
    sum_of,
)

Pieces = Sequence[bytes | str]

THINK = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
RESPONSE = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
TOOLS = "<|open|>tools<|sep|>"


def parser_of(
    answer: str | Pieces, prompt: str = THINK, rules: StopRules = NO_STOPS, **options: bool
) -> tuple[XtmlParser, list[int]]:
    """A parser, and the token ids of the answer that it is to read."""
    tokenizer = PieceTokenizer()
    prompt_token_ids = tokenizer.ids(pieces_of(prompt))
    token_ids = tokenizer.ids(pieces_of(answer) if isinstance(answer, str) else answer)
    parser = XtmlParser(tokenizer, prompt_token_ids=prompt_token_ids, rules=rules, **options)
    return parser, token_ids


def message_of(answer: str | Pieces, prompt: str = THINK) -> ParsedMessage:
    return parse_whole(*parser_of(answer, prompt))


def stream_of(
    answer: str | Pieces, sizes: Sequence[int] = (), prompt: str = THINK, **options: Any
) -> list[MessageDelta]:
    return deltas_of(*parser_of(answer, prompt, **options), sizes)


def argument(key: str, type_name: str, text: str) -> str:
    opening = f'<|open|>argument key="{key}" type="{type_name}"<|sep|>'
    return f"{opening}{text}<|close|>argument<|sep|>"


def call(name: str, *arguments: str) -> str:
    return f'<|open|>call tool="{name}"<|sep|>{"".join(arguments)}<|close|>call<|sep|>'


def tools(*calls: str) -> str:
    return f"{TOOLS}{''.join(calls)}<|close|>tools<|sep|>"


def segment_pieces(segments: Iterable[Segment]) -> list[bytes | str]:
    return [item.text if item.is_special else item.text.encode() for item in segments]


SIZES = st.lists(st.integers(0, 9), max_size=12)
BYTE_SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)
# Words of tags and whole markers are among the texts: as ordinary tokens they are text.
TEXTS = st.lists(
    st.sampled_from(
        [*MARKERS, "think", "tools", '" index="', "\n", " ", '"', "\\", "&quot;", "{", "}", "é",
         "가나다", "😀", "\u2028", "\x00", "abc"]
    )
    | st.text(max_size=4),
    max_size=5,
).map("".join)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.tuples(TEXTS.filter(bool), st.dictionaries(TEXTS, VALUES, max_size=3))
# Reasoning of nothing but blanks is rendered as none.
REASONING = TEXTS.filter(lambda text: not text or text.strip())


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[bytes | str], ParsedMessage]:
    """An answer of the model and its message; tags that models leave out are left out at times."""
    calls = tuple(
        ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        for name, arguments in draw(st.lists(CALLS, max_size=3))
    )
    message = ParsedMessage(draw(REASONING), draw(TEXTS), calls)
    rendered = answer_segments(
        {
            "reasoning": message.reasoning,
            "content": message.content,
            "tool_calls": [{"name": item.name, "arguments": item.arguments} for item in calls],
        }
    )
    pieces = segment_pieces(rendered)
    if draw(st.booleans()):
        left_out = draw(st.sampled_from([b"think", b"response", b"tools", b"call", b"message"]))
        pieces = without_closing_tags(pieces, left_out)
    return cut(pieces, draw(BYTE_SIZES)), message


def without_closing_tags(pieces: Pieces, tag: bytes) -> list[bytes | str]:
    closing = ["<|close|>", tag, "<|sep|>"]
    result: list[bytes | str] = []
    for piece in pieces:
        result.append(piece)
        if result[-3:] == closing:
            del result[-3:]
    return result


@given(answers(), SIZES)
def test_any_split_gives_the_message_that_was_written(
    answer: tuple[list[bytes | str], ParsedMessage], sizes: list[int]
) -> None:
    pieces, expected = answer
    assert sum_of(stream_of(pieces, sizes)).message() == expected


ANY_PIECES = st.lists(
    st.sampled_from(
        [*MARKERS, b"think", b"response", b"tools", b"call tool=\"f\"", b"json", b" ", b"x\xc3",
         b"\xa9", b"argument key=\"k\"", b"argument key=\"k\" type=\"object\"", b"message", b'{"a',
         b'": [1]}', b"tr", b"ue", b"12", b"<|sep|>", "가".encode()[:2], "가".encode()[2:]]
    ),
    max_size=40,
)  # fmt: skip


@given(ANY_PIECES, SIZES, st.sampled_from([THINK, RESPONSE, "", TOOLS]))
def test_any_split_of_any_tokens_gives_one_message(
    pieces: list[bytes | str], sizes: list[int], prompt: str
) -> None:
    deltas = stream_of(pieces, sizes, prompt)
    assert sum_of(deltas).message() == message_of(pieces, prompt)
    assert all(item.name or item.arguments for delta in deltas for item in delta.tool_calls)


@given(ANY_PIECES, st.sampled_from([THINK, RESPONSE, "", TOOLS]))
def test_no_text_is_lost_and_no_marker_leaks(pieces: list[bytes | str], prompt: str) -> None:
    """Every word that is no tag is said exactly once, and nothing that no token wrote is said."""
    words: list[bytes | str] = [
        f"w{number};".encode() if piece in (b"x\xc3", b"\xa9", b"12") else piece
        for number, piece in enumerate(pieces)
        if piece not in ("<|end_of_msg|>", "[EOS]", "[EOT]", b"message", b"<|sep|>")
    ]
    message = message_of(words, prompt)
    said = [message.reasoning, message.content, *(item.arguments for item in message.tool_calls)]
    everything = "".join(said)
    inside = False
    for piece in words:
        if piece in ("<|open|>", "<|close|>", "<|sep|>"):
            inside = piece != "<|sep|>"
        elif not inside and isinstance(piece, bytes) and piece.startswith(b"w"):
            assert everything.count(piece.decode()) == 1
    for marker in MARKERS:
        assert marker not in everything


@given(answers(), st.integers(0, 200), SIZES)
def test_an_answer_that_is_cut_says_a_beginning_of_the_whole(
    answer: tuple[list[bytes | str], ParsedMessage], length: int, sizes: list[int]
) -> None:
    """Also when it is cut inside a marker, a character or a value."""
    pieces, whole = answer
    said = sum_of(stream_of(pieces[:length], sizes)).message()
    assert whole.reasoning.startswith(said.reasoning.removesuffix("\ufffd"))
    assert whole.content.startswith(said.content.removesuffix("\ufffd"))
    for mine, full in zip(said.tool_calls, whole.tool_calls, strict=False):
        assert mine.name == full.name
        assert full.arguments.startswith(mine.arguments.removesuffix("\ufffd"))
    for item in said.tool_calls[:-1]:
        assert isinstance(json.loads(item.arguments), dict)


@given(answers(), st.integers(1, 200))
def test_what_was_said_is_never_taken_back(
    answer: tuple[list[bytes | str], ParsedMessage], length: int
) -> None:
    pieces, whole = answer
    parser, token_ids = parser_of(pieces)
    said = sum_of([parser.push(token_ids[:length])]).message()
    assert whole.reasoning.startswith(said.reasoning)
    assert whole.content.startswith(said.content)
    for mine, full in zip(said.tool_calls, whole.tool_calls, strict=False):
        assert (mine.name, full.arguments[: len(mine.arguments)]) == (full.name, mine.arguments)


@pytest.mark.parametrize("ending", ["<|close|>tools<|sep|><|close|>message<|sep|>", ""])
def test_tools_opened_inside_thinking_and_ended_by_the_terminator_alone(ending: str) -> None:
    text = f"Hm.{TOOLS}{call('f', argument('a', 'number', '1'))}{ending}<|end_of_msg|>"
    expected = ParsedMessage("Hm.", "", (ToolCall("f", '{"a": 1}'),))
    assert message_of(text) == sum_of(stream_of(text)).message() == expected


def test_a_call_outside_the_tools_channel_is_a_call() -> None:
    expected = ParsedMessage("a", "", (ToolCall("f", '{"k": "v"}'),))
    assert message_of(f"a{call('f', argument('k', 'string', 'v'))}<|end_of_msg|>") == expected


def test_a_call_that_only_the_terminator_ends_is_whole() -> None:
    opened = '<|open|>call tool="f"<|sep|><|open|>argument key="a"<|sep|>x'
    assert message_of(f"{TOOLS}{opened}<|end_of_msg|>").tool_calls[0].arguments == '{"a": "x"}'
    assert message_of(f"{TOOLS}{opened}").tool_calls[0].arguments == '{"a": "x'


def test_arguments_arrive_while_they_are_written() -> None:
    """Strings, objects and arrays alike: after each token, all of it has been said."""
    for type_name, text, expected in (
        ("string", 'line 1\n"two"', '{"k": "line 1\\n\\"two\\"'),
        ("object", '{"a": [1, "}"]', '{"k": {"a": [1, "}"]'),
        ("array", '[{"b": null', '{"k": [{"b": null'),
    ):
        parser, token_ids = parser_of(
            f'{TOOLS}<|open|>call tool="f"<|sep|>'
            f'<|open|>argument key="k" type="{type_name}"<|sep|>{text}'
        )
        lengths = [
            sum(len(item.arguments) for item in parser.push([token_id]).tool_calls)
            for token_id in token_ids
        ]
        assert all(lengths[-len(text) :])
        assert sum(lengths) == len(expected)
        assert message_of(
            f'{TOOLS}<|open|>call tool="f"<|sep|>'
            f'<|open|>argument key="k" type="{type_name}"<|sep|>{text}'
        ).tool_calls == (ToolCall("f", expected),)


def test_the_name_of_a_call_is_said_before_its_arguments_and_only_once() -> None:
    deltas = stream_of(tools(call("f", argument("a", "string", "xyz")), call("g")))
    told = [item for delta in deltas for item in delta.tool_calls]
    assert [item.name for item in told if item.name is not None] == ["f", "g"]
    assert (told[0].index, told[0].name, told[0].arguments) == (0, "f", "")
    assert all((item.id is None) == (item.name is None) for item in told)
    assert all(item.name is not None or item.arguments for item in told)


def test_ids_are_unique_among_messages() -> None:
    text = tools(call("f"), call("f"))
    ids = [item.id for _ in range(2) for item in message_of(text).tool_calls]
    assert len(set(ids)) == 4 and all(ids)


@pytest.mark.parametrize(
    ("type_name", "text", "expected"),
    [
        ("string", "1", '"1"'),
        ("string", "", '""'),
        ("number", "-1.5e3", "-1.5e3"),
        ("number", " 12\n", "12"),
        ("number", "many", '"many"'),
        ("number", "NaN", '"NaN"'),
        ("number", "01", '"01"'),
        ("boolean", "true", "true"),
        ("boolean", "True", '"True"'),
        ("null", "null", "null"),
        ("null", "", '""'),
        ("date", '"1 May"', '"1 May"'),
        ("date", "1 May", '"1 May"'),
        ("object", ' {"a": "}{"} ', '{"a": "}{"}'),
        ("object", "none", '"none"'),
        ("array", '["\\"]", []]', '["\\"]", []]'),
    ],
)
def test_values_by_their_type(type_name: str, text: str, expected: str) -> None:
    answer = tools(call("f", argument("k", type_name, text)))
    expected_call = ToolCall("f", f'{{"k": {expected}}}')
    assert message_of(answer) == ParsedMessage(tool_calls=(expected_call,))
    json.loads(expected_call.arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", '{"k": 12'),
        ("-", '{"k": -'),
        ("1e", '{"k": 1e'),
        ("tru", '{"k": tru'),
        ("man", '{"k": "man'),
        ("", '{"k": '),
    ],
)
def test_a_value_that_is_cut_is_the_beginning_of_a_value(text: str, expected: str) -> None:
    opened = f'<|open|>call tool="f"<|sep|><|open|>argument key="k" type="number"<|sep|>{text}'
    assert message_of(TOOLS + opened).tool_calls == (ToolCall("f", expected),)


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        (tools(f"so{call('f')}"), "so", ["{}"]),
        (tools(" \n" + call("f") + "\n"), "", ["{}"]),
        ('<|open|>call index="1"<|sep|>' + argument("k", "number", "1"), "1", []),
        (call("", argument("k", "string", "a b")), "a b", []),
        (call("f", "<|open|>argument<|sep|>lost?<|close|>argument<|sep|>"), "lost?", ["{}"]),
        (call("f", argument("o", "object", '{}, "admin": true')), ', "admin": true', ['{"o": {}}']),
        (call("f", '<|open|>json type="object"<|sep|>{"a": 1}'), "", ['{"a": 1}']),
        (call("f", "<|open|>json<|sep|>[broken"), "", ["[broken"]),
        (call("f", "<|open|>json<|sep|><|close|>json<|sep|>"), "", ["{}"]),
        (call("f", argument("a", "number", "1"), "<|open|>json<|sep|>{}"), "{}", ['{"a": 1}']),
        (call("f", "<|open|>json<|sep|>{}", argument("a", "number", "1")), "1", ["{}"]),
        ('<|open|>call tool="f<|sep|>x', 'call tool="fx', []),
    ],
)  # fmt: skip
def test_what_is_malformed_among_calls_is_content(
    answer: str, content: str, calls: list[str]
) -> None:
    message = message_of(f"{TOOLS}{answer}<|end_of_msg|>")
    assert message.content == content
    assert [item.arguments for item in message.tool_calls] == calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("still thinking", ParsedMessage("still thinking")),
        ("a<|open|>response<|sep|>b", ParsedMessage("a", "b")),
        ("a<|close|>think<|sep|><|open|>response<|sep|>b", ParsedMessage("a", "b")),
        ("a<|close|>think<|sep|>\n b <|end_of_msg|>", ParsedMessage("a", "b ")),
        ("a<|end_of_msg|>b", ParsedMessage("a")),
        ("a[EOS]b", ParsedMessage("a")),
        ("a<|close|>message<|sep|>b", ParsedMessage("a")),
        ("a<|close|>think<|sep|><|open|>resp", ParsedMessage("a")),
        ("a<|close|>think<|sep|><|open|>Hello <|sep|>you", ParsedMessage("a", "Hello you")),
        ("a<|open|><|open|>response<|sep|>b", ParsedMessage("a", "b")),
        ("a<|open|> response <|sep|>b", ParsedMessage("a", "b")),
        ("a<|sep|>b<|pad|>c", ParsedMessage("abc")),
        ("a<|close|>tools<|sep|>b", ParsedMessage("ab")),
        ("a<|open|>tool time", ParsedMessage("atool time")),
        ("a<|open|>thin<|sep|>b", ParsedMessage("athinb")),
        ("a<|open|>thin<|close|>think<|sep|>b", ParsedMessage("a", "b")),
        ('a<|open|>think of="<|sep|>b', ParsedMessage('athink of="b')),
    ],
)
def test_answers_that_are_cut_or_malformed(text: str, expected: ParsedMessage) -> None:
    assert message_of(text) == sum_of(stream_of(text)).message() == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (THINK, ParsedMessage("x")),
        (RESPONSE, ParsedMessage("", "x")),
        (f"{THINK}so far", ParsedMessage("x")),
        (f"{THINK}so far<|close|>think<|sep|>", ParsedMessage("", "x")),
        (f"{THINK}old<|close|>message<|sep|><|end_of_msg|>{RESPONSE}", ParsedMessage("", "x")),
        ("no chat at all", ParsedMessage("", "x")),
        (f"{THINK}<|close|>message<|sep|>", ParsedMessage("", "x")),
        (
            f'{RESPONSE}{TOOLS}<|open|>call tool="f"<|sep|><|open|>argument key="k"<|sep|>a',
            ParsedMessage(tool_calls=(ToolCall("f", '{"k": "ax'),)),
        ),
    ],
)
def test_an_answer_begins_where_the_prompt_ends(prompt: str, expected: ParsedMessage) -> None:
    assert message_of("x", prompt) == expected


def test_reasoning_tokens_are_those_that_say_reasoning() -> None:
    for text, expected in (
        ("abc", 3),
        ("ab<|close|>think<|sep|><|open|>response<|sep|>cd", 2),
        ("ab<|pad|>c<|open|>response<|sep|>", 3),
        ("ab<|open|>No", 4),
        ("", 0),
    ):
        parser, token_ids = parser_of(text)
        parser.push(token_ids)
        parser.finish()
        assert parser.num_reasoning_tokens == expected, text
    for prompt, expected in ((RESPONSE, 0), (f"{THINK}so far", 3)):
        parser, token_ids = parser_of("abc", prompt)
        parser.push(token_ids)
        assert parser.num_reasoning_tokens == expected


def test_content_tokens_are_those_that_say_content() -> None:
    for text, expected in (
        ("abc", [0, 1, 2]),
        # What opens like a tag is text from where it is seen to be none.
        ("a<|open|>No", [0, 2, 3]),
        ("a<|open|>mess<|sep|>b", [0, 2, 3, 4, 5, 7]),
        ("a<|pad|>b<|close|>response<|sep|>c", [0, 2]),
        ("<|open|>think<|sep|>a<|open|>response<|sep|>b", [18]),
        ("", []),
    ):
        parser, token_ids = parser_of(text, f"{RESPONSE}")
        parser.push(token_ids)
        parser.finish()
        assert list(parser.content_tokens) == expected, text


@given(answers(), SIZES, st.sampled_from(["a", "é", "가나", "think", "<|open|>x", '"']))
def test_a_stop_string_ends_the_text_that_the_client_reads(
    answer: tuple[list[bytes | str], ParsedMessage], sizes: list[int], stop: str
) -> None:
    """Markers have no part in it, and none is split."""
    pieces, whole = answer
    parser, token_ids = parser_of(pieces, rules=StopRules((stop,)))
    message = sum_of(deltas_of(parser, token_ids, sizes)).message()
    in_reasoning, in_content = whole.reasoning.find(stop), whole.content.find(stop)
    if in_reasoning >= 0:
        assert message == ParsedMessage(whole.reasoning[:in_reasoning])
    elif in_content >= 0:
        assert message == ParsedMessage(whole.reasoning, whole.content[:in_content])
    else:
        assert message == whole
    assert (parser.stop_match is not None) == (max(in_reasoning, in_content) >= 0)


def test_a_stop_match_counts_tokens() -> None:
    text = "ab<|close|>think<|sep|><|open|>response<|sep|>cEND de"
    parser, token_ids = parser_of(text, rules=StopRules(("END",)))
    message = parse_whole(parser, token_ids)
    assert message == ParsedMessage("ab", "c")
    num_tokens = 2 + 1 + len("think") + 2 + len("response") + 1 + len("cEND")
    assert parser.stop_match == StopMatch("END", num_tokens)
    kept, token_ids = parser_of(text, rules=StopRules(("END",), include_stop_str_in_output=True))
    assert parse_whole(kept, token_ids).content == "cEND"
    late, token_ids = parser_of(text, rules=StopRules(("END",), min_tokens=num_tokens + 1))
    assert parse_whole(late, token_ids).content == "cEND de"


def test_a_beginning_of_a_stop_string_before_a_marker_is_text() -> None:
    deltas = stream_of("aEN<|open|>response<|sep|>D", rules=StopRules(("END",)))
    # Held back until the tag is known to be one: as text it might bring the rest.
    assert [delta.reasoning for delta in deltas] == ["a", *[""] * 11, "EN", "", ""]
    text = stream_of("aEN<|open|>D <|open|>response<|sep|>b", rules=StopRules(("END",)))
    assert sum_of(text).message() == ParsedMessage("a")
    assert sum_of(deltas).message() == ParsedMessage("aEN", "D")


def test_special_tokens_that_are_no_markers_are_skipped_or_shown() -> None:
    assert message_of("a<|pad|>b").reasoning == "ab"
    shown = parse_whole(*parser_of("a<|pad|>b<|open|>response<|sep|>", skip_special_tokens=False))
    assert shown == ParsedMessage("a<|pad|>b")


def test_a_run_of_invalid_bytes_is_said_at_once() -> None:
    deltas = stream_of([b"\xff"] * 50)
    assert [delta.reasoning for delta in deltas] == [*["\ufffd"] * 50, ""]


def test_hangul_and_emoji_one_byte_at_a_time() -> None:
    text = "안녕하세요 😀"
    deltas = stream_of([bytes([byte]) for byte in text.encode()])
    assert "".join(delta.reasoning for delta in deltas) == text


def test_a_marker_ends_a_begun_character() -> None:
    pieces = [b"a\xf0\x9f", "<|open|>", b"response", "<|sep|>", b"\x98\x80b"]
    assert message_of(pieces) == ParsedMessage("a\ufffd", "\ufffd\ufffdb")


@pytest.mark.parametrize(
    "opening",
    [
        "",
        "<|open|>response<|sep|>",
        f'{TOOLS}<|open|>call tool="f"<|sep|><|open|>argument key="a" type="array"<|sep|>[',
        f'{TOOLS}<|open|>call tool="f"<|sep|><|open|>argument key="a" type="number"<|sep|>1',
        '<|open|>call tool="',
    ],
)
def test_work_is_linear_in_the_number_of_tokens(opening: str) -> None:
    def seconds(num_tokens: int) -> float:
        answer = [*pieces_of(opening), *[b"1"] * num_tokens]
        parser, token_ids = parser_of(answer, rules=StopRules(("1" * 9 + "2",)))
        started = time.process_time()
        for token_id in token_ids:
            parser.push((token_id,))
        parser.finish()
        return time.process_time() - started

    short = min(seconds(1_000) for _ in range(4))
    long = min(seconds(20_000) for _ in range(2))
    # Linear work takes 20 times as long, quadratic 400 times.
    assert long < 100 * short
