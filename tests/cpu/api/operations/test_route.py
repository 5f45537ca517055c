"""Routes for operators and tools, and what every request passes before a route."""

from pathlib import Path
from typing import Any

import pytest

from tests.cpu.api.asgi import call, exchange
from tests.cpu.api.conftest import Server
from tests.cpu.api.scripted import scripted_server

TEXT = "/v1/completions"


def test_a_loaded_server_is_well(server: Server) -> None:
    for path in ("/health", "/ready"):
        answer = server.get(path)
        assert (answer.status, answer.json) == (200, {"status": "ok", "reason": None})
    assert server.get("/version").json == {"version": "1.2.3"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/dashboard"])
def test_probes_may_ask_for_the_head_alone(server: Server, path: str) -> None:
    assert server.call("HEAD", path).status == 200
    assert server.call("HEAD", TEXT).status == 405


def test_models_are_listed_by_name(server: Server) -> None:
    body = server.get("/v1/models").json
    assert body["object"] == "list"
    assert [item["id"] for item in body["data"]] == ["small", "other-name"]
    assert {item["max_model_len"] for item in body["data"]} == {512}
    assert server.get("/v1/models/other-name").json == body["data"][1]
    assert server.get("/v1/models/a/b").status == 404


def test_server_info_tells_options_and_counts(server: Server) -> None:
    before = server.get("/server_info").json
    server.post(TEXT, prompt="abc", max_tokens=2, ignore_eos=True)
    after = server.get("/server_info").json
    assert before["engine"]["block_size"] == 8 and before["dtype"] == "float64"
    assert before["partition"] == [4]
    assert after["stats"]["num_generated_tokens"] == before["stats"]["num_generated_tokens"] + 2


def test_tokens_of_a_prompt_and_back(server: Server) -> None:
    text = "Grüße <|end_of_msg|>"
    body = server.post("/tokenize", prompt=text, return_token_strs=True).json
    assert body["count"] == len(body["tokens"]) == len(text.encode())
    assert body["max_model_len"] == 512
    assert body["token_strs"][:2] == ["G", "r"]
    assert server.post("/detokenize", tokens=body["tokens"]).json == {"prompt": text}


def test_clients_that_tokenize_through_the_server_find_its_tokenizer(server: Server) -> None:
    """As lm-eval looks for it."""
    info = server.get("/tokenizer_info").json
    assert info == {
        "eos_token": "<|end_of_msg|>",
        "bos_token": None,
        "pad_token": None,
        "vocab_size": server.service.tokenizer.vocab_size,
        "model_max_length": 512,
        "chat_template": None,
    }
    answer = server.post("/tokenize", prompt="test", add_special_tokens=False)
    assert answer.json["tokens"] == [ord(char) for char in "test"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template_kwargs": {"x": 1}}, None),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(
    server: Server, path: str, fields: dict[str, Any], param: str | None
) -> None:
    answer = server.post(path, **fields)
    assert answer.status == 400
    assert answer.error["param"] == (param or "chat_template_kwargs")


def test_the_document_describes_every_route(server: Server) -> None:
    document = server.get("/openapi.json").json
    schemas = document["components"]["schemas"]
    refs: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            refs.update(text for key, text in value.items() if key == "$ref")
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    collect(document)
    assert len(refs) > 20
    assert {ref.removeprefix("#/components/schemas/") for ref in refs} <= set(schemas)
    assert {"/v1/chat/completions", "/v1/completions", "/health"} <= set(document["paths"])
    for path, methods in document["paths"].items():
        for description in methods.values():
            assert description["description"], path
            assert set(description["responses"]) >= {"200", "default"}
    assert "temperature" in schemas["CompletionRequest"]["properties"]


# Field bugs of the kind G04: request ids are the client's and need not differ.


def test_equal_request_ids_do_not_collide(server: Server) -> None:
    async def both() -> list[Any]:
        bodies = [{"prompt": text, "max_tokens": 30, "ignore_eos": True} for text in ("a", "b")]
        headers = {"x-request-id": "the-same"}
        return [
            await task
            for task in [
                server.runner.get_loop().create_task(call(server.app, "POST", TEXT, body, headers))
                for body in bodies
            ]
        ]

    first, second = server.run(both())
    for answer in (first, second):
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "the-same"
        assert answer.json["usage"]["completion_tokens"] == 30
    assert first.json["id"] != second.json["id"]


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "ü"])
def test_an_id_that_is_none_is_replaced(server: Server, request_id: str) -> None:
    told = server.call("GET", "/version", headers={"x-request-id": request_id}).headers
    assert told["x-request-id"] not in ("", request_id)
    error = server.call("GET", "/nix", headers={"x-request-id": "mine"})
    assert error.headers["x-request-id"] == "mine"


def test_a_large_body_is_refused_before_it_is_read(server: Server) -> None:
    answer = server.call("POST", TEXT, b"{}", {"content-length": "100001"})
    assert answer.status == 413
    assert answer.error["code"] == "body_too_large"
    # A length that is not told, or told wrong, is counted.
    text = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    answer = server.call("POST", TEXT, text, {"content-length": "5"})
    assert answer.status == 413


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_of_another_type_is_415(server: Server, kind: str) -> None:
    answer = server.call("POST", TEXT, b'{"prompt": "a"}', {"content-type": kind})
    assert answer.status == 415
    assert "application/json" in answer.error["message"]
    kind = "Application/JSON; charset=utf-8"
    answer = server.call("POST", TEXT, b'{"prompt": "a", "max_tokens": 1}', {"content-type": kind})
    assert answer.status == 200


def test_a_key_opens_everything_but_health(model_folder: Path) -> None:
    with scripted_server(model_folder, api_keys=("one", "two")) as (server, engine):
        engine.say([97])
        assert server.get("/health").status == server.get("/ready").status == 200
        for headers in (
            {},
            {"authorization": "one"},
            {"authorization": "Bearer on"},
            {"authorization": "Basic one"},
            {"authorization": "Bearer öne"},
        ):
            for path in ("/v1/models", "/server_info", "/docs", "/nix"):
                answer = server.call("GET", path, headers=headers)
                assert answer.status == 401, (path, headers)
                assert answer.error["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two"):
            headers = {"authorization": f"bearer {key}"}
            assert server.call("GET", "/v1/models", headers=headers).status == 200
            answer = server.call("POST", TEXT, {"prompt": "a"}, headers)
            assert answer.status == 200


def test_pages_of_other_origins_may_not_call(model_folder: Path) -> None:
    page = {"origin": "https://page.example"}
    asks = page | {"access-control-request-method": "POST"}
    with scripted_server(model_folder) as (server, _):
        answer = server.call("GET", "/version", headers=page)
        assert "access-control-allow-origin" not in answer.headers
        assert server.call("OPTIONS", TEXT, headers=asks).status == 405
    with scripted_server(
        model_folder, allowed_origins=("https://page.example",), api_keys=("k",)
    ) as (server, _):
        answer = server.call("OPTIONS", TEXT, headers=asks)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        # An error can be read by the page too.
        answer = server.call("GET", "/v1/models", headers=page)
        assert answer.status == 401
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = server.call("GET", "/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_client_that_goes_while_it_sends_is_no_error(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        body = b'{"prompt": '
        async with exchange(server.app, "POST", TEXT, body, is_cut=True) as state:
            state.go()

    server.run(go())
    assert not caplog.records
