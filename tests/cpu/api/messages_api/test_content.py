"""The blocks of a message: one law for all splits, and events that any client can follow."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.api.chat_api.answer import ChatAnswer
from stagecoach.api.messages_api.content import SIGNATURE, ContentWriter, whole_content
from stagecoach.api.messages_api.objects import (
    AnsweredText,
    AnsweredThinking,
    AnsweredToolUse,
    BlockDeltaEvent,
    BlockStart,
    BlockStop,
    ContentBlock,
    ContentEvent,
    SignatureDelta,
)
from stagecoach.text.chat import make_parser
from stagecoach.text.chat_format import answer_segments, encode_segment, render
from stagecoach.text.tokenizer import Tokenizer
from tests.cpu.api.chat_api.test_route import CALLS
from tests.cpu.api.messages_api.conftest import Scripted


@pytest.fixture(scope="module")
def tokenizer(scripted: Scripted) -> Tokenizer:
    return scripted[1].tokenizer


def tokens_of(tokenizer: Tokenizer, message: dict[str, Any]) -> list[int]:
    segments = answer_segments(message)
    return [token_id for segment in segments for token_id in encode_segment(tokenizer, segment)]


def events_of(
    tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], *, has_one_call: bool = False
) -> list[ContentEvent]:
    """The events of an answer whose tokens come in these pieces, each read when it came."""
    prompt = render(tokenizer, [{"role": "user", "content": "hi"}])
    parser = make_parser("kimi_k3", tokenizer, prompt_token_ids=prompt)
    answer = ChatAnswer(parser, has_one_call=has_one_call)
    writer = ContentWriter(answer)
    events: list[ContentEvent] = []
    for piece in pieces:
        answer.push(piece)
        events += writer.next(is_last=False)
    answer.finish()
    return [*events, *writer.next(is_last=True)]


def blocks_of(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, has_one_call: bool = False
) -> list[ContentBlock]:
    return whole_content(events_of(tokenizer, [token_ids], has_one_call=has_one_call))


def assert_followable(events: list[ContentEvent]) -> None:
    """One block after the other; thoughts are signed last; nothing is empty but a block."""
    open_block: ContentBlock | None = None
    num_begun = 0
    for number, event in enumerate(events):
        if isinstance(event, BlockStart):
            assert open_block is None and event.index == num_begun
            open_block = event.content_block
            num_begun += 1
        elif isinstance(event, BlockDeltaEvent):
            assert open_block is not None and event.index == num_begun - 1
            if isinstance(event.delta, SignatureDelta):
                assert isinstance(open_block, AnsweredThinking)
                assert isinstance(events[number + 1], BlockStop)
        else:
            assert open_block is not None and event.index == num_begun - 1
            open_block = None
    assert open_block is None


def test_all_kinds_of_blocks(tokenizer: Tokenizer) -> None:
    message = {"reasoning_content": "well", "content": "I look.", "tool_calls": CALLS}
    thinking, text, *calls = blocks_of(tokenizer, tokens_of(tokenizer, message))
    assert thinking == AnsweredThinking(thinking="well", signature=SIGNATURE)
    assert text == AnsweredText(text="I look.")
    assert [(call.name, call.input) for call in calls if isinstance(call, AnsweredToolUse)] == [
        ("weather", {"place": "Oslo", "days": 3}),
        ("weather", {"place": "Graz"}),
    ]


def test_nothing_said_is_no_block(tokenizer: Tokenizer) -> None:
    assert blocks_of(tokenizer, tokens_of(tokenizer, {"content": ""})) == []


def test_an_input_that_was_cut_off_is_what_is_certain_of_it(tokenizer: Tokenizer) -> None:
    token_ids = tokens_of(tokenizer, {"content": "", "tool_calls": CALLS})
    end = len(tokenizer.decode_bytes(token_ids).decode().partition("3<")[0])
    [call] = blocks_of(tokenizer, token_ids[: _num_tokens(tokenizer, token_ids, end)])
    assert isinstance(call, AnsweredToolUse)
    assert call.input == {"place": "Oslo"}


def _num_tokens(tokenizer: Tokenizer, token_ids: list[int], num_chars: int) -> int:
    """How many tokens have a text of that length."""
    for number in range(len(token_ids)):
        if len(tokenizer.decode_bytes(token_ids[:number])) >= num_chars:
            return number
    raise AssertionError("the text is shorter")


@pytest.mark.parametrize("arguments", ["[1]", "{]", "nix"])
def test_an_input_that_is_no_object_is_told_as_it_is(tokenizer: Tokenizer, arguments: str) -> None:
    written = (
        '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|end_of_msg|>"
    )
    [block] = blocks_of(tokenizer, _encoded(tokenizer, written))
    assert isinstance(block, AnsweredToolUse)
    assert block.input == {"INVALID_JSON": arguments}


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text in which names of special tokens are these."""
    token_ids: list[int] = []
    names = sorted(tokenizer.special_names, key=len, reverse=True)
    while text:
        name = next((name for name in names if text.startswith(name)), None)
        if name is not None:
            token_ids.append(tokenizer.special_id(name))
        else:
            token_ids += tokenizer.encode(text[0])
        text = text[len(name or text[0]) :]
    return token_ids


