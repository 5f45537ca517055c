"""Tokens of an answer, counted from what its events tell."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.benchmarks.answer import Answer, AnswerReader, TextDelta, text_delta
from stagecoach.errors import ServerError


def _event(text: str = "", *, so_far: int | None = None, ids: int | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": text, "finish_reason": None}
    if ids is not None:
        choice["token_ids"] = [7] * ids
    usage = None if so_far is None else {"completion_tokens": so_far, "prompt_tokens": 9}
    return {"choices": [choice], "usage": usage}


def _read(*events: dict[str, Any], is_done: bool = True) -> Answer:
    reader = AnswerReader()
    for number, event in enumerate(events):
        reader.push(event, float(number))
    return reader.finish(is_done=is_done)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=20).filter(lambda counts: sum(counts) > 0))
def test_usage_and_token_ids_count_the_same(counts: list[int]) -> None:
    totals = [sum(counts[: place + 1]) for place in range(len(counts))]
    # A token that ends inside a character brings no text yet.
    texts = ["x" * (count > 1) for count in counts]
    told = _read(*map(lambda text, total: _event(text, so_far=total), texts, totals))
    if any(count > 1 for count in counts):
        assert told.token_source == "usage"
        assert told.num_prompt_tokens == 9
        listed = _read(*map(lambda text, count: _event(text, ids=count), texts, counts))
        assert listed.token_source == "token_ids"
        assert told.arrivals == listed.arrivals
        expected = [(float(place), count) for place, count in enumerate(counts) if count]
        assert [tuple(arrival) for arrival in told.arrivals] == expected
    assert told.num_tokens == sum(counts)


def test_usage_in_the_last_event_only_is_a_total_and_no_arrival() -> None:
    answer = _read(_event("a"), _event("b"), _event("", so_far=9))
    assert answer.token_source == "events"
    assert [tuple(arrival) for arrival in answer.arrivals] == [(0.0, 1), (1.0, 1)]
    assert answer.num_tokens == 9
    assert answer.end_seconds == 2.0


def test_an_answer_without_text_came_with_its_end() -> None:
    answer = _read(_event(""), _event(""))
    assert [tuple(arrival) for arrival in answer.arrivals] == [(1.0, 1)]
    assert (answer.num_tokens, answer.content) == (1, "")


def test_usage_that_goes_down_counts_nothing() -> None:
    answer = _read(_event("a", so_far=3), _event("b", so_far=2), _event("c", so_far=4))
    assert [arrival.num_tokens for arrival in answer.arrivals] == [3, 1]


def test_what_is_thought_and_called_is_output_but_no_content() -> None:
    def chat(**delta: Any) -> dict[str, Any]:
        return {"choices": [{"delta": delta}]}

    answer = _read(
        chat(role="assistant", content=""),
        chat(reasoning_content="hm"),
        chat(content="yes"),
        chat(tool_calls=[{"index": 0}]),
    )
    assert answer.content == "yes"
    assert [arrival.seconds for arrival in answer.arrivals] == [1.0, 2.0, 3.0]


def test_a_delta_in_each_form() -> None:
    assert text_delta({"text": "a"}) == TextDelta("", "a", has_tool_call=False)
    assert text_delta({"delta": {"reasoning": "r", "content": None}}).reasoning == "r"
    assert text_delta({"delta": None, "text": None}) == TextDelta("", "", has_tool_call=False)


def test_a_reason_to_finish_is_as_good_as_done() -> None:
    end = _event("b")
    end["choices"][0]["finish_reason"] = "stop"
    assert _read(end, is_done=False).content == "b"
    with pytest.raises(ServerError, match="the stream ended before the answer did"):
        _read(_event("a"), is_done=False)
    with pytest.raises(ServerError, match="the stream held no answer"):
        _read({"choices": []})
