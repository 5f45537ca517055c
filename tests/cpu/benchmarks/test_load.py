"""Times that a run measures, in virtual time, against a server whose delays are known."""

from typing import Any

import httpx
import pytest

from stagecoach.benchmarks.data_sets import BenchRequest, Conversation
from stagecoach.benchmarks.load import ENDPOINTS, Backend, LoadGenerator, LoadResult, Target
from tests.cpu.benchmarks import virtual_time
from tests.cpu.benchmarks.fake_server import FakeServer, FakeTransport


def _conversations(number: int, *, num_output: int = 4, turns: int = 1) -> list[Conversation]:
    request = BenchRequest(prompt="a b c", num_prompt_tokens=3, num_output_tokens=num_output)
    return [(request,) * turns] * number


def _run(
    server: FakeServer,
    conversations: list[Conversation],
    arrivals: list[float] | None = None,
    *,
    backend: Backend = "openai",
    transport: httpx.AsyncBaseTransport | None = None,
    target: dict[str, Any] | None = None,
    **options: Any,
) -> LoadResult:
    where = Target(
        base_url="http://fake",
        endpoint=ENDPOINTS[backend],
        backend=backend,
        model="fake",
        **target or {},
    )

    async def main(clock: Any) -> LoadResult:
        door = transport or FakeTransport(server)
        async with LoadGenerator(where, clock=clock, transport=door, **options) as generator:
            return await generator.run(conversations, arrivals or [0.0] * len(conversations))

    return virtual_time.run(main)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_each_time_is_what_the_server_took(backend: Backend) -> None:
    server = FakeServer(prefill_seconds=2.0, step_seconds=0.5)
    [record], duration = _run(server, _conversations(1), backend=backend)
    assert record.ttft == pytest.approx(2.0)
    assert record.tpot == pytest.approx(0.5)
    assert record.itl == pytest.approx([0.5] * 3)
    assert record.e2el == pytest.approx(3.5) == duration
    assert record.finished.num_tokens == 4
    assert record.finished.content == "t0 t1 t2 t3 "


@pytest.mark.parametrize("told", ["usage", "token_ids"])
def test_tokens_that_come_together_share_their_gap(told: str) -> None:
    server = FakeServer(
        prefill_seconds=1.0,
        step_seconds=0.6,
        tokens_per_step=3,
        usage="continuous" if told == "usage" else "final",
        tells_token_ids=told == "token_ids",
    )
    [record], _ = _run(server, _conversations(1, num_output=6))
    assert record.finished.token_source == told
    assert [arrival.num_tokens for arrival in record.finished.arrivals] == [1, 3, 2]
    assert record.itl == pytest.approx([0.2] * 3 + [0.3] * 2)
    assert record.icl == pytest.approx([0.6, 0.6])
    assert record.tpot == pytest.approx(1.2 / 5)


def test_without_counts_each_event_is_one_gap_and_usage_says_the_total() -> None:
    server = FakeServer(step_seconds=0.6, tokens_per_step=3, usage="final")
    [record], _ = _run(server, _conversations(1, num_output=7))
    assert record.finished.token_source == "events"
    assert record.finished.num_tokens == 7
    assert record.itl == pytest.approx([0.6, 0.6])
    assert record.tpot == pytest.approx(1.2 / 6)


def test_without_any_usage_events_are_counted() -> None:
    server = FakeServer(step_seconds=0.5, usage="none")
    [record], _ = _run(server, _conversations(1, num_output=5))
    assert record.finished.num_tokens == 5
    assert record.num_prompt_tokens == 3


def test_the_first_token_is_not_the_role() -> None:
    server = FakeServer(prefill_seconds=9.0, usage="none")
    [record], _ = _run(server, _conversations(1), backend="openai-chat")
    assert record.ttft == pytest.approx(9.0)


def test_requests_start_when_they_are_due_although_others_run() -> None:
    server = FakeServer(prefill_seconds=10.0)
    records, duration = _run(server, _conversations(3), [0.0, 1.5, 4.0])
    assert [record.start_seconds for record in records] == pytest.approx([0.0, 1.5, 4.0])
    assert [record.queued_seconds for record in records] == [0.0] * 3
    assert duration == pytest.approx(14.0)


