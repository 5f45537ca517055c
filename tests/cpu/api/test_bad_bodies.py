"""A corpus of bodies that are wrong: each gets a precise refusal, and the server goes on.

Every field of every body is tried with every kind of value that it does not have. What the
fields are is read from the server's own document, so a new one is tried as well.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.api.asgi import Answer, call
from tests.cpu.api.conftest import Server
from tests.cpu.api.scripted import ScriptedEngine, scripted_server

MESSAGES = [{"role": "user", "content": "hi"}]
# A body that is right, by route.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/completions": {"prompt": "a", "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
DEEP: Any = json.loads("[" * 200 + "]" * 200)
# As JSON says them: some have no other form.
VALUES = {
    "negative": "-1",
    "fraction": "5.5",
    "beyond 64 bits": str(2**70),
    "NaN": "NaN",
    "infinite": "1e999",
    "text": '"x"',
    "lone surrogate": '"\\ud800"',
    "boolean": "true",
    "empty list": "[]",
    "nested list": "[[[1]]]",
    "object": '{"a": {"b": 1}}',
    "deep": json.dumps(DEEP),
    "long": json.dumps("y" * 20_000),
}
# What is no JSON object of ours at all.
TEXTS = (
    b"",
    b" ",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"1",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"a": 1} trailing',
    b"{'a': 1}",
    b'{"a": 1,}',
    b'{"a": "\xff"}',
    b'{"a": NaN}',
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a": ' + b'{"a": ' * 5000 + b"1" + b"}" * 5001,
    b'{"a": ' + b"9" * 100_000 + b"}",
)


@pytest.fixture(scope="module")
def scripted(model_folder: Path) -> Iterator[tuple[Server, ScriptedEngine]]:
    """Whatever is asked is answered at once."""
    with scripted_server(model_folder, max_body_bytes=2**21) as (server, engine):
        engine.say([104, 105])
        yield server, engine


def fields_of(server: Server, path: str) -> list[str]:
    document: Any = server.call("GET", "/openapi.json").json
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    return list(document["components"]["schemas"][name]["properties"])


def with_field(body: dict[str, Any], field: str, value: str) -> bytes:
    """`body` as JSON, with this field as it is written."""
    rest = {key: item for key, item in body.items() if key != field}
    written = f"{json.dumps(field)}: {value}"
    return (json.dumps(rest)[:-1] + (", " if rest else "") + written + "}").encode()


def refusal(answer: Answer) -> str:
    """The message of an error of either protocol, which names the field."""
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    message: str = error["message"]
    assert message and "\n" not in message and len(message) < 2000, message
    for secret in ("Traceback", ".py", "stagecoach.", "pydantic"):
        assert secret not in message
    return f"{error.get('param')}: {message}"


@pytest.mark.parametrize("path", BODIES)
def test_every_field_with_every_kind_of_value(
    scripted: tuple[Server, ScriptedEngine], path: str
) -> None:
    server, _ = scripted
    fields = fields_of(server, path)

    async def try_all() -> list[str]:
        found = []
        for field in fields:
            for name, value in VALUES.items():
                data = with_field(BODIES[path], field, value)
                answer = await call(server.app, "POST", path, data, JSON)
                if answer.status == 200:
                    continue
                if not 400 <= answer.status < 500:
                    found.append(f"{field} {name}: {answer.status} {answer.body[:200]!r}")
                elif answer.status == 400 and field not in refusal(answer) and name not in NO_JSON:
                    found.append(f"{field} {name}: not named: {refusal(answer)}")
        return found

    assert not server.run(try_all())


JSON = {"content-type": "application/json"}
# The reader of JSON refuses them before there are fields.
NO_JSON = ("NaN", "lone surrogate", "infinite", "deep")


@pytest.mark.parametrize("path", BODIES)
def test_what_is_no_json_object_is_refused(
    scripted: tuple[Server, ScriptedEngine], path: str
) -> None:
    server, engine = scripted
    num_before = len(engine.submitted)
    for text in TEXTS:
        answer = server.call("POST", path, text, JSON)
        assert answer.status == 400, (text[:40], answer.body)
        refusal(answer)
    assert len(engine.submitted) == num_before


@pytest.mark.parametrize("path", BODIES)
def test_a_million_letters_are_told_of_in_a_line(
    scripted: tuple[Server, ScriptedEngine], path: str
) -> None:
    server, _ = scripted
    for field in (next(iter(BODIES[path])), "model", "seed", "stop", "tool_choice"):
        data = with_field(BODIES[path], field, json.dumps("y" * 1_000_000))
        answer = server.call("POST", path, data, JSON)
        assert answer.status in (200, 400, 404), answer.body[:200]
        if answer.status != 200:
            assert field in refusal(answer)


@pytest.mark.parametrize("path", BODIES)
def test_other_kinds_of_content_are_refused(
    scripted: tuple[Server, ScriptedEngine], path: str
) -> None:
    server, _ = scripted
    body = json.dumps(BODIES[path]).encode()
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/xml", "", "\x00"):
        answer = server.call("POST", path, body, {"content-type": kind})
        assert answer.status == 415, answer.body
        refusal(answer)


@pytest.mark.parametrize("path", BODIES)
def test_of_a_field_that_comes_twice_the_last_counts(
    scripted: tuple[Server, ScriptedEngine], path: str
) -> None:
    """As JSON is read everywhere; so neither a wrong one before it is heard."""
    server, _ = scripted
    field = next(iter(BODIES[path]))
    right = json.dumps(BODIES[path])
    wrong = f'"{field}": 5.5'
    twice = ("{" + wrong + ", " + right[1:]).encode()
    assert server.call("POST", path, twice, JSON).status == 200
    reverse = (right[:-1] + ", " + wrong + "}").encode()
    assert server.call("POST", path, reverse, JSON).status == 400
