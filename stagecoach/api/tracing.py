"""A span for each request, sent to an OpenTelemetry collector (`--otlp-traces-endpoint`).

Owns the names of the attributes, which are vLLM's, and the way of the client's trace context to
the span. Needs the extra `otel`; who has no endpoint never imports this. Spans are sent by a
thread of the library, which drops them when the collector is slow: no request waits for it.
"""

import logging
import time
from collections.abc import Iterable

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stagecoach.api.request_watch import Observer, RequestRecord
from stagecoach.errors import ConfigError
from stagecoach.observe.log import get_logger

_log = get_logger(__name__)

_PROPAGATOR = TraceContextTextMapPropagator()
# Where the library logs. A handler of ours keeps it from writing to stderr by itself.
_LIBRARY = logging.getLogger("opentelemetry")
_REQUEST_ID = context.create_key("stagecoach-request-id")
# For one attempt to send, and for the last one when the server ends.
_EXPORT_SECONDS = 5.0
_SECONDS_BETWEEN_COMPLAINTS = 60.0


def check_endpoint(endpoint: str) -> None:
    """
    Raises:
        ConfigError: that is no URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-traces-endpoint={endpoint}: must be a URL that OTLP over HTTP is sent to, "
            "as http://localhost:4318/v1/traces"
        )


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans as OTLP over HTTP, in protobuf."""
    return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)


class RequestSpans(Observer):
    """Makes the span `llm_request` of each request, under the span that the client named."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        # What the environment says of the service comes last and counts.
        resource = Resource({"service.name": "stagecoach"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("stagecoach")
        self._model_name = model_name
        self._spans: dict[int, trace.Span] = {}
        self._complaints = _Complaints()
        _LIBRARY.addHandler(self._complaints)

    def request_started(self, request: RequestRecord) -> None:
        span = self._tracer.start_span("llm_request", kind=trace.SpanKind.SERVER)
        params = request.params
        for name, value in (
            ("gen_ai.request.id", context.get_value(_REQUEST_ID)),
            ("gen_ai.response.model", self._model_name),
            ("gen_ai.request.max_tokens", params.max_tokens),
            ("gen_ai.request.temperature", params.temperature),
            ("gen_ai.request.top_p", params.top_p),
            ("gen_ai.request.n", params.n),
        ):
            if value is not None:
                span.set_attribute(name, value)  # type: ignore[arg-type]
        self._spans[id(request)] = span

    def request_ended(self, request: RequestRecord) -> None:
        span = self._spans.pop(id(request))
        completions = request.completions
        span.set_attribute(
            "gen_ai.usage.prompt_tokens", sum(prompt.num_tokens for prompt in request.prompts)
        )
        span.set_attribute(
            "gen_ai.usage.completion_tokens", sum(item.num_tokens for item in completions)
        )
        span.set_attribute("gen_ai.usage.num_sequences", len(completions))
        reasons = [item.finish_reason or "" for item in completions]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        for name, seconds in _latencies(request):
            span.set_attribute(f"gen_ai.latency.{name}", seconds)
        if "error" in reasons:
            span.set_status(trace.StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        self._provider.shutdown()
        _LIBRARY.removeHandler(self._complaints)


class _Complaints(logging.Handler):
    """Says in our log what the library cannot send, which complains at each attempt to."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._is_quiet_until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.created >= self._is_quiet_until:
            self._is_quiet_until = record.created + _SECONDS_BETWEEN_COMPLAINTS
            _log.warning("traces: %s", record.getMessage())


def _latencies(request: RequestRecord) -> Iterable[tuple[str, float]]:
    """Seconds by name, of the request as a whole: from the first of its completions to the last."""
    completions = request.completions
    submitted = completions[0].submitted
    planned = [item.first_planned for item in completions if item.first_planned is not None]
    first = [item.first_token for item in completions if item.first_token is not None]
    last = [item.last_token for item in completions if item.last_token is not None]
    yield "e2e", time.monotonic() - submitted
    if planned:
        yield "time_in_queue", max(0.0, min(planned) - submitted)
    if first:
        yield "time_to_first_token", min(first) - submitted
        yield "time_in_model_decode", max(last) - min(first)
    if planned and first:
        yield "time_in_model_prefill", max(0.0, min(first) - min(planned))
        yield "time_in_model_inference", max(0.0, max(last) - min(planned))


class TraceContext:
    """Puts the client's trace context and the request's id where `RequestSpans` finds them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = context.attach(_context_of(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


def _context_of(scope: Scope) -> Context:
    parent = _PROPAGATOR.extract(dict(Headers(scope=scope)), context=Context())
    return context.set_value(_REQUEST_ID, scope["state"]["request_id"], parent)