def test_no_more_than_max_concurrency_run_and_the_wait_is_not_latency() -> None:
    server = FakeServer(prefill_seconds=1.0)
    records, duration = _run(server, _conversations(5), max_concurrency=2)
    assert [record.queued_seconds for record in records] == pytest.approx([0, 0, 1, 1, 2])
    assert [record.e2el for record in records] == pytest.approx([1.0] * 5)
    assert duration == pytest.approx(3.0)


def test_a_conversation_repeats_what_was_said_and_waits_between_turns() -> None:
    server = FakeServer(prefill_seconds=1.0)
    records, _ = _run(
        server,
        _conversations(1, num_output=2, turns=3),
        backend="openai-chat",
        turn_delay_seconds=4.0,
    )
    assert [record.start_seconds for record in records] == pytest.approx([0.0, 5.0, 10.0])
    user = {"role": "user", "content": "a b c"}
    assistant = {"role": "assistant", "content": "t0 t1 "}
    assert [request["messages"] for request in server.requests] == [
        [user],
        [user, assistant, user],
        [user, assistant, user, assistant, user],
    ]


def test_a_request_says_what_it_should() -> None:
    server = FakeServer()
    _run(
        server,
        _conversations(2),
        target={
            "headers": {"X-Extra": "1"},
            "fields": {"ignore_eos": True, "temperature": 0.5},
            "request_id_prefix": "run-",
        },
    )
    assert server.requests[0] == {
        "model": "fake",
        "prompt": "a b c",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "temperature": 0.5,
    }
    assert [headers["x-request-id"] for headers in server.headers] == ["run-0", "run-1"]
    assert server.headers[0]["x-extra"] == "1"
    _run(server, _conversations(1), target={"continuous_usage": False}, backend="openai-chat")
    assert server.requests[-1]["stream_options"] == {"include_usage": True}
    assert server.requests[-1]["max_completion_tokens"] == 4


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("status", "HTTP status 503: too many requests"),
        ("event", "the engine died"),
        ("cut", "the stream ended before the answer did"),
        ("garbage", "an event is no JSON object: b'{oops'"),
        ("silence", "no answer within 50 s"),
    ],
)
def test_a_failed_request_says_why_and_harms_no_other(fault: Any, text: str) -> None:
    server = FakeServer(prefill_seconds=1.0, faults={1: fault})
    records, _ = _run(server, _conversations(3), target={"timeout_seconds": 50.0})
    assert [record.error for record in records] == ["", text, ""]
    assert [record.answer is None for record in records] == [False, True, False]


def test_a_failed_request_frees_its_place() -> None:
    server = FakeServer(prefill_seconds=1.0, faults={0: "status", 1: "cut"})
    records, _ = _run(server, _conversations(3), max_concurrency=1)
    assert [record.answer is None for record in records] == [True, True, False]


def test_a_failed_turn_ends_its_conversation_and_all_its_turns_are_accounted_for() -> None:
    server = FakeServer(faults={1: "status"})
    finished = []

    async def main(clock: Any) -> LoadResult:
        target = Target(
            base_url="http://fake",
            endpoint="/v1/chat/completions",
            backend="openai-chat",
            model="fake",
        )
        transport = FakeTransport(server)
        async with LoadGenerator(target, clock=clock, transport=transport) as generator:
            return await generator.run(_conversations(1, turns=4), [0.0], on_finish=finished.append)

    records, _ = virtual_time.run(main)
    assert len(server.requests) == 2
    assert [record.answer is None for record in records] == [False, True, True, True]
    assert records[-1].error.startswith("not sent: ")
    assert finished == records


def test_a_server_that_is_not_there_is_a_failed_request() -> None:
    class Refuses(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("connection refused", request=request)

    records, _ = _run(FakeServer(), _conversations(2), transport=Refuses())
    assert [record.error for record in records] == ["connection refused"] * 2
