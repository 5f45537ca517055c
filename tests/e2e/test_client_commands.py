"""`stagecoach bench serve` and `stagecoach chat` against `stagecoach serve`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess, serving


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(folder, tmp_path_factory.mktemp("server")) as process:
        yield process


def _run(*arguments: object, text: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stagecoach", *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _bench(server: ServerProcess, *arguments: object) -> dict[str, Any]:
    output = _run(
        "bench", "serve", "--base-url", server.url, "--num-prompts", 6, "--json",
        "--save-detailed", *arguments,
    )  # fmt: skip
    return json.loads(output)  # type: ignore[no-any-return]


def test_prompts_and_answers_have_the_tokens_that_were_asked_for(server: ServerProcess) -> None:
    result = _bench(
        server, "--random-input-len", 20, "--random-output-len", 7, "--max-concurrency", 3
    )
    assert (result["completed"], result["failed"]) == (6, 0), result["errors"]
    assert result["input_lens"] == [20] * 6
    assert result["output_lens"] == [7] * 6
    # Bytes of a character come together, and those of the first event have no gap.
    assert all(len(gaps) <= 6 for gaps in result["itls"]) and any(result["itls"])
    assert result["token_sources"] == ["usage"]
    assert result["max_concurrent_requests"] <= 3
    assert result["mean_ttft_ms"] > 0 and result["mean_tpot_ms"] > 0


def test_a_conversation_grows_with_every_turn(server: ServerProcess) -> None:
    result = _bench(
        server, "--backend", "openai-chat", "--dataset-name", "multi-turn",
        "--multi-turn-num-turns", 3, "--random-input-len", 2, "--random-output-len", 4,
    )  # fmt: skip
    assert (result["completed"], result["failed"]) == (6, 0), result["errors"]
    first, second = result["input_lens"][:3], result["input_lens"][3:]
    assert first == sorted(set(first)) and second == sorted(set(second))
    assert result["output_lens"] == [4] * 6


def test_a_chat_in_a_pipe_has_one_answer_for_each_line(server: ServerProcess) -> None:
    options = ("--temperature", 0, "--max-tokens", 4)
    output = _run("chat", "--url", server.url, *options, text="hi\n/reset\nhi\n")
    assert output.endswith("\n")
    half = len(output) // 2
    assert output[:half] == output[half:]
