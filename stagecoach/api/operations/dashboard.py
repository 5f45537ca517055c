"""The dashboard: one static page, and what it shows.

Owns what was last known of the plans, so that the engine is asked only for what is new, however
many look on, and a page that is opened after its end still shows its last moments. The page's
files are in `dashboard_page/`; it is made of them once and holds no data.
"""

import asyncio
import base64
import contextlib
import hashlib
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stagecoach.api.answers import ServedModels, json_response
from stagecoach.api.engine_service import EngineService
from stagecoach.api.error_body import NotServingError
from stagecoach.api.operations.objects import stats_fields
from stagecoach.engine.messages import MAX_PLANS, PlanTrace, RequestTrace, Timeline
from stagecoach.errors import EngineDeadError, RequestError

_FOLDER = Path(__file__).parent / "dashboard_page"
_SCRIPTS = ("format.js", "state.js", "pipeline.js", "charts.js", "tables.js", "page.js")


class DashboardTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The latest plans, and the requests and slots as the engine had them at `now`.

    Seconds are those of the machine's monotonic clock. Plans, spans and requests are arrays of
    their fields in order.
    """

    now: float
    next_step: int  # behind the newest plan
    plans: list[PlanTrace]  # from the step on that was asked for; oldest first
    requests: tuple[RequestTrace, ...]
    slot_states: bytes  # in base64: 0 free, 1 a request's, 2 a checkpoint's, from slot 1 on


class DashboardData(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows; `status` and `reason` are those of /health."""

    status: str
    reason: str | None
    version: str
    models: list[str]
    engine: dict[str, Any]
    num_open_requests: int
    stats: dict[str, Any] | None  # as in /server_info; null unless the engine answers
    timeline: DashboardTimeline | None  # the last that is known


class Dashboard:
    """The page's routes."""

    def __init__(self, service: EngineService, models: ServedModels, version: str) -> None:
        self._service = service
        self._models = models
        self._version = version
        self._history = _History()
        self._question: asyncio.Task[None] | None = None
        self._page, self._policy = _compose()

    async def page(self, request: Request) -> Response:
        """The dashboard, for a browser."""
        headers = {
            "content-security-policy": self._policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        return Response(self._page, headers=headers, media_type="text/html")

    async def data(self, request: Request) -> Response:
        """The state of the server and of its engine, with the plans from `first_step` on.

        At most as many plans and requests as the engine's own timeline holds.
        """
        first_step = _first_step(request.query_params.get("first_step", "0"))
        service, config = self._service, self._service.config
        condition, stats, _ = await asyncio.gather(
            service.health(), service.known_stats(), self._learn_timeline()
        )
        return json_response(
            DashboardData(
                status=condition.status,
                reason=condition.reason,
                version=self._version,
                models=list(self._models.names),
                engine={
                    "pipeline_parallel_size": config.engine.pipeline_parallel_size,
                    "tensor_parallel_size": config.engine.tensor_parallel_size,
                    "partition": config.partition,
                    "dtype": config.dtype,
                    "device": config.engine.device,
                    "max_model_len": config.max_model_len,
                    "max_num_seqs": config.engine.max_num_seqs,
                    "block_size": config.engine.block_size,
                    "num_draft_tokens": config.num_draft_tokens,
                },
                num_open_requests=service.num_open_requests,
                stats=stats_fields(stats),
                timeline=self._history.since(first_step),
            )
        )

    async def _learn_timeline(self) -> None:
        """Those who ask at the same time share one question."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask_timeline())
        await asyncio.shield(self._question)

    async def _ask_timeline(self) -> None:
        with contextlib.suppress(NotServingError, EngineDeadError):
            self._history.merge(await self._service.timeline(self._history.first_open_step))


class _History:
    """The latest plans that the engine told of, as many as it keeps itself."""

    def __init__(self) -> None:
        self._plans: dict[int, PlanTrace] = {}
        self._latest: Timeline | None = None

    @property
    def first_open_step(self) -> int:
        """From where on there may be news."""
        for step, plan in self._plans.items():
            if plan.committed is None or None in plan.spans:
                return step
        return next(reversed(self._plans), -1) + 1

    def merge(self, timeline: Timeline) -> None:
        self._latest = timeline
        for plan in timeline.plans:
            self._plans[plan.step] = plan
        for step in list(self._plans)[:-MAX_PLANS]:
            del self._plans[step]

    def since(self, first_step: int) -> DashboardTimeline | None:
        latest = self._latest
        if latest is None:
            return None
        return DashboardTimeline(
            now=latest.now,
            next_step=next(reversed(self._plans), -1) + 1,
            plans=[plan for step, plan in self._plans.items() if step >= first_step],
            requests=latest.requests,
            slot_states=latest.slot_states,
        )


def _first_step(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise RequestError("first_step", f"must be the number of a step, not {text[:40]!r}")
    return int(text)


def _compose() -> tuple[bytes, str]:
    """The page with its style and script in it, and the policy that lets nothing else run."""
    style = (_FOLDER / "style.css").read_text()
    script = "".join((_FOLDER / name).read_text() for name in _SCRIPTS)
    page = (_FOLDER / "page.html").read_text()
    page = page.replace("/* style */", style).replace("/* script */", script)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; "
        f"style-src {_source(style)}; script-src {_source(script)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


def _source(text: str) -> str:
    """How a Content-Security-Policy names inline text."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
