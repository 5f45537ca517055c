"""The server as a process, through the client that most people use."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from bench.soak import soak
from tests.e2e.endless_streams import EndlessStreams
from tests.e2e.process_watch import Watch
from tests.e2e.server_process import ServerProcess, serving
from tests.small_engine import LETTERS

HI: list[Any] = [{"role": "user", "content": "hi"}]
LETTER_BIAS = {str(token_id): 60 for token_id in LETTERS}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
# Longer than anything here waits.
LONG: dict[str, Any] = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
LIMIT_SECONDS = 5.0


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path, server_folder: Path) -> Iterator[ServerProcess]:
    """One for all tests that leave it as it was, and for the last, which does not."""
    options = ["--served-model-name", "small", "-pp", "2", "--api-server-count", "2"]
    options += ["--profiler-dir", str(server_folder / "profiles")]
    with serving(folder, server_folder, *options) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wait_until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 20
    while True:
        info = httpx2.get(f"{server.url}/server_info").json()
        stats = info["stats"]
        if info["num_open_requests"] == stats["num_running"] == stats["num_waiting"] == 0:
            return
        assert time.monotonic() < deadline, info
        time.sleep(0.02)


def test_models_and_a_chat(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    answer = client.chat.completions.create(
        model="small", messages=HI, max_completion_tokens=7, seed=1, logit_bias=LETTER_BIAS
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 7
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 7


def test_a_streamed_chat_adds_up(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "small",
        "messages": HI,
        "max_tokens": 12,
        "seed": 3,
        "logit_bias": LETTER_BIAS,
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "none",
    }
    whole = client.chat.completions.create(**fields)
    text, num_logprobs, usage = "", 0, None
    for chunk in client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.logprobs is not None and choice.logprobs.content is not None:
                num_logprobs += len(choice.logprobs.content)
    assert text == whole.choices[0].message.content and len(text) == 12
    assert num_logprobs == 12
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 12


def test_tools_may_be_offered(client: openai.OpenAI) -> None:
    """The stream helper of the client assembles the message, and checks each event for it."""
    with client.chat.completions.stream(
        model="small",
        messages=HI,
        tools=TOOLS,
        tool_choice="auto",
        logit_bias=LETTER_BIAS,
        extra_body={"min_tokens": 5, "stop_token_ids": list(LETTERS)},
    ) as stream:
        assert "chunk" in {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.role == "assistant"


def test_a_response_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "small",
        "input": HI,
        "max_output_tokens": 12,
        "reasoning": {"effort": "none"},
        "extra_body": {"seed": 3, "logit_bias": LETTER_BIAS},
    }
    whole = client.responses.create(**fields)
    assert whole.status == "incomplete" and len(whole.output_text) == 12
    assert whole.usage is not None and whole.usage.output_tokens == 12
    *_, last = client.responses.create(**fields, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text


def test_completions_of_texts_and_tokens(client: openai.OpenAI) -> None:
    prompts: list[Any] = ["ab", [97, 98], ["ab", "cd"], [[97, 98], [99, 100]]]
    answers = [
        client.completions.create(
            model="small", prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=1
        ).choices
        for prompt in prompts
    ]
    assert answers[0][0].text == answers[1][0].text == answers[2][0].text
    assert [choice.text for choice in answers[2]] == [choice.text for choice in answers[3]]
    assert answers[0][0].text.startswith("ab")
    logprobs = answers[0][0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 5


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="small", messages=HI, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="small", messages=HI, tool_choice="required")
    assert caught.value.param == "tool_choice"
    schema: Any = {"name": "x", "schema": {"type": "nix"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="small",
            messages=HI,
            response_format={"type": "json_schema", "json_schema": schema},
            stream=True,
        )
    assert caught.value.param == "response_format"


def test_a_stream_that_is_closed_ends_its_request(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    stream = client.chat.completions.create(
        model="small", messages=HI, stream=True, n=3, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until_idle(server)


def test_many_at_once_and_some_are_cancelled(server: ServerProcess) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> int | None:
        task = asyncio.create_task(
            client.completions.create(
                model="small", prompt=f"p{number}", **LONG | {"max_tokens": 20}
            )
        )
        if number % 3 == 0:
            await asyncio.sleep(0.01 * number)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return None
        usage = (await task).usage
        return usage.completion_tokens if usage is not None else None

    async def everybody() -> list[int | None]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(12)))

    answers = asyncio.run(everybody())
    assert answers == [None if number % 3 == 0 else 20 for number in range(12)]
    wait_until_idle(server)


def generation_tokens(server: ServerProcess) -> float:
    """As one of the API processes tells it."""
    text = httpx2.get(f"{server.url}/metrics").text
    [line] = [item for item in text.splitlines() if "stagecoach:generation_tokens_total{" in item]
    return float(line.rpartition(" ")[2])


def test_metrics_are_those_of_all_api_processes(server: ServerProcess) -> None:
    before = generation_tokens(server)
    body = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}
    # A connection each: the kernel spreads them over the processes.
    for _ in range(8):
        assert httpx2.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert [generation_tokens(server) for _ in range(6)] == [before + 24] * 6


def test_a_profile_has_a_file_of_each_worker_and_changes_no_token(server: ServerProcess) -> None:
    body = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True, "seed": 5}

    def text() -> str:
        answer = httpx2.post(f"{server.url}/v1/completions", json=body).json()
        return answer["choices"][0]["text"]

    def ask(path: str) -> httpx2.Response:
        return httpx2.post(f"{server.url}{path}", timeout=60)

    plain = text()
    assert ask("/stop_profile").status_code == 409
    assert ask("/start_profile").json() == {"status": "recording", "paths": []}
    assert ask("/start_profile").status_code == 409
    assert text() == plain
    paths = [Path(path) for path in ask("/stop_profile").json()["paths"]]
    assert [path.name for path in paths] == [f"worker-{stage}-0.pt.trace.json" for stage in (0, 1)]
    assert all(b"aten::" in path.read_bytes() for path in paths)
    assert ask("/stop_profile").status_code == 409
    assert text() == plain


def test_a_reader_that_sleeps_and_hangs_up_leaves_nothing(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "a", "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 8}'
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        time.sleep(0.3)
    wait_until_idle(server)


def test_sigterm_lets_open_requests_finish(folder: Path, temporary_folder: Path) -> None:
    options = ("--served-model-name", "small", "--api-server-count", "2")
    with serving(folder, temporary_folder, *options) as server:
        answers: list[int] = []

        def ask() -> None:
            fields = LONG | {"model": "small", "prompt": "abc"}
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
                chunks = list(client.completions.create(**fields, stream=True))
            answers.append(sum(len(chunk.choices) for chunk in chunks))
            assert chunks[-1].choices[0].finish_reason == "length"

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while httpx2.get(f"{server.url}/server_info").json()["num_open_requests"] < 3:
            assert time.monotonic() < deadline
        # Every process gets it, as from systemd.
        for process in psutil.Process(server.process.pid).children(recursive=True):
            process.send_signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        assert server.wait(30) == 0
        for thread in threads:
            thread.join(5)
        assert len(answers) == 3
    told = [line for line in server.log if "ending: 3 open requests may finish" in line]
    assert len(told) == 1, server.log


def test_after_the_deadline_streams_end_with_an_error(folder: Path, temporary_folder: Path) -> None:
    """A worker that stands still would keep them open for ever."""
    with serving(
        folder, temporary_folder, "--served-model-name", "small", "--shutdown-timeout", "0.5"
    ) as server:
        streams = EndlessStreams(server.url, 2)
        [worker] = server.worker_processes()
        worker.suspend()
        server.signal(signal.SIGTERM)
        streams.join(LIMIT_SECONDS)
        for error in streams.ends:
            assert isinstance(error, openai.APIError)
        assert any("the server ended" in str(error) for error in streams.ends)
        assert server.wait(30) == 0


def test_a_second_sigterm_ends_at_once(folder: Path, temporary_folder: Path) -> None:
    options = ("--served-model-name", "small", "--api-server-count", "2")
    with serving(folder, temporary_folder, *options) as server:
        streams = EndlessStreams(server.url, 1)
        [worker] = server.worker_processes()
        worker.suspend()
        engine = [worker, server.loop_process()]
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        streams.join(LIMIT_SECONDS)
        # Half of what open requests have; a worker that stands still has to be killed.
        server.wait(15)
        assert psutil.wait_procs(engine, LIMIT_SECONDS)[1] == []


def test_the_socket_listens_while_the_model_loads(
    folder: Path, temporary_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with serving(folder, temporary_folder, "--uds", str(path), is_awaited=False) as server:
        server.wait_until_listening()
        assert server.url == str(path)
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as client:
            health = client.get("http://any/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        # One that loads can be ended like any other.
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert not path.exists()


def test_a_model_that_does_not_load_ends_the_server(folder: Path, temporary_folder: Path) -> None:
    options = ("--kv-cache-memory-bytes", "10")
    with serving(folder, temporary_folder, *options, is_awaited=False) as server:
        assert server.wait(60) == 1
        assert any("CapacityError" in line for line in server.log)


def test_an_address_in_use_is_named(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    with serving(folder, tmp_path, "--port", port, is_awaited=False) as second:
        assert second.wait(60) == 1
        assert any(f"--port={port}: Address already in use" in line for line in second.log)


def test_a_soak_leaves_nothing(server: ServerProcess) -> None:
    """Clients of all protocols that go, read slowly and ask what is wrong; see bench/soak.py."""
    work = soak(server.url, server.process.pid, num_requests=200, concurrency=32)
    soaked = asyncio.run(work)
    assert not soaked.faults()
    counts = soaked.tally.counts
    assert counts.total() == 200 and counts["answered"] > 50
    assert counts["client went at once"] and counts["client went in the middle"]


def test_an_api_process_that_dies_is_replaced_and_the_supervisor_takes_all_along(
    server: ServerProcess,
) -> None:
    """Last: it ends the server of this file."""
    streams = EndlessStreams(server.url, 6)
    pair = server.api_processes()
    assert len(pair) == 2
    # Whichever process is asked, it knows of all.
    for _ in range(8):
        assert httpx2.get(f"{server.url}/health").status_code == 200
    victim = max(pair, key=num_connections)
    num_victims = num_connections(victim)
    assert num_victims >= 3
    victim.kill()
    streams.wait_for_ends(num_victims, LIMIT_SECONDS)
    for error in streams.ends:
        assert isinstance(error, openai.APIError)
    # Its requests are gone from the engine, its place is taken, and the others went on.
    deadline = time.monotonic() + 20
    while victim in (now := server.api_processes()) or len(now) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for _ in range(8):
        assert httpx2.get(f"{server.url}/health", timeout=20).status_code == 200
    info = httpx2.get(f"{server.url}/server_info").json()
    num_left = 6 - num_victims
    assert info["stats"]["num_running"] + info["stats"]["num_waiting"] <= num_left
    assert info["num_open_requests"] <= num_left
    assert len(streams.ends) == num_victims
    assert any("was killed by SIGKILL; another one takes its place" in line for line in server.log)

    everything = psutil.Process(server.process.pid).children(recursive=True)
    watch = Watch(process.pid for process in everything)
    server.process.kill()
    streams.join(LIMIT_SECONDS)
    assert len(streams.ends) == 6
    left = watch.running_after(LIMIT_SECONDS)
    watch.close()
    assert not left


def num_connections(process: psutil.Process) -> int:
    """Clients that are connected to it."""
    return sum(item.status == psutil.CONN_ESTABLISHED for item in process.net_connections("tcp"))
