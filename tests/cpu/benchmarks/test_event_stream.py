"""Events, whatever the cuts between the bytes."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.benchmarks.event_stream import EventDecoder, error_text, response_error
from stagecoach.errors import ServerError

_EVENTS = [{"choices": [{"text": "é – 中 \n\n data: x"}]}, {"usage": {"completion_tokens": 3}}]


def _bytes(newline: bytes) -> bytes:
    lines = [b": a comment", b"event: message", b"id: 4"]
    for event in _EVENTS:
        lines += [b"data: " + json.dumps(event, ensure_ascii=False).encode(), b""]
    return newline.join([*lines, b"data: [DONE]", b"", b""])


@given(st.sets(st.integers(1, 200)), st.sampled_from([b"\n", b"\r\n"]))
def test_any_cut_of_the_bytes_gives_the_same_events(cuts: set[int], newline: bytes) -> None:
    decoder = EventDecoder()
    text = _bytes(newline)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    events = []
    for start, end in itertools.pairwise(places):
        assert not decoder.is_done or start > text.index(b"[DONE]")
        events += list(decoder.push(text[start:end]))
    assert events == _EVENTS
    assert decoder.is_done


def test_an_object_over_several_data_lines_is_one_event() -> None:
    assert list(EventDecoder().push(b'data: {"a":\ndata:1}\n\n')) == [{"a": 1}]


@pytest.mark.parametrize("data", [b"{", b"[]", b"3", b"\xff"])
def test_what_is_no_object_is_an_error(data: bytes) -> None:
    with pytest.raises(ServerError, match="an event is no JSON object"):
        list(EventDecoder().push(b"data: " + data + b"\n\n"))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "gone", "code": 500}}, "gone"),
        ({"error": "gone"}, "gone"),
        ({"error": {"code": 5}}, "{'code': 5}"),
        ("gone", "gone"),
    ],
)
def test_an_error_is_told_in_any_shape(body: object, text: str) -> None:
    assert error_text(body) == text
    assert str(response_error(500, json.dumps(body).encode())) == f"HTTP status 500: {text}"
    if isinstance(body, dict):
        with pytest.raises(ServerError, match=text):
            list(EventDecoder().push(b"data: " + json.dumps(body).encode() + b"\n\n"))


def test_an_error_page_is_told_as_it_is() -> None:
    assert str(response_error(502, b"<html>bad gateway</html>\n")) == (
        "HTTP status 502: <html>bad gateway</html>"
    )
