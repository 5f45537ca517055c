"""/metrics: what Prometheus reads.

Owns the route, and the count of answers by route and status. Requests are counted in
`request_metrics.py`, the engine in `engine_metrics.py`.
"""

import asyncio
from collections.abc import Iterable
from itertools import chain

from prometheus_client import disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagecoach.api.engine_service import EngineService
from stagecoach.api.operations.engine_metrics import EngineMetrics
from stagecoach.api.operations.request_metrics import RequestMetrics
from stagecoach.api.request_watch import Observers
from stagecoach.engine.messages import EngineStats

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_OTHER = "other"


class Metrics:
    """The route and what it answers from."""

    def __init__(self, service: EngineService, model_name: str, version: str) -> None:
        # When a counter began is what nobody asks; it would double the number of series.
        disable_created_metrics()
        self._service = service
        self._engine = EngineMetrics(service.config, model_name, version)
        self.requests = RequestMetrics(model_name, service.config.max_model_len)
        service.observers.add(self.requests)

    async def show(self, request: Request) -> Response:
        """Counters, gauges and histograms, as Prometheus or OpenMetrics text.

        While the engine loads or is dead, only what this process counts.
        """
        stats = await self._service.known_stats()
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        body = await asyncio.to_thread(encode, _All(self, stats))
        return Response(body, headers={"content-type": media_type})

    def collect(self, stats: EngineStats | None) -> Iterable[Metric]:
        return chain(self.requests.collect(), self._engine.collect(stats))


class _All(Collector):
    def __init__(self, metrics: Metrics, stats: EngineStats | None) -> None:
        self._metrics = metrics
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        return self._metrics.collect(self._stats)


class CountAnswers:
    """Counts every answer under the route's own path, so that no client makes up labels."""

    def __init__(self, app: ASGIApp, *, observers: Observers) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)

    def _count(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", _OTHER)
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        self._observers.tell(lambda observer: observer.answered(route, method, status))