def test_what_is_said_behind_a_call_comes_behind_all_calls(tokenizer: Tokenizer) -> None:
    token_ids = tokens_of(tokenizer, {"content": "before", "tool_calls": CALLS})
    text = tokenizer.decode_bytes(token_ids).decode()
    first, mark, rest = text.partition("<|close|>call<|sep|>")
    blocks = blocks_of(tokenizer, _encoded(tokenizer, f"{first}{mark}between{rest}"))
    assert [type(block).__name__ for block in blocks] == [
        "AnsweredText",
        "AnsweredToolUse",
        "AnsweredToolUse",
        "AnsweredText",
    ]
    assert blocks[-1] == AnsweredText(text="between")


_WORDS = st.text(alphabet='ab {}[]"\\<|é🙂\n', max_size=8)
_VALUES = st.one_of(_WORDS, st.integers(), st.booleans(), st.lists(_WORDS, max_size=2))
_CALLS = st.lists(
    st.builds(
        lambda values: {"function": {"name": "f", "arguments": values}},
        st.dictionaries(st.text(alphabet="xy", min_size=1, max_size=2), _VALUES, max_size=3),
    ),
    max_size=3,
)


@st.composite
def _answers(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """What a model may write: a message, perhaps cut, perhaps with pieces out of place."""
    message = {
        "reasoning_content": draw(_WORDS),
        "content": draw(_WORDS),
        "tool_calls": draw(_CALLS),
    }
    token_ids = tokens_of(tokenizer, message)
    if draw(st.booleans()):
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(token_ids))] * 2)))
        place = draw(st.integers(0, len(token_ids)))
        token_ids = [*token_ids[:place], *token_ids[start:end], *token_ids[place:]]
    return token_ids[: draw(st.integers(0, len(token_ids)))] if draw(st.booleans()) else token_ids


@settings(max_examples=80)
@given(st.data())
def test_however_the_tokens_come_the_blocks_are_the_same(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    token_ids = data.draw(_answers(tokenizer))
    has_one_call = data.draw(st.booleans())
    whole = blocks_of(tokenizer, token_ids, has_one_call=has_one_call)
    pieces = []
    start = 0
    while start < len(token_ids):
        size = data.draw(st.integers(1, 40))
        pieces.append(token_ids[start : start + size])
        start += size
    events = events_of(tokenizer, pieces, has_one_call=has_one_call)
    assert_followable(events)
    assert [_without_id(block) for block in whole_content(events)] == [
        _without_id(block) for block in whole
    ]
    text = "".join(_text_of(block) for block in whole)
    assert not any(name in text for name in tokenizer.special_names)


def _without_id(block: ContentBlock) -> Any:
    return (block.name, block.input) if isinstance(block, AnsweredToolUse) else block


def _text_of(block: ContentBlock) -> str:
    if isinstance(block, AnsweredThinking):
        return block.thinking
    return block.text if isinstance(block, AnsweredText) else str(block.input)
