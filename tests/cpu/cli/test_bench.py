"""`stagecoach bench` as a program: against a server on a socket, and over the small model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.benchmarks.fake_server import FakeServer, served
from tests.cpu.cli.command_run import FAST, Run, Stagecoach

# What programs that read results of `vllm bench serve` look for.
_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
    "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms",
    "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
}  # fmt: skip


def _bench(stagecoach: Stagecoach, server: FakeServer, *arguments: object) -> Run:
    with served(server) as url:
        return stagecoach(
            "bench", "serve", "--base-url", url, "--num-prompts", 4, "--random-input-len", 12,
            "--random-output-len", 5, *arguments,
        )  # fmt: skip


def _result(run: Run) -> dict[str, Any]:
    assert run.status == 0, run.stderr
    return json.loads(run.stdout)  # type: ignore[no-any-return]


def test_a_run_on_a_real_socket_measures_the_servers_delays(stagecoach: Stagecoach) -> None:
    server = FakeServer(prefill_seconds=0.2, step_seconds=0.05, tokens_per_step=2)
    result = _result(
        _bench(stagecoach, server, "--json", "--percentile-metrics", "ttft,tpot,itl,icl,e2el")
    )
    assert result.keys() >= _KEYS
    assert (result["completed"], result["failed"], result["model_id"]) == (4, 0, "fake")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (48, 20)
    assert result["token_sources"] == ["usage"]
    assert result["mean_tokens_per_chunk"] == 2.0
    # A busy machine may be late, and what is late once makes the next gap shorter.
    assert 195 <= result["median_ttft_ms"] < 5000
    assert 290 <= result["median_e2el_ms"] < 9000
    assert 10 <= result["mean_icl_ms"] < 2000
    assert result["mean_itl_ms"] == pytest.approx(result["mean_icl_ms"] / 2)
    assert result["mean_tpot_ms"] == pytest.approx(result["mean_icl_ms"] / 2)
    assert result["mean_ttft_ms"] + 2 * result["mean_icl_ms"] <= result["mean_e2el_ms"] + 1e-6
    assert result["duration"] >= 0.29
    assert result["request_throughput"] == pytest.approx(4 / result["duration"])


def test_random_prompts_are_token_ids_and_answers_have_full_length(stagecoach: Stagecoach) -> None:
    server = FakeServer()
    _result(_bench(stagecoach, server, "--json", "--temperature", 0))
    assert len(server.requests) == 4
    for request in server.requests:
        assert len(request["prompt"]) == 12
        assert all(isinstance(token_id, int) for token_id in request["prompt"])
        assert (request["max_tokens"], request["ignore_eos"]) == (5, True)
        assert request["temperature"] == 0


def test_a_table_is_printed_and_the_result_saved(stagecoach: Stagecoach, tmp_path: Path) -> None:
    run = _bench(
        stagecoach, FakeServer(), "--save-result", "--save-detailed", "--result-dir", tmp_path,
        "--result-filename", "x.json", "--metadata", "machine=small", "--goodput", "ttft:60000",
        "--metric-percentiles", "50,99.9", "--max-concurrency", 2, "--label", "mine",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert "Serving Benchmark Result" in run.stdout
    assert "P99.9 TTFT (ms):" in run.stdout and "Request goodput (req/s):" in run.stdout
    result = json.loads((tmp_path / "x.json").read_text())
    assert (result["machine"], result["label"], result["max_concurrency"]) == ("small", "mine", 2)
    assert result["request_goodput"] == result["request_throughput"]
    assert result["input_lens"] == [12] * 4 and result["output_lens"] == [5] * 4
    assert [len(gaps) for gaps in result["itls"]] == [4] * 4


def test_failed_requests_are_counted_and_the_first_error_shown(stagecoach: Stagecoach) -> None:
    run = _bench(stagecoach, FakeServer(faults={2: "status"}), "--json")
    assert _result(run)["failed"] == 1
    assert run.stderr == ("1 of 4 requests failed; first: HTTP status 503: too many requests\n")


def test_the_status_is_1_if_all_failed(stagecoach: Stagecoach) -> None:
    run = _bench(stagecoach, FakeServer(faults=dict.fromkeys(range(4), "cut")))
    assert run.status == 1
    assert "4 of 4 requests failed; first: the stream ended before the answer did" in run.stderr
    assert "Failed requests:" in run.stdout


def test_requests_arrive_at_the_rate(stagecoach: Stagecoach) -> None:
    result = _result(
        _bench(stagecoach, FakeServer(), "--json", "--request-rate", 10, "--burstiness", "inf")
    )
    assert (result["request_rate"], result["burstiness"]) == (10.0, "inf")
    assert 0.4 <= result["duration"] < 4


def test_chats_are_text_and_a_server_without_tokenize_gets_words(stagecoach: Stagecoach) -> None:
    server = FakeServer(has_tokenize=False)
    run = _bench(stagecoach, server, "--json", "--backend", "openai-chat")
    assert "The server has no /tokenize: a word counts as a token." in run.stderr
    assert _result(run)["completed"] == 4
    for request in server.requests:
        [message] = request["messages"]
        assert len(message["content"].split()) == 12


def test_a_conversation_of_several_turns(stagecoach: Stagecoach) -> None:
    server = FakeServer()
    result = _result(
        _bench(
            stagecoach, server, "--json", "--backend", "openai-chat", "--dataset-name",
            "multi-turn", "--multi-turn-num-turns", 2,
        )
    )  # fmt: skip
    assert result["completed"] == 4
    assert sorted(len(request["messages"]) for request in server.requests) == [1, 1, 3, 3]


def test_prefixes_are_shared(stagecoach: Stagecoach) -> None:
    server = FakeServer()
    _result(
        _bench(
            stagecoach, server, "--json", "--dataset-name", "prefix-repetition",
            "--prefix-repetition-num-prefixes", 1, "--prefix-repetition-prefix-len", 8,
            "--prefix-repetition-suffix-len", 3, "--prefix-repetition-output-len", 2,
        )
    )  # fmt: skip
    assert len({tuple(request["prompt"][:8]) for request in server.requests}) == 1
    assert {len(request["prompt"]) for request in server.requests} == {11}


@pytest.mark.parametrize("name", ["sharegpt", "multi-turn"])
def test_a_file_is_asked_as_it_is(stagecoach: Stagecoach, tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.json"
    texts = ["who are you then", "nobody at all , sorry"]
    path.write_text(json.dumps([{"conversations": [{"value": text} for text in texts]}]))
    server = FakeServer()
    _result(
        _bench(
            stagecoach, server, "--json", "--dataset-name", name, "--dataset-path", path,
            "--backend", "openai-chat",
        )
    )  # fmt: skip
    assert {request["messages"][0]["content"] for request in server.requests} == {texts[0]}
    assert all("ignore_eos" not in request for request in server.requests)
    assert {request["max_completion_tokens"] for request in server.requests} == {5}


def test_the_trial_and_the_warm_ups_come_first_and_do_not_count(stagecoach: Stagecoach) -> None:
    server = FakeServer()
    result = _result(
        _bench(stagecoach, server, "--json", "--ready-check-timeout-sec", 5, "--num-warmups", 2)
    )
    assert result["completed"] == 4
    assert len(server.requests) == 7
    prompts = [tuple(request["prompt"]) for request in server.requests]
    assert len(set(prompts[:3])) == 1 and prompts[0] in prompts[3:]
    assert len({headers["x-request-id"] for headers in server.headers}) == 7


def test_a_trial_that_fails_ends_the_run(stagecoach: Stagecoach) -> None:
    server = FakeServer(faults={0: "event"})
    run = _bench(stagecoach, server, "--ready-check-timeout-sec", 5)
    assert run.status == 1
    assert run.stderr == ("stagecoach: ServerError: the first request failed: the engine died\n")
    assert len(server.requests) == 1


def test_the_key_comes_from_the_environment(
    stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _bench(stagecoach, FakeServer(api_key="secret")).status == 1
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run = _bench(stagecoach, FakeServer(api_key="secret"), "--save-detailed", "--json")
    assert _result(run)["completed"] == 4
    assert "secret" not in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--num-prompts", 0), "--num-prompts=0: must be at least 1"),
        (("--max-concurrency", 0), "--max-concurrency=0: must be at least 1"),
        (("--seed", -1), "--seed=-1: must be at least 0"),
        (("--request-timeout-sec", 0), "--request-timeout-sec=0.0: must be greater than 0"),
        (("--dataset-name", "sharegpt"), "--dataset-name=sharegpt: needs --dataset-path"),
        (("--dataset-path", "x"), "--dataset-path: --dataset-name=random reads no file"),
        (("--dataset-name", "multi-turn"), "needs --backend=openai-chat"),
        (("--extra-body", "[]"), "--extra-body=[]: "),
        (("--metadata", "x"), "--metadata=x: must be NAME=VALUE"),
        (("--header", "x"), "--header=x: must be NAME=VALUE"),
        (("--goodput", "speed:1"), "--goodput=speed:1: must be METRIC:MILLISECONDS"),
        (("--base-url", "localhost"), "--base-url=localhost: must begin with http"),
    ],
)
def test_options_that_cannot_be_are_refused(
    stagecoach: Stagecoach, arguments: tuple[object, ...], text: str
) -> None:
    run = stagecoach("bench", "serve", *arguments)
    assert (run.status, run.stdout) == (1, "")
    assert run.stderr.startswith("stagecoach: ConfigError: ") and text in run.stderr


def test_no_server_is_one_line(stagecoach: Stagecoach) -> None:
    run = stagecoach("bench", "serve", "--host", "::1", "--port", 9, "--num-prompts", 1)
    assert (run.status, run.stdout) == (1, "")
    assert run.stderr.startswith("stagecoach: ServerError: http://[::1]:9")


def test_latency_of_the_small_model(stagecoach: Stagecoach, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    run = stagecoach(
        "bench", "latency", *FAST, "--model", folder, "--input-len", 4, "--output-len", 3,
        "--batch-size", 2, "--num-iters-warmup", 0, "--num-iters", 2, "--output-json", path,
    )  # fmt: skip
    assert run.status == 0, run.stderr
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 2
    assert 0 < result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    assert f"Avg latency: {result['avg_latency']:.6f} seconds" in run.stdout
    assert "99% percentile latency: " in run.stdout


@pytest.mark.parametrize("name", ["random", "prefix-repetition", "sharegpt"])
def test_throughput_of_the_small_model(
    stagecoach: Stagecoach, folder: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "x.json"
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([{"conversations": [{"value": "abcdefgh"}, {"value": "abc"}]}]))
    sources = {
        "random": ("--random-prefix-len", 2, "--input-len", 6),
        "prefix-repetition": ("--prefix-repetition-prefix-len", 2, "--input-len", 6),
        "sharegpt": ("--dataset-path", texts),
    }
    trace = tmp_path / "trace.json"
    run = stagecoach(
        "bench", "throughput", *FAST, "--model", folder, "--num-prompts", 3, "--output-len", 2,
        "--output-json", path, "--trace", trace, "--dataset-name", name, *sources[name],
    )  # fmt: skip
    assert run.status == 0, run.stderr
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (3, 30)
    assert result["num_output_tokens"] == 6
    assert result["tokens_per_second"] == pytest.approx(30 / result["elapsed_time"])
    assert "Total num output tokens: 6" in run.stdout
    slices = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"compute", "plans in flight"} <= slices
    assert "Busy share of each stage, decode, " in run.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("latency", "--batch-size", 0), "--batch-size=0: must be at least 1"),
        (("latency", "--input-len", 0), "--input-len=0: must be at least 1"),
        (("throughput", "--num-prompts", 0), "--num-prompts=0: must be at least 1"),
        (("throughput", "--dataset-name", "sharegpt"), "--dataset-path goes with sharegpt only"),
        (("throughput", "--dataset-path", "x"), "--dataset-path goes with sharegpt only"),
        (("latency", "--output-len", 0), "--output-len=0: must be at least 1"),
        (("latency", "--num-iters", 0), "--num-iters=0: must be at least 1"),
        (("latency", "--trace", "/"), "/: cannot be written"),
        (("throughput", "--output-json", "/"), "/: cannot be written"),
    ],
)
@pytest.mark.usefixtures("_no_engine")
def test_offline_options_that_cannot_be_are_refused(
    stagecoach: Stagecoach, folder: Path, arguments: tuple[object, ...], text: str
) -> None:
    run = stagecoach("bench", *arguments, *FAST, "--model", folder)
    assert (run.status, run.stdout) == (1, "")
    assert run.stderr.startswith("stagecoach: ConfigError: ") and text in run.stderr


@pytest.mark.usefixtures("_no_engine")
@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_answers_longer_than_the_model_are_refused_before_it_is_loaded(
    stagecoach: Stagecoach, folder: Path, command: str
) -> None:
    run = stagecoach(
        "bench", command, *FAST, "--model", folder, "--input-len", 2, "--output-len", 100_000
    )
    assert (run.status, run.stdout) == (1, "")
    assert run.stderr.startswith("stagecoach: RequestError: max_tokens: must be an integer")
