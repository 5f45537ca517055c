"""One streamed answer: what arrived when, and how many tokens it was.

Owns the rules that turn the events of /v1/completions and /v1/chat/completions into counted
arrivals. Knows no HTTP and no clock: whoever reads the stream says when each event came.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stagecoach.errors import ServerError

TokenSource = Literal["usage", "token_ids", "events"]


class Arrival(NamedTuple):
    """Tokens that came together."""

    seconds: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete answer.

    `arrivals` are in the order of time and hold at least one. `num_tokens`, the server's count
    where it told one, may exceed their sum. `content` lacks what the model thought.
    """

    arrivals: tuple[Arrival, ...]
    end_seconds: float
    num_prompt_tokens: int | None
    num_tokens: int
    content: str
    token_source: TokenSource


class TextDelta(NamedTuple):
    """What an event adds to the answer."""

    reasoning: str
    content: str
    has_tool_call: bool


class _Event(NamedTuple):
    seconds: float
    num_tokens_so_far: int | None  # as the event's usage says
    num_token_ids: int | None
    has_text: bool


class AnswerReader:
    """Collects the events of one stream.

    How many tokens an event brought is, in this order: what its usage says beyond the last one's
    (`continuous_usage_stats`); its number of `token_ids`; 1 for each event with text. The first
    source that every event with text has is used for the whole answer.
    """

    def __init__(self) -> None:
        self._events: list[_Event] = []
        self._usage: dict[str, Any] = {}
        self._content: list[str] = []
        self._is_finished = False

    def push(self, event: dict[str, Any], seconds: float) -> None:
        """Take an event that came at `seconds`."""
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices:
            return
        choice = choices[0]
        delta = text_delta(choice)
        self._content.append(delta.content)
        self._is_finished |= choice.get("finish_reason") is not None
        token_ids = choice.get("token_ids")
        self._events.append(
            _Event(
                seconds=seconds,
                num_tokens_so_far=usage.get("completion_tokens")
                if isinstance(usage, dict)
                else None,
                num_token_ids=len(token_ids) if isinstance(token_ids, list) else None,
                has_text=bool(delta.reasoning or delta.content or delta.has_tool_call),
            )
        )

    def finish(self, *, is_done: bool) -> Answer:
        """The answer, now that the stream has ended.

        Args:
            is_done: the stream said that it is complete.

        Raises:
            ServerError: it ended before the answer did, or brought none.
        """
        if not (is_done or self._is_finished):
            raise ServerError("the stream ended before the answer did")
        if not self._events:
            raise ServerError("the stream held no answer")
        source = self._token_source()
        arrivals = self._arrivals(source)
        if not arrivals:  # tokens without any text, as a lone end-of-sequence token
            arrivals = [Arrival(self._events[-1].seconds, 1)]
        told = self._usage.get("completion_tokens")
        counted = sum(arrival.num_tokens for arrival in arrivals)
        return Answer(
            arrivals=tuple(arrivals),
            end_seconds=self._events[-1].seconds,
            num_prompt_tokens=self._usage.get("prompt_tokens"),
            num_tokens=counted if told is None else told,
            content="".join(self._content),
            token_source=source,
        )

    def _token_source(self) -> TokenSource:
        with_text = [event for event in self._events if event.has_text]
        if with_text and all(event.num_tokens_so_far is not None for event in with_text):
            return "usage"
        if with_text and all(event.num_token_ids is not None for event in with_text):
            return "token_ids"
        return "events"

    def _arrivals(self, source: TokenSource) -> list[Arrival]:
        arrivals = []
        num_so_far = 0
        for event in self._events:
            if source == "usage":
                num_tokens = (event.num_tokens_so_far or num_so_far) - num_so_far
            elif source == "token_ids":
                num_tokens = event.num_token_ids or 0
            else:
                num_tokens = int(event.has_text)
            if num_tokens > 0:
                arrivals.append(Arrival(event.seconds, num_tokens))
                num_so_far += num_tokens
        return arrivals


def text_delta(choice: dict[str, Any]) -> TextDelta:
    """The text of a choice in either form: completion, or chat completion."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return TextDelta("", choice.get("text") or "", has_tool_call=False)
    return TextDelta(
        reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
        content=delta.get("content") or "",
        has_tool_call=bool(delta.get("tool_calls")),
    )
