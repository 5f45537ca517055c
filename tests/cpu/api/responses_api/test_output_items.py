"""Items and events of any answer: the same however its tokens come and whenever they are read."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.api.chat_api.answer import ChatAnswer
from stagecoach.api.responses_api.objects import StreamEvent
from stagecoach.api.responses_api.output_items import ContentLogprobs, OutputItems
from stagecoach.outputs import CompletionOutput
from stagecoach.request import TokenLogprobs
from stagecoach.text.marker_parser import MarkerParser
from stagecoach.text.message_stream import MessageParser, StopRules
from stagecoach.text.xtml_parser import XtmlParser
from tests.cpu.api.responses_api.event_check import Replay, check_same, without_names
from tests.cpu.text.piece_tokenizer import PieceTokenizer, pieces_of

THINK = "<|open|>think<|sep|>"
END = "<|close|>{}<|sep|>"
CALL = '<|open|>call tool="f" index="1"<|sep|>'
ARGUMENT = '<|open|>argument key="k" type="number"<|sep|>'
# What an answer is made of, whole and torn, in an order that no model should write.
XTML = (
    *(THINK, "<|open|>response<|sep|>", "<|open|>tools<|sep|>", CALL, ARGUMENT),
    *(END.format(tag) for tag in ("think", "response", "tools", "call", "argument")),
    *("12", "ab", "é", "STOP", " ", "<|open|>", "<|sep|>", "tools", "<|pad|>", "<|end_of_msg|>"),
)
MARKED = (
    *("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", '{"a": 1}'),
    *("<|tool_call_end|>", "ab", "é", "STOP", " "),
)
MARKERS = {
    "xtml": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|pad|>"),
    "marked": tuple(word for word in MARKED if word.startswith("<")),
}


def parser_of(form: str, tokenizer: PieceTokenizer, stop: str) -> MessageParser:
    rules = StopRules((stop,) if stop else ())
    kind = XtmlParser if form == "xtml" else MarkerParser
    prompt = THINK if form == "xtml" else "<think>"
    token_ids = tokenizer.ids(pieces_of(prompt, MARKERS[form]))
    return kind(tokenizer, prompt_token_ids=token_ids, rules=rules)


class Run:
    """An answer that is pushed in some sizes and read at some times."""

    def __init__(self, form: str, stop: str = "", *, has_one_call: bool = False) -> None:
        self.tokenizer = PieceTokenizer()
        self._form = form
        parser = parser_of(form, self.tokenizer, stop)
        self.answer = ChatAnswer(parser, has_one_call=has_one_call)
        self.completion = CompletionOutput(index=0, logprobs=[])
        logprobs = ContentLogprobs(self.completion, self.answer, self.tokenizer)  # type: ignore[arg-type]
        self.items = OutputItems(logprobs, itertools.count().__next__)
        self.events: list[StreamEvent] = []

    def go(
        self, text: str, sizes: Sequence[int], reads: Sequence[bool], *, is_cut: bool
    ) -> list[dict[str, Any]]:
        """The items, which the events add up to."""
        token_ids = self.tokenizer.ids(pieces_of(text, MARKERS[self._form]))
        start = 0
        for size, is_read in zip(itertools.cycle(sizes), itertools.cycle(reads), strict=False):
            if start >= len(token_ids) or self.answer.stop_match is not None:
                break
            self.push(token_ids[start : start + size])
            start += size
            if is_read:
                self.events.extend(self.items.write(self.answer.take_pieces()))
        if self.answer.stop_match is None:
            self.answer.finish()
        self.events.extend(self.items.write(self.answer.take_pieces()))
        is_whole = self.answer.stop_match is not None
        self.events.extend(self.items.end(is_cut=is_cut and not is_whole))
        return self._told()

    def push(self, token_ids: Sequence[int]) -> None:
        self.answer.push(token_ids)
        assert self.completion.logprobs is not None
        self.completion.logprobs.extend(TokenLogprobs(id_, -1.0, 1) for id_ in token_ids)
        match = self.answer.stop_match
        if match is not None:
            del self.completion.logprobs[match.num_tokens :]

    def _told(self) -> list[dict[str, Any]]:
        known = Replay()
        for number, event in enumerate(self.events):
            assert event.sequence_number == number
            known.add(msgspec.to_builtins(event))
        items = msgspec.to_builtins(self.items.items)
        check_same(known.items, items)
        return without_names({"output": items})["output"]


@pytest.mark.parametrize("form", ["xtml", "marked"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_same_items(form: str, data: st.DataObject) -> None:
    words = st.sampled_from(XTML if form == "xtml" else MARKED)
    text = "".join(data.draw(st.lists(words, max_size=14)))
    options: dict[str, Any] = {
        "stop": data.draw(st.sampled_from(["", "STOP", "b"])),
        "has_one_call": data.draw(st.booleans()),
    }
    is_cut = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    reads = data.draw(st.lists(st.booleans(), min_size=1, max_size=5))
    split = Run(form, **options)
    whole = Run(form, **options)
    items = split.go(text, sizes, reads, is_cut=is_cut)
    assert items == whole.go(text, [1000], [False], is_cut=is_cut)
    # Nothing is lost or told twice: the items say what the message of a chat says.
    message = Run(form, **options)
    message.answer.push(message.tokenizer.ids(pieces_of(text, MARKERS[form])))
    message.answer.finish()
    delta = message.answer.take()
    for kind, said in (("reasoning", delta.reasoning), ("message", delta.content)):
        texts = [item["content"][0]["text"] for item in items if item["type"] == kind]
        assert "".join(texts) == said
    calls = [item for item in items if item["type"] == "function_call"]
    assert [(call["name"], call["arguments"]) for call in calls] == [
        (call.name, call.arguments) for call in delta.tool_calls
    ]


def kinds_of(text: str, form: str = "xtml") -> list[tuple[str, str]]:
    items = Run(form).go(text, [1], [True], is_cut=False)
    return [(item["type"], item.get("arguments") or item["content"][0]["text"]) for item in items]


def test_text_after_a_call_is_a_message_of_its_own() -> None:
    text = f"hm<|open|>response<|sep|>look{CALL}{ARGUMENT}1{END.format('call')}"
    text += f"{END.format('tools')}<|open|>response<|sep|>done"
    assert kinds_of(text) == [
        ("reasoning", "hm"),
        ("message", "look"),
        ("function_call", '{"k": 1}'),
        ("message", "done"),
    ]


def test_a_call_goes_on_behind_a_stray_text() -> None:
    text = f"{CALL}{ARGUMENT}1{END.format('argument')}"
    text += '<|open|>argument type="number"<|sep|>stray' + END.format("argument")
    text += ARGUMENT.replace('"k"', '"l"') + "2" + END.format("argument") + END.format("call")
    assert kinds_of(text) == [("function_call", '{"k": 1, "l": 2}'), ("message", "stray")]


def test_logprobs_are_those_of_the_text() -> None:
    run = Run("xtml", "STOP")
    items = run.go("hm<|open|>response<|sep|><|open|>foo é S STOP", [2], [True], is_cut=True)
    part = items[1]["content"][0]
    assert part["text"] == "foo é S "
    assert "".join(entry["token"] for entry in part["logprobs"]) == "foo é S STOP"


def test_what_breaks_off_is_incomplete() -> None:
    run = Run("xtml")
    run.push(run.tokenizer.ids(pieces_of("hm<|open|>response<|sep|>ab", MARKERS["xtml"])))
    list(run.items.write(run.answer.take_pieces()))
    run.items.break_off()
    assert [item.status for item in run.items.items] == ["completed", "incomplete"]
