"""Who goes, who dies and who waits: nothing is left of a request that ended, however it ended.

Field bugs of section G: aborts in every state, engines that die or freeze, health that lies.
"""

import asyncio
import json
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stagecoach.api.chat_api.answer import ChatAnswer
from stagecoach.errors import CapacityError, EngineDeadError, WorkerDiedError
from stagecoach.request import FinishReason
from tests.cpu.api.asgi import Exchange, call, events_of, exchange
from tests.cpu.api.conftest import Server
from tests.cpu.api.scripted import ScriptedEngine, scripted_server
from tests.small_engine import ONLY_LETTERS

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "prompt": "a long one",
    "max_tokens": 400,
    "ignore_eos": True,
    "logit_bias": {str(token_id): bias for token_id, bias in ONLY_LETTERS.items()},
}
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SHAPES = [
    {"prompt": "a"},
    {"prompt": "a", "n": 3},
    {"prompt": ["a", "b", "c"]},
    {"prompt": ["a", "b"], "n": 2},
]


def encoded(**body: Any) -> bytes:
    return json.dumps(body).encode()


async def until(condition: Any) -> None:
    """Wait for something that another thread or task brings about."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


# Those who go: field bugs of the kinds G01, G02, G03.


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_that_goes_before_the_first_token_aborts_all(
    model_folder: Path, shape: dict[str, Any], is_streamed: bool
) -> None:
    """The engine has the request and has not begun it: n > 1 and batches too."""
    with scripted_server(model_folder) as (server, engine):

        async def go() -> None:
            body = encoded(**shape, stream=is_streamed)
            async with exchange(server.app, "POST", TEXT, body):
                await until(lambda: engine.open)

        server.run(go())
        assert not engine.open
        assert server.service.counts.num_completions == 0
        assert set(engine.aborted) >= set(range(1, len(engine.submitted) + 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_that_goes_in_the_middle_aborts_all(server: Server, shape: dict[str, Any]) -> None:
    """The `server` fixture proves that nothing keeps running."""

    async def go() -> None:
        body = encoded(**(LONG | shape), stream=True)
        async with exchange(server.app, "POST", TEXT, body) as state:
            assert await state.next_body()
            assert server.service.num_open_requests == 1

    server.run(go())


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_stream_whose_client_goes_ends_although_no_token_comes(
    model_folder: Path, is_slow: bool
) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go() -> None:
            body = encoded(prompt="a", stream=True)
            async with exchange(server.app, "POST", TEXT, body, is_slow=is_slow) as state:
                await until(lambda: engine.open)
                [request_id] = engine.open
                engine.tell(request_id, token_ids=(97,))
                if not is_slow:
                    assert await state.next_body()
                await until(lambda: state.messages.qsize() == (2 if is_slow else 0))
            assert engine.aborted == [request_id]

        server.run(go())


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_client_that_goes_while_it_waits_for_the_whole_aborts(server: Server, path: str) -> None:
    async def go() -> None:
        body = encoded(**(HI if path == CHAT else {}), **(LONG if path == TEXT else {}))
        async with exchange(server.app, "POST", path, body):
            await until(lambda: server.service.num_open_requests)

    server.run(go())


def test_clients_that_go_while_queued_or_in_a_prefill_abort(server: Server) -> None:
    """More than run at once, with prompts of several chunks."""

    async def go(number: int) -> None:
        body = encoded(**LONG | {"prompt": f"{number}" * 300, "max_tokens": 100}, stream=True)
        async with exchange(server.app, "POST", TEXT, body):
            await until(lambda: server.service.num_open_requests)
            await asyncio.sleep(0.002 * number)

    async def all_of_them() -> None:
        await asyncio.gather(*(go(number) for number in range(12)))

    server.run(all_of_them())


def test_one_that_goes_takes_nobody_along(server: Server) -> None:
    fields = LONG | {"max_tokens": 60, "seed": 7}
    expected = server.post(TEXT, **fields).json["choices"][0]["text"]

    async def go() -> Any:
        async with exchange(server.app, "POST", TEXT, encoded(**LONG, stream=True)) as state:
            stays = asyncio.create_task(call(server.app, "POST", TEXT, fields))
            assert await state.next_body()
        return await stays

    assert server.run(go()).json["choices"][0]["text"] == expected


@pytest.mark.parametrize("seed", [1, 2])
def test_random_goers_and_slow_readers_leave_nothing(server: Server, seed: int) -> None:
    """Who stays gets one whole answer; the `server` fixture proves that nothing is left."""
    random = Random(seed)

    async def one() -> bool:
        is_chat = random.random() < 0.5
        fields = dict(random.choice(SHAPES)) if not is_chat else HI | {"n": random.choice([1, 2])}
        fields |= {"max_tokens": random.randint(1, 25), "ignore_eos": True, "stream": True}
        num_pieces = random.choice([0, 1, 3, None, None])
        path = CHAT if is_chat else TEXT
        received: list[bytes] = []
        async with exchange(
            server.app, "POST", path, encoded(**fields), is_slow=random.random() < 0.5
        ) as state:
            await asyncio.sleep(0.002 * random.randint(0, 10))
            while num_pieces is None or len(received) < num_pieces:
                piece = await state.next_body()
                if piece is None:
                    break
                received.append(piece)
        if num_pieces is not None:
            return False
        if state.status == 429:
            return True
        events = events_of(b"".join(received))
        assert state.status == 200 and events.count("[DONE]") == 1 and events[-1] == "[DONE]"
        reasons = [
            choice["finish_reason"]
            for event in events[:-1]
            for choice in event["choices"]
            if choice["finish_reason"] is not None
        ]
        prompts = fields.get("prompt")
        num_prompts = len(prompts) if isinstance(prompts, list) else 1
        assert reasons == ["length"] * (num_prompts * fields.get("n", 1))
        return True

    async def everybody() -> list[bool]:
        places = asyncio.Semaphore(12)

        async def in_turn() -> bool:
            async with places:
                return await one()

        return await asyncio.gather(*(in_turn() for _ in range(120)))

    assert sum(server.run(everybody())) > 30


# Those who read slowly.


def test_a_slow_reader_finds_more_at_once_and_all_of_it(model_folder: Path) -> None:
    """However long it does not read, one piece waits for it; nothing queues."""
    with scripted_server(model_folder) as (server, engine):

        async def go() -> list[bytes]:
            body = encoded(prompt="a", max_tokens=500, stream=True)
            async with exchange(server.app, "POST", TEXT, body, is_slow=True) as state:
                await until(lambda: engine.open)
                [request_id] = engine.open
                engine.tell(request_id, token_ids=(97,))
                await until(lambda: not state.messages.empty())
                for _ in range(300):
                    engine.tell(request_id, token_ids=(98,))
                engine.tell(request_id, finish_reason=FinishReason.LENGTH)
                await asyncio.sleep(0.05)
                # The start of the response, and the first piece.
                assert state.messages.qsize() == 2
                return [piece async for piece in pieces_of(state)]

        pieces = server.run(go())
        events = events_of(b"".join(pieces))
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "a" + "b" * 300
        assert len(events) == 3 and events[-1] == "[DONE]"


def test_a_stop_string_ends_a_request_whose_reader_sleeps(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go() -> list[Any]:
            body = encoded(prompt="a", stop="bcd", stream=True)
            async with exchange(server.app, "POST", TEXT, body, is_slow=True) as state:
                await until(lambda: engine.open)
                [request_id] = engine.open
                engine.tell(request_id, token_ids=(97,))
                await until(lambda: not state.messages.empty())
                engine.tell(request_id, token_ids=(98, 99, 100, 101))
                await until(lambda: engine.aborted == [request_id])
                return events_of(b"".join([piece async for piece in pieces_of(state)]))

        events = server.run(go())
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "a"
        assert events[-2]["choices"][0]["stop_reason"] == "bcd"


async def pieces_of(state: Exchange) -> Any:
    while (piece := await state.next_body()) is not None:
        yield piece


# Engines that die or end a request: field bugs of the kinds G05, G06.


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_death_ends_open_streams_with_an_error_and_no_done(model_folder: Path, path: str) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go() -> list[Any]:
            fields = HI if path == CHAT else {"prompt": "a"}
            body = encoded(**fields, stream=True)
            async with exchange(server.app, "POST", path, body) as state:
                await until(lambda: engine.open)
                engine.tell(next(iter(engine.open)), token_ids=(97,))
                first = await state.next_body()
                assert first
                engine.die(WorkerDiedError("worker[0,0] was killed by SIGKILL"))
                return events_of(first + b"".join([piece async for piece in pieces_of(state)]))

        events = server.run(go())
        assert events[0]["choices"]
        assert set(events[-1]) == {"error"}
        assert "worker[0,0] was killed" in events[-1]["error"]["message"]
        for after in (server.post(TEXT, prompt="a"), server.post(CHAT, **HI)):
            assert after.status == 503
            assert after.error["code"] == "engine_dead"
        for route in ("/health", "/ready"):
            answer = server.get(route)
            assert answer.status == 503
            assert answer.json["status"] == "dead" and "SIGKILL" in answer.json["reason"]


def test_a_death_before_the_first_token_is_a_status(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go(*, is_streamed: bool) -> Any:
            task = asyncio.create_task(
                call(server.app, "POST", TEXT, {"prompt": "a", "stream": is_streamed})
            )
            await until(lambda: engine.open)
            engine.die(EngineDeadError("gone"))
            answer = await task
            engine.failure = None
            return answer

        for is_streamed in (False, True):
            answer = server.run(go(is_streamed=is_streamed))
            assert (answer.status, answer.error["code"]) == (503, "engine_dead")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("NonFiniteError: NaN in what was computed for tokens [0, 3)", "non_finite"),
        ("LethalRequestError: workers died each time: worker[0,0] failed", "lethal_request"),
    ],
)
def test_a_fault_of_one_request_ends_it_only(model_folder: Path, reason: str, code: str) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go(*, is_streamed: bool, has_begun: bool) -> Any:
            body = {"prompt": "a", "n": 2, "stream": is_streamed}
            task = asyncio.create_task(call(server.app, "POST", TEXT, body))
            await until(lambda: engine.open)
            first = next(iter(engine.open))
            if has_begun:
                engine.tell(first, token_ids=(97,))
                await until(lambda: len(engine.open) == 2)
                await asyncio.sleep(0.05)
            engine.tell(first, finish_reason=FinishReason.ERROR, error=reason)
            return await task

        for is_streamed, has_begun in ((False, False), (False, True), (True, False)):
            answer = server.run(go(is_streamed=is_streamed, has_begun=has_begun))
            assert answer.status == 500
            assert answer.error["code"] == code and reason in answer.error["message"]
        events = server.run(go(is_streamed=True, has_begun=True)).events
        assert events[-1]["error"]["code"] == code
        assert not engine.open
        assert server.get("/health").status == 200


def test_a_mistake_about_one_request_ends_no_other(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """News of both arrive together, those of the broken one first."""

    def broken(*_: Any) -> str:
        raise ZeroDivisionError("a bug")

    with scripted_server(model_folder) as (server, engine):

        async def go() -> Any:
            chat = asyncio.create_task(call(server.app, "POST", CHAT, HI | {"stream": True}))
            await until(lambda: engine.open)
            [of_chat] = engine.open
            engine.tell(of_chat, token_ids=(97,))
            await asyncio.sleep(0.05)
            text = asyncio.create_task(call(server.app, "POST", TEXT, {"prompt": "a"}))
            await until(lambda: len(engine.open) == 2)
            [of_text] = engine.open.keys() - {of_chat}
            monkeypatch.setattr(ChatAnswer, "push", broken)
            engine.tell(of_chat, token_ids=(98,))
            engine.tell(of_text, token_ids=(98,), finish_reason=FinishReason.STOP)
            return await chat, await text

        chat, text = server.run(go())
        assert chat.events[-1]["error"]["code"] == "internal_error"
        assert text.json["choices"][0]["text"] == "b"
        assert "a bug" in caplog.text and b"a bug" not in chat.body


def test_an_engine_that_recovers_lives_and_takes_requests(model_folder: Path) -> None:
    with scripted_server(model_folder, stall_timeout_seconds=0.05) as (server, engine):

        async def go() -> Any:
            task = asyncio.create_task(call(server.app, "POST", TEXT, {"prompt": "a"}))
            await until(lambda: engine.open)
            engine.tell(next(iter(engine.open)), token_ids=(98,), finish_reason=FinishReason.STOP)
            return await task

        engine.recovering_from = "worker[0,1] was killed by SIGKILL"
        for path, status in (("/health", 200), ("/ready", 503)):
            answer = server.get(path)
            assert answer.status == status
            assert answer.json == {"status": "recovering", "reason": engine.recovering_from}
        assert server.run(go()).json["choices"][0]["text"] == "b"
        engine.recovering_from = None
        assert server.get("/ready").json["status"] == "ok"
        engine.recovering_from, engine.failure = "worker[0,1]", EngineDeadError("gone")
        assert server.get("/health").json["status"] == "dead"
        engine.failure = None


def test_the_time_of_a_recovery_is_no_stall(model_folder: Path) -> None:
    """Neither while it drains nor between its end and the first step."""
    with scripted_server(model_folder, stall_timeout_seconds=0.05) as (server, engine):

        async def health() -> tuple[int, str]:
            answer = await call(server.app, "GET", "/health")
            return answer.status, answer.json["status"]

        async def go() -> None:
            async with exchange(server.app, "POST", TEXT, encoded(prompt="a", stream=True)):
                await until(lambda: engine.open)
                assert await health() == (200, "ok")
                engine.recovering_from = "worker[0,1] was killed by SIGKILL"
                await asyncio.sleep(0.1)
                assert await health() == (200, "recovering")
                engine.recovering_from, engine.recovery_seconds = None, 0.1
                assert await health() == (200, "ok")
                engine.recovering_from = "worker[0,0] was killed by SIGKILL"
                server.service.drain(60.0)
                await asyncio.sleep(0.1)
                assert await health() == (200, "draining")
                engine.recovering_from, engine.recovery_seconds = None, 0.2
                assert await health() == (200, "draining")
                await asyncio.sleep(0.1)
                assert await health() == (503, "stalled")

        server.run(go())


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_frozen_engine_is_not_well(model_folder: Path, path: str) -> None:
    """Nothing is dead: the loop answers, or does not, and no step ever comes."""
    with scripted_server(model_folder, stall_timeout_seconds=0.05) as (server, engine):

        async def go() -> None:
            async with exchange(server.app, "POST", TEXT, encoded(prompt="a", stream=True)):
                await until(lambda: engine.open)
                assert (await call(server.app, "GET", path)).status == 200
                await asyncio.sleep(0.1)
                answer = await call(server.app, "GET", path)
                assert answer.status == 503 and answer.json["status"] == "stalled"
                assert "1 requests" in answer.json["reason"]
                engine.num_steps += 1
                assert (await call(server.app, "GET", path)).status == 200

        server.run(go())
        # Without work, no step is no stall.
        assert server.get(path).status == server.get(path).status == 200
        engine.stats_error = EngineDeadError("the engine loop did not answer in 5 s")
        answer = server.get(path)
        assert answer.status == 503 and "did not answer" in answer.json["reason"]


def test_those_who_ask_for_health_together_share_a_question(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):
        asked: list[float] = []
        ask = engine.stats

        def counted(timeout_seconds: float) -> Any:
            asked.append(timeout_seconds)
            return ask(timeout_seconds)

        engine.stats = counted  # type: ignore[method-assign]

        async def go() -> list[Any]:
            return await asyncio.gather(*(call(server.app, "GET", "/health") for _ in range(50)))

        assert {answer.status for answer in server.run(go())} == {200}
        assert len(asked) == 1


# Queues.


def test_a_full_queue_is_429_and_opens_again(model_folder: Path) -> None:
    with scripted_server(model_folder, max_queue_requests=1) as (server, engine):

        async def go() -> None:
            async with exchange(server.app, "POST", TEXT, encoded(prompt="a", n=2)):
                await until(lambda: server.service.counts.num_completions == 2)
                full = await call(server.app, "POST", TEXT, {"prompt": ["a", "b"]})
                assert full.status == 429
                assert full.error["type"] == "rate_limit_error"
                assert int(full.headers["retry-after"]) >= 1
                assert "--max-queue-requests" in full.error["message"]
                async with exchange(server.app, "POST", TEXT, encoded(prompt="a")):
                    await until(lambda: server.service.counts.num_completions == 3)
            engine.say([97])
            assert (await call(server.app, "POST", TEXT, {"prompt": "a", "n": 3})).status == 200

        server.run(go())


# Loading and ending.


def test_while_it_loads_the_server_says_so(model_folder: Path) -> None:
    def hold(engine: ScriptedEngine) -> None:
        engine.may_be_ready.clear()

    with scripted_server(model_folder, is_loaded=False, start=hold) as (server, engine):

        async def go() -> None:
            loading = asyncio.create_task(server.service.load())
            await until(lambda: server.service.client is not None)
            for path in ("/health", "/ready"):
                answer = await call(server.app, "GET", path)
                assert (answer.status, answer.json["status"]) == (503, "loading")
                assert "retry-after" in answer.headers
            for path, body in ((TEXT, {"prompt": "a"}), (CHAT, HI)):
                answer = await call(server.app, "POST", path, body)
                assert (answer.status, answer.error["code"]) == (503, "loading")
            assert (await call(server.app, "GET", "/v1/models")).status == 200
            assert (await call(server.app, "GET", "/server_info")).json["stats"] is None
            engine.may_be_ready.set()
            await loading
            assert (await call(server.app, "GET", "/health")).status == 200

        server.run(go())


def test_an_engine_that_does_not_load_is_told(model_folder: Path) -> None:
    def fail(_: ScriptedEngine) -> None:
        raise CapacityError("needs 5 bytes and has 4")

    with scripted_server(model_folder, is_loaded=False, start=fail) as (server, _):
        with pytest.raises(CapacityError):
            server.run(server.service.load())
        assert isinstance(server.service.failure, CapacityError)
        answer = server.post(TEXT, prompt="a")
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")
        assert "5 bytes" in answer.error["message"]
        assert server.get("/health").json["status"] == "dead"


def test_an_engine_that_still_starts_can_be_closed(model_folder: Path) -> None:
    """The server may end before there is anything to close."""
    may_start = threading.Event()

    def hold(engine: ScriptedEngine) -> None:
        engine.may_be_ready.clear()
        may_start.wait(20)

    with scripted_server(model_folder, is_loaded=False, start=hold) as (server, engine):

        async def go() -> None:
            loading = asyncio.create_task(server.service.load())
            await asyncio.sleep(0.05)
            server.service.close()
            assert engine.is_closed_in_order is None
            may_start.set()
            with pytest.raises(EngineDeadError):
                await loading

        server.run(go())
        assert engine.is_closed_in_order


def test_a_server_that_drains_finishes_what_is_open(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go() -> None:
            task = asyncio.create_task(call(server.app, "POST", TEXT, {"prompt": "a"}))
            await until(lambda: engine.open)
            server.service.drain(30.0)
            refused = await call(server.app, "POST", TEXT, {"prompt": "b"})
            assert (refused.status, refused.error["code"]) == (503, "shutting_down")
            assert (await call(server.app, "GET", "/ready")).status == 503
            # It must not be killed for it.
            assert (await call(server.app, "GET", "/health")).status == 200
            [request_id] = engine.open
            engine.tell(request_id, token_ids=(97,), finish_reason=FinishReason.STOP)
            assert (await task).json["choices"][0]["text"] == "a"

        server.run(go())


def test_after_the_deadline_open_streams_end_with_an_error(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go() -> Any:
            body = {"prompt": "a", "stream": True}
            task = asyncio.create_task(call(server.app, "POST", TEXT, body))
            await until(lambda: engine.open)
            engine.tell(next(iter(engine.open)), token_ids=(97,))
            await asyncio.sleep(0.05)
            server.service.drain(0.05)
            return await task

        events = server.run(go()).events
        assert events[0]["choices"][0]["text"] == "a"
        assert events[-1]["error"]["code"] == "shutting_down"


def test_news_after_the_end_of_the_loop_harm_nobody(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):

        async def go() -> Any:
            async with exchange(server.app, "POST", TEXT, encoded(prompt="a")):
                await until(lambda: engine.open)
                return next(iter(engine.open.values()))

        sink = server.run(go())
        server.runner.close()
        thread = threading.Thread(target=sink, args=(EngineDeadError("late"),))
        thread.start()
        thread.join()
