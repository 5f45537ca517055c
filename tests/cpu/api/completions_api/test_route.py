"""/v1/completions over a real engine: the answers of `LLM`, in OpenAI's form."""

import math
import queue
from typing import Any

import pytest

from stagecoach.outputs import RequestAssembler, RequestOutput
from stagecoach.request import SamplingParams
from stagecoach.schedule.commit import Progress
from tests.cpu.api.conftest import Server
from tests.small_engine import EOS, LETTERS, ONLY_LETTERS

LETTER_BIAS = {str(token_id): bias for token_id, bias in ONLY_LETTERS.items()}
LETTERS_OF: dict[str, Any] = {"logit_bias": LETTER_BIAS, "temperature": 0, "seed": 1}


def offline(server: Server, prompt: str, **fields: Any) -> RequestOutput:
    """The engine's own answer, without the server."""
    service = server.service
    params = SamplingParams(**fields)
    token_ids = service.tokenizer.encode(prompt)
    assembler = RequestAssembler(service.tokenizer, prompt, token_ids, params)
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    assert service.client is not None
    service.client.submit(token_ids, params, news.put)
    while not assembler.output.is_finished:
        progress = news.get(timeout=20)
        assert isinstance(progress, Progress)
        assembler.absorb(0, progress)
    return assembler.output


