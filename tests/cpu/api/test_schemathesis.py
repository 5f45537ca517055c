"""The server against its own document: what schemathesis makes of every route in it.

`--schemathesis-examples N` tries N requests a route and kind instead of a few.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.cpu.api.asgi import Answer, call
from tests.cpu.api.conftest import MODEL, Server
from tests.cpu.api.scripted import scripted_server

NUM_EXAMPLES = 4
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def scripted(model_folder: Path) -> Iterator[Server]:
    """Whatever is asked is answered at once."""
    with scripted_server(model_folder) as (server, engine):
        engine.say([104, 105])
        yield server


@pytest.fixture(scope="module")
def schema(scripted: Server) -> Any:
    return schemathesis.openapi.from_dict(scripted.get("/openapi.json").json)


def send(server: Server, case: Case) -> httpx2.Response:
    """The answer to a request as schemathesis made it, over no network."""
    kwargs = case.as_transport_kwargs(base_url="http://test")
    request = httpx2.Request(
        kwargs["method"],
        kwargs["url"],
        params=urlencode(kwargs.get("params") or {}, doseq=True) or None,
        headers={key: str(value) for key, value in (kwargs.get("headers") or {}).items()},
        json=kwargs.get("json"),
        content=kwargs.get("data"),
    )
    answer: Answer = server.run(
        call(
            server.app,
            request.method,
            request.url.raw_path.decode(),
            request.content,
            {key: value for key, value in request.headers.items() if key != "host"},
        )
    )
    response = httpx2.Response(
        answer.status, headers=answer.headers, content=answer.body, request=request
    )
    response.elapsed = timedelta()
    return response


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_route_is_as_its_document_says(
    scripted: Server, schema: Any, mode: GenerationMode, request: pytest.FixtureRequest
) -> None:
    """No failure of the server, no status and no form that is not in the document."""
    given = request.config.getoption("--schemathesis-examples")
    num_tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            # There is no wrong way to ask for what takes nothing.
            continue

        @hypothesis.settings(
            max_examples=given or NUM_EXAMPLES,
            derandomize=given is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def try_one(case: Case) -> None:
            nonlocal num_tried
            num_tried += 1
            case.validate_response(send(scripted, case), checks=CHECKS)

        try_one()
    assert num_tried > 10


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": MODEL, "messages": MESSAGES, "max_tokens": 9}),
    ],
)
def test_every_event_of_a_stream_is_as_its_document_says(
    scripted: Server, schema: Any, path: str, body: dict[str, Any]
) -> None:
    case = schema[path]["POST"].Case(body=body | {"stream": True}, media_type="application/json")
    response = send(scripted, case)
    assert response.headers["content-type"].startswith("text/event-stream")
    case.validate_response(response, checks=CHECKS)
    spoilt = httpx2.Response(
        200,
        headers=response.headers,
        content=response.content.replace(b'"model":', b'"modle":').replace(b'"type":', b'"tpye":'),
        request=response.request,
    )
    spoilt.elapsed = timedelta()
    with pytest.raises(FailureGroup):
        case.validate_response(spoilt, checks=CHECKS)
