"""A span for each request: what it says, where it hangs, and that it never stands in the way."""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from stagecoach.api import tracing
from stagecoach.errors import ConfigError
from tests.cpu.api.asgi import exchange
from tests.cpu.api.scripted import scripted_server
from tests.otlp_sink import attributes_of, otlp_sink

TEXT = "/v1/completions"
URL = "http://127.0.0.1:9/v1/traces"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "x-request-id": "mine"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """In the place of one that sends."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "otlp_exporter", lambda endpoint: exporter)
    return exporter


def spans_of(exporter: InMemorySpanExporter) -> Sequence[ReadableSpan]:
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def test_a_span_says_what_was_asked_and_how_long_it_took(
    model_folder: Path, exporter: InMemorySpanExporter
) -> None:
    with scripted_server(model_folder, otlp_traces_endpoint=URL) as (server, engine):
        planned = 0.0

        def tell(request_id: int, **fields: Any) -> None:
            nonlocal planned
            planned = planned or time.monotonic()
            type(engine).tell(engine, request_id, **fields, first_planned=planned)

        engine.tell = tell  # type: ignore[method-assign]
        engine.say([97] * 5)
        body = {"prompt": ["ab", "c"], "max_tokens": 9, "temperature": 0.5, "top_p": 0.75, "n": 2}
        answer = server.call("POST", TEXT, body, PARENT)
        server.call("POST", TEXT, {"prompt": "a", "stream": True})
        server.call("GET", "/v1/models")
        server.service.close()
        [first, second] = spans_of(exporter)
    attributes = dict(first.attributes or {})
    latencies = {
        name.removeprefix("gen_ai.latency."): attributes.pop(name)
        for name in list(attributes)
        if name.startswith("gen_ai.latency.")
    }
    usage = answer.json["usage"]
    assert attributes == {
        "gen_ai.request.id": "mine",
        "gen_ai.response.model": "small",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.num_sequences": 4,
        "gen_ai.response.finish_reasons": ("stop",) * 4,
    }
    assert latencies.keys() == {
        *("e2e", "time_in_queue", "time_to_first_token"),
        *("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"),
    }
    assert all(0 <= seconds <= latencies["e2e"] for seconds in latencies.values())
    assert (first.name, first.kind) == ("llm_request", SpanKind.SERVER)
    assert first.status.status_code == StatusCode.UNSET
    assert first.parent is not None and first.context is not None
    assert f"{first.context.trace_id:032x}" == TRACE_ID
    assert f"{first.parent.span_id:016x}" == "b7ad6b7169203331"
    # Nobody's child, and of no trace that was before.
    assert second.parent is None and second.context is not None
    assert second.context.trace_id != first.context.trace_id
    assert len(str((second.attributes or {})["gen_ai.request.id"])) == 32


def test_how_a_request_ended_is_told(model_folder: Path, exporter: InMemorySpanExporter) -> None:
    with scripted_server(model_folder, otlp_traces_endpoint=URL) as (server, engine):

        async def go_away() -> None:
            body = json.dumps({"prompt": "a", "stream": True}).encode()
            async with exchange(server.app, "POST", TEXT, body) as state:
                while not engine.open:
                    await asyncio.sleep(0.01)
                state.go()

        server.run(go_away())
        engine.say([97], reason="error")
        plain = engine.tell
        engine.tell = lambda request_id, **fields: plain(  # type: ignore[method-assign]
            request_id, **fields, error="NonFiniteError: NaN"
        )
        assert server.post(TEXT, prompt="a").status == 500
        # Refused before anything began.
        assert server.post(TEXT, prompt="a", top_p=2).status == 400
        server.service.close()
        ends = [
            ((span.attributes or {})["gen_ai.response.finish_reasons"], span.status.status_code)
            for span in spans_of(exporter)
        ]
    assert ends == [(("abort",), StatusCode.UNSET), (("error",), StatusCode.ERROR)]


def test_a_collector_gets_the_spans_before_the_server_has_ended(model_folder: Path) -> None:
    with otlp_sink() as sink:
        with scripted_server(model_folder, otlp_traces_endpoint=sink.url) as (server, engine):
            engine.say([97] * 5)
            server.call("POST", TEXT, {"prompt": "abc"}, PARENT)
            server.service.close()
            server.service.close()
        [span] = sink.spans
        assert span.name == "llm_request"
        assert span.trace_id.hex() == TRACE_ID
        assert attributes_of(span)["gen_ai.usage.completion_tokens"] == 5
        assert sink.services == {"stagecoach"}


def test_a_collector_that_hangs_delays_no_answer(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_EXPORT_SECONDS", 0.2)
    with socket.socket() as listener:
        # It takes connections and never answers.
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        with scripted_server(model_folder, otlp_traces_endpoint=endpoint) as (server, engine):
            engine.say([97])
            began = time.monotonic()
            for _ in range(20):
                assert server.post(TEXT, prompt="a").status == 200
            assert time.monotonic() - began < 2
            began = time.monotonic()
            server.service.close()
            assert time.monotonic() - began < 4
    said = [record.message for record in caplog.records if record.name.startswith("stagecoach")]
    assert len([line for line in said if line.startswith("traces: ")]) == 1, said


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", ""])
def test_an_endpoint_that_is_no_url_is_refused_at_the_start(
    model_folder: Path, endpoint: str
) -> None:
    with (
        pytest.raises(ConfigError, match=r"--otlp-traces-endpoint=.*must be a URL"),
        scripted_server(model_folder, otlp_traces_endpoint=endpoint),
    ):
        pass


def test_missing_packages_are_named_at_the_start(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "stagecoach.api.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with (
        pytest.raises(ConfigError, match=r"opentelemetry.sdk.trace.*stagecoach\[otel\]"),
        scripted_server(model_folder, otlp_traces_endpoint=URL),
    ):
        pass