def joined(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice["text"]
        for event in events[:-1]
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_an_answer_is_that_of_the_engine(server: Server) -> None:
    [expected] = offline(
        server, "hello", max_tokens=9, temperature=0.7, seed=5, logit_bias=ONLY_LETTERS
    ).outputs
    answer = server.post(
        "/v1/completions",
        model="small",
        prompt="hello",
        max_tokens=9,
        temperature=0.7,
        seed=5,
        logit_bias=LETTER_BIAS,
        skip_reading_prefix_cache=True,
    )
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "text_completion"
    assert body["model"] == "small"
    assert body["choices"] == [
        {
            "index": 0,
            "text": expected.text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_adds_up_to_the_whole(server: Server) -> None:
    fields = LETTERS_OF | {"prompt": "stream", "max_tokens": 12, "n": 3, "temperature": 1.0}
    whole = server.post("/v1/completions", **fields).json
    answer = server.post("/v1/completions", **fields, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events
    assert events[-1] == "[DONE]"
    for choice in whole["choices"]:
        index = choice["index"]
        assert joined(events, index) == choice["text"]
        reasons = [
            item["finish_reason"]
            for event in events[:-1]
            for item in event["choices"]
            if item["index"] == index
        ]
        assert reasons[-1] == choice["finish_reason"] == "length"
        assert set(reasons[:-1]) <= {None}
    assert len({event["id"] for event in events[:-1]}) == 1


def test_batches_answer_in_the_order_of_prompts(server: Server) -> None:
    texts = ["one", "two", "three"]
    alone = [
        server.post("/v1/completions", prompt=text, max_tokens=4, **LETTERS_OF).json["choices"][0]
        for text in texts
    ]
    for prompts in (texts, [[ord(char) for char in text] for text in texts]):
        body = server.post("/v1/completions", prompt=prompts, max_tokens=4, **LETTERS_OF).json
        assert [choice["text"] for choice in body["choices"]] == [item["text"] for item in alone]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["prompt_tokens"] == sum(map(len, texts))
        assert body["usage"]["completion_tokens"] == 12


def test_n_completions_of_a_batch_share_its_prompts(server: Server) -> None:
    body = server.post(
        "/v1/completions", prompt=["ab", "cde"], n=2, max_tokens=3, seed=4, logit_bias=LETTER_BIAS
    ).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 12
    second = server.post(
        "/v1/completions", prompt="ab", max_tokens=3, seed=5, logit_bias=LETTER_BIAS
    ).json
    assert body["choices"][1]["text"] == second["choices"][0]["text"]


def test_a_prompt_is_checked_once_for_its_n_completions(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be long, and the check looks at every token, in the event loop."""
    client = server.service.client
    assert client is not None
    checked: list[Any] = []
    monkeypatch.setattr(client, "check", lambda prompt, *_: checked.append(list(prompt)))
    answer = server.post("/v1/completions", prompt=["ab", "c"], n=3, max_tokens=1)
    assert answer.status == 200
    assert checked == [[97, 98], [99]]


def test_sixteen_tokens_are_the_default(server: Server) -> None:
    body = server.post("/v1/completions", prompt=[1, 2], ignore_eos=True).json
    assert body["usage"]["completion_tokens"] == 16


def test_echo_with_logprobs_scores_the_prompt(server: Server) -> None:
    """What evaluation harnesses ask for log-likelihoods."""
    body = server.post(
        "/v1/completions", prompt="score", max_tokens=1, logprobs=2, echo=True, **LETTERS_OF
    ).json
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("score") and len(choice["text"]) == 6
    assert logprobs["tokens"] == list(choice["text"])
    assert logprobs["text_offset"] == list(range(6))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = offline(server, "score", max_tokens=1, temperature=0.0, prompt_logprobs=2)
    assert expected.prompt_logprobs is not None
    for told, entry in zip(
        logprobs["token_logprobs"][1:5], expected.prompt_logprobs[1:], strict=True
    ):
        assert entry is not None and told == pytest.approx(entry.logprob, abs=1e-9)
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert token in top and 2 <= len(top) <= 3
        assert all(value <= 0 and math.isfinite(value) for value in top.values())


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_no_token_is_the_prompt(server: Server, stream: bool) -> None:
    """As OpenAI has it: the prompt, scored, and nothing behind it."""
    fields = {"prompt": ["score", "this"], "n": 2, "echo": True, "logprobs": 1, "temperature": 0}
    longer = server.post("/v1/completions", **fields, max_tokens=1).json["choices"]
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    answer = server.post("/v1/completions", **fields, max_tokens=0, stream=stream, **options)
    if stream:
        *events, last, done = answer.events
        assert done == "[DONE]"
        choices = [event["choices"][0] for event in events]
        usage = last["usage"]
    else:
        choices, usage = answer.json["choices"], answer.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 0)
    choices.sort(key=lambda choice: choice["index"])
    assert [choice["text"] for choice in choices] == ["score", "score", "this", "this"]
    for choice, other in zip(choices, longer, strict=True):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        told, expected = choice["logprobs"], other["logprobs"]
        assert told["tokens"] == expected["tokens"][:-1] == list(choice["text"])
        assert told["token_logprobs"][0] is None
        assert told["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:-1])


@pytest.mark.parametrize("is_echoed", [False, True])
def test_streamed_logprobs_add_up_to_the_whole(server: Server, is_echoed: bool) -> None:
    fields = {"prompt": "héé", "max_tokens": 10, "logprobs": 1, "seed": 3, "echo": is_echoed}
    whole = server.post("/v1/completions", **fields).json["choices"][0]
    events = server.post("/v1/completions", **fields, stream=True).events[:-1]
    parts = [event["choices"][0]["logprobs"] for event in events]
    for name in ("tokens", "text_offset"):
        assert [value for part in parts for value in part[name]] == whole["logprobs"][name]
    told = [value for part in parts for value in part["token_logprobs"]]
    for value, expected in zip(told, whole["logprobs"]["token_logprobs"], strict=True):
        assert value == (None if expected is None else pytest.approx(expected, abs=1e-9))
    tops = [value for part in parts for value in part["top_logprobs"]]
    for top, expected in zip(tops, whole["logprobs"]["top_logprobs"], strict=True):
        assert (None if top is None else list(top)) == (expected and list(expected))
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert len(whole["logprobs"]["tokens"]) == 10 + (5 if is_echoed else 0)


def test_text_offsets_do_not_count_what_is_left_out(server: Server) -> None:
    """Special tokens that are skipped have a log-probability and no text."""
    bias = {str(EOS + 20): 90.0} | {str(token_id): 89.0 for token_id in LETTERS}
    fields = {"prompt": "x", "max_tokens": 8, "logprobs": 0, "seed": 2, "logit_bias": bias}
    [choice] = server.post("/v1/completions", **fields).json["choices"]
    logprobs = choice["logprobs"]
    assert any(len(token) > 1 for token in logprobs["tokens"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if len(token) == 1:
            assert choice["text"][offset] == token


def test_a_special_token_in_an_echoed_prompt_counts(server: Server) -> None:
    fields = {"prompt": [97, EOS + 20, 98], "max_tokens": 1, "logprobs": 0, "echo": True}
    [choice] = server.post("/v1/completions", **fields, **LETTERS_OF).json["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"][: logprobs["text_offset"][3]] == "".join(logprobs["tokens"][:3])


def test_prompt_logprobs_are_by_token_id(server: Server) -> None:
    [choice] = server.post("/v1/completions", prompt="abc", max_tokens=1, prompt_logprobs=1).json[
        "choices"
    ]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token_id, entries in zip((98, 99), others, strict=True):
        assert entries[str(token_id)]["decoded_token"] == chr(token_id)
        assert 1 in [entry["rank"] for entry in entries.values()]


def test_a_stop_string_cuts_text_tokens_and_usage(server: Server) -> None:
    fields = LETTERS_OF | {"prompt": "stop", "max_tokens": 30}
    text = server.post("/v1/completions", **fields).json["choices"][0]["text"]
    stop = text[4:6]
    end = text.index(stop)
    body = server.post("/v1/completions", **fields, stop=[stop], return_token_ids=True).json
    [choice] = body["choices"]
    assert choice["text"] == text[:end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == [ord(char) for char in text[: end + 2]]
    assert body["usage"]["completion_tokens"] == end + 2
    kept = server.post("/v1/completions", **fields, stop=stop, include_stop_str_in_output=True)
    assert kept.json["choices"][0]["text"] == text[: end + 2]


def test_a_stop_token_is_named(server: Server) -> None:
    fields = LETTERS_OF | {"prompt": "stop", "max_tokens": 30}
    text = server.post("/v1/completions", **fields).json["choices"][0]["text"]
    token_id = ord(text[3])
    [choice] = server.post("/v1/completions", **fields, stop_token_ids=[token_id]).json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token_id)


def test_cached_tokens_are_told(server: Server) -> None:
    prompt = "a prompt that is long enough to leave a state behind" * 2
    fields = LETTERS_OF | {"prompt": prompt, "max_tokens": 2, "cache_salt": "cached tokens"}
    details = [
        server.post("/v1/completions", **fields).json["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert details[0] == {"cached_tokens": 0}
    assert 0 < details[1]["cached_tokens"] < len(prompt)
    both = server.post("/v1/completions", **fields | {"prompt": [prompt, prompt]}).json
    cached = {"cached_tokens": 2 * details[1]["cached_tokens"]}
    assert both["usage"]["prompt_tokens_details"] == cached
    other = server.post("/v1/completions", **fields | {"cache_salt": "another tenant"}).json
    assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert server.post("/v1/cache/reset").status == 200
    again = server.post("/v1/completions", **fields).json
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


# Field bugs of the kind H11: usage in streams.


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_a_stream_without_include_usage_has_none(server: Server, options: Any) -> None:
    events = server.post(
        "/v1/completions", prompt="a", max_tokens=3, stream=True, stream_options=options
    ).events
    assert all("usage" not in event and event["choices"] for event in events[:-1])


def test_streamed_usage_is_one_event_without_choices(server: Server) -> None:
    fields = LETTERS_OF | {"prompt": "x" * 100, "max_tokens": 5, "n": 2}
    expected = server.post("/v1/completions", **fields, cache_salt="usage 1").json["usage"]
    events = server.post(
        "/v1/completions",
        **fields,
        cache_salt="usage 2",
        stream=True,
        stream_options={"include_usage": True},
    ).events
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == expected
    # A prompt of several chunks counts once.
    assert expected["prompt_tokens"] == 100 and expected["completion_tokens"] == 10
    assert all(event["usage"] is None for event in events[:-2])


def test_running_usage_grows_to_the_last(server: Server) -> None:
    events = server.post(
        "/v1/completions",
        prompt="abc",
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        **LETTERS_OF,
    ).events
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts) and counts[-1] == 6
    assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {3}


def test_text_in_pieces_loses_no_character(server: Server) -> None:
    """Characters of several bytes arrive whole, however tokens cut them."""
    bias = {str(byte): 90.0 for byte in "가나다漢字🙂".encode()}
    fields = {"prompt": "k", "max_tokens": 30, "seed": 8, "logit_bias": bias}
    text = server.post("/v1/completions", **fields).json["choices"][0]["text"]
    events = server.post("/v1/completions", **fields, stream=True).events
    assert joined(events) == text
