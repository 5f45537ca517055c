"""A stream of /v1/responses, held against the types of the `openai` package and its order."""

import typing
from typing import Any

from openai.types import responses as types
from openai.types.responses.response_stream_event import ResponseStreamEvent

_ENDS = {"response.completed", "response.incomplete", "response.failed"}
# Not in the package's types, but in the protocol.
_EXTRA_FIELDS = {"store", "name"}


def _classes() -> dict[str, Any]:
    union = typing.get_args(ResponseStreamEvent)[0]
    return {
        typing.get_args(kind.model_fields["type"].annotation)[0]: kind
        for kind in typing.get_args(union)
    }


_CLASSES = _classes()


def checked_response(response: dict[str, Any]) -> dict[str, Any]:
    model = types.Response.model_validate(response, strict=True)
    assert set(model.model_extra or {}) <= _EXTRA_FIELDS
    return response


class Replay:
    """What a client knows that believes the events: items by their place."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.open: set[int] = set()
        self.end: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        kind = event["type"].removeprefix("response.")
        if event["type"] in _ENDS:
            self.end = event["response"]
        elif kind == "error":
            self.error = event
        elif kind == "output_item.added":
            assert event["output_index"] == len(self.items)
            assert event["item"]["status"] == "in_progress"
            self.open.add(len(self.items))
            self.items.append(event["item"])
        elif "output_index" in event:
            self._add_within(event, kind)

    def _add_within(self, event: dict[str, Any], kind: str) -> None:
        place = event["output_index"]
        assert place in self.open, event
        item = self.items[place]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            assert item["content"] == [] and event["content_index"] == 0
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            part = item["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.setdefault("logprobs", []).extend(event.get("logprobs", ()))
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            part = item["content"][event["content_index"]]
            assert part["text"] == event["text"]
            assert part.get("logprobs", []) == event.get("logprobs", [])
        elif kind == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        elif kind == "content_part.done":
            check_same(item["content"], [event["part"]])
        else:
            assert kind == "output_item.done", kind
            item["status"] = event["item"]["status"]
            check_same([item], [event["item"]])
            self.open.discard(place)


def replay(events: list[dict[str, Any]]) -> Replay:
    """Check each event and the order of all; returns what they add up to."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"] == events[1]["response"]
    assert events[0]["response"]["status"] == "in_progress"
    assert [event["type"] in _ENDS for event in events] == [False] * (len(events) - 1) + [True]
    known = Replay()
    for event in events:
        model = _CLASSES[event["type"]].model_validate(event, strict=True)
        assert set(model.model_extra or {}) <= _EXTRA_FIELDS, event
        if "response" in event:
            checked_response(event["response"])
        known.add(event)
    assert known.end is not None and known.end["id"] == events[0]["response"]["id"]
    assert events[-1]["type"] == f"response.{known.end['status']}"
    if known.error is None:
        assert not known.open
        check_same(known.items, known.end["output"])
    return known


def check_same(items: list[Any], others: list[Any]) -> None:
    """Compare items or parts. Reasoning has no logprobs, which a replay gives to every text."""
    assert [_plain(item) for item in items] == [_plain(item) for item in others]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {
            key: _plain(item)
            for key, item in value.items()
            if not (key == "logprobs" and value.get("type") == "reasoning_text")
        }
    return value


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """The same without what differs from one request to the next."""
    rest = {key: value for key, value in response.items() if key not in _OF_ONE_REQUEST}
    rest["output"] = [
        {key: value for key, value in item.items() if key not in _OF_ONE_REQUEST}
        for item in response["output"]
    ]
    return rest


_OF_ONE_REQUEST = ("id", "call_id", "created_at", "completed_at")
