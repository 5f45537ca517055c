"""An OpenTelemetry collector on loopback that keeps what it gets."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Sink:
    """Spans by the order of arrival.

    Attributes:
        url: the endpoint.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.services: set[str] = set()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services.add(attributes_of(resource.resource)["service.name"])
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)


def attributes_of(span: Any) -> dict[str, Any]:
    """Of a span or a resource, as plain values."""
    return {item.key: _plain(item.value) for item in span.attributes}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind or "string_value")


@contextmanager
def otlp_sink() -> Iterator[Sink]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_packed = self.headers.get("content-encoding") == "gzip"
            if self.path == "/v1/traces":
                sink.take(gzip.decompress(body) if is_packed else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sink = Sink(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield sink
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
