"""Counts and times of requests in /metrics, against what clients were told."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from stagecoach.api.request_watch import Observer, RequestRecord
from tests.cpu.api.asgi import call, exchange
from tests.cpu.api.conftest import Server
from tests.cpu.api.operations.metrics_text import Scrape, read, scrape
from tests.cpu.api.scripted import ScriptedEngine, scripted_server
from tests.small_engine import ONLY_LETTERS

TEXT = "/v1/completions"
LETTERS: dict[str, Any] = {
    "logit_bias": {str(token_id): bias for token_id, bias in ONLY_LETTERS.items()},
    "max_tokens": 12,
}
TOLD = (
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_prompt_tokens_sum",
    "request_prompt_tokens_count",
    "request_generation_tokens_sum",
    "request_generation_tokens_count",
    "e2e_request_latency_seconds_count",
    "time_to_first_token_seconds_count",
)


def test_tokens_are_those_of_usage(server: Server) -> None:
    before = scrape(server)
    bodies = [
        {"prompt": "one prompt of some length"},
        {"prompt": "one prompt of some length"},
        {"prompt": ["a", "bc", "one prompt of some length"], "n": 2},
        {"prompt": "stops early", "stop": ["a", "e", "t"], "ignore_eos": True},
        {"prompt": "a stream", "stream": True, "stream_options": {"include_usage": True}},
    ]
    usages, num_choices = [], 0
    for body in bodies:
        answer = server.post(TEXT, **LETTERS, **body)
        usages.append(answer.events[-2]["usage"] if body.get("stream") else answer.json["usage"])
        num_choices += len(body["prompt"]) * 2 if isinstance(body["prompt"], list) else 1
    after = scrape(server)
    grown = {name: after.value(name) - before.value(name) for name in TOLD}
    num_prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0
    assert grown == {
        "prompt_tokens_total": num_prompt_tokens,
        "prompt_tokens_cached_total": cached,
        "generation_tokens_total": num_tokens,
        "request_prompt_tokens_sum": num_prompt_tokens,
        "request_prompt_tokens_count": 7,
        "request_generation_tokens_sum": num_tokens,
        "request_generation_tokens_count": num_choices,
        "e2e_request_latency_seconds_count": num_choices,
        "time_to_first_token_seconds_count": num_choices,
    }


def test_the_phases_of_a_request_add_up(server: Server) -> None:
    names = [
        *("time_to_first_token_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_inference_time_seconds", "e2e_request_latency_seconds"),
    ]
    before = scrape(server)
    server.post(TEXT, prompt="x" * 200, **LETTERS)
    after = scrape(server)
    first, queue, prefill, decode, inference, total = (
        after.value(f"{name}_sum") - before.value(f"{name}_sum") for name in names
    )
    for name in names:
        assert after.value(f"{name}_count") - before.value(f"{name}_count") == 1
    assert min(queue, prefill, decode) > 0
    assert queue + prefill == pytest.approx(first)
    assert prefill + decode == pytest.approx(inference)
    assert queue + inference <= total + 1e-9


def test_every_completion_ends_under_one_reason(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go_away() -> None:
            body = json.dumps({"prompt": "a", "n": 2, "stream": True}).encode()
            async with exchange(server.app, "POST", TEXT, body) as state:
                while len(engine.open) < 1:
                    await asyncio.sleep(0.01)
                for request_id in list(engine.open):
                    engine.tell(request_id, token_ids=(97, 98))
                await state.next_body()
                state.go()

        for reason in ("stop", "length"):
            engine.say([97, 98, 99], reason=reason)
            assert server.post(TEXT, prompt="a", n=3).status == 200
        engine.say([97], reason="error")
        engine.tell = lambda request_id, **fields: ScriptedEngine.tell(  # type: ignore[method-assign]
            engine, request_id, **fields, error="NonFiniteError: NaN"
        )
        assert server.post(TEXT, prompt="a").status == 500
        del engine.tell
        engine._is_talking = False
        server.run(go_away())
        told = scrape(server)
        ended = {
            reason: told.value("request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert ended == {"stop": 3, "length": 3, "abort": 2, "error": 1}
        # Latencies are of completions that ended by themselves.
        assert told.value("e2e_request_latency_seconds_count") == 6


# Field bugs of the kind K06: a metric that fails must not end a stream.


class Raising(Observer):
    """Fails at everything."""

    def __init__(self) -> None:
        self.num_calls = 0

    def answered(self, *args: Any) -> None:
        self.num_calls += 1
        raise ValueError("Counters can only be incremented by non-negative amounts")

    request_started = prompt_computed = tokens_came = answered  # type: ignore[assignment]
    completion_ended = request_ended = answered  # type: ignore[assignment]


def test_an_observer_that_raises_stops_nothing(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_server(model_folder) as (server, engine):
        engine.say([97] * 6)
        raising = Raising()
        server.service.observers.add(raising)
        ended: list[RequestRecord] = []
        last = Observer()
        last.request_ended = ended.append  # type: ignore[method-assign]
        server.service.observers.add(last)
        for is_streamed in (False, True):
            answer = server.post(TEXT, prompt="a", stream=is_streamed)
            assert answer.status == 200
        assert answer.events[-1] == "[DONE]"
        assert raising.num_calls > 10
        assert len(ended) == 2
        assert scrape(server).value("generation_tokens_total") == 12
    assert len([record for record in caplog.records if "failed" in record.message]) == 1


def test_a_collector_that_raises_fails_the_scrape_only(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted_server(model_folder) as (server, engine):
        engine.say([97] * 6)

        def fail(registry: CollectorRegistry) -> Any:
            raise RuntimeError("no file")

        async def both() -> None:
            body = json.dumps({"prompt": "a", "stream": True}).encode()
            async with exchange(server.app, "POST", TEXT, body) as state:
                first = await state.next_body()
                assert first is not None
                answer = await call(server.app, "GET", "/metrics")
                assert answer.status == 500
                pieces = [first]
                while (piece := await state.next_body()) is not None:
                    pieces.append(piece)
                assert b"".join(pieces).endswith(b"data: [DONE]\n\n")

        with monkeypatch.context() as patch:
            patch.setattr(CollectorRegistry, "collect", fail)
            server.run(both())
        assert scrape(server).value("generation_tokens_total") == 6


async def uneven_traffic(server: Server) -> list[Scrape]:
    """What is told in the middle of streams that end, stop at a text, or are left."""
    scrapes: list[Scrape] = []

    async def stream(number: int) -> None:
        body: dict[str, Any] = {"prompt": "p" * (60 + 40 * number), **LETTERS, "stream": True}
        body |= {"max_tokens": 40} if number % 2 else {"stop": ["e", "a"]}
        async with exchange(server.app, "POST", TEXT, json.dumps(body).encode()) as state:
            for _ in range(3 + number):
                await state.next_body()
            if number % 3:
                while await state.next_body() is not None:
                    continue

    async def watch() -> None:
        while True:
            answer = await call(server.app, "GET", "/metrics")
            scrapes.append(read(answer.body.decode()))
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(stream(number) for number in range(4)))
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    return scrapes


def test_nothing_that_is_counted_shrinks(server: Server) -> None:
    scrapes = [*server.run(uneven_traffic(server)), scrape(server)]
    assert len(scrapes) > 3
    for before, after in itertools.pairwise(scrapes):
        for (name, labels), value in before.values.items():
            family = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            if before.types.get(name) == "counter" or before.types.get(family) == "histogram":
                assert after.values[name, labels] >= value, (name, labels)
    busy, hop, idle = (
        scrapes[-1].value(f"stage_{kind}_seconds_total", stage="0")
        for kind in ("busy", "hop", "idle")
    )
    assert busy > 0 and hop == 0 and idle > 0
