"""Prefix caching over real processes: conversations, tenants, and an end in the middle."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stagecoach import LLM, RequestOutput, SamplingParams
from stagecoach.errors import WorkerDiedError
from tests.e2e.process_watch import Watch
from tests.small_engine import assert_idle, assert_same_completions, process_engine, thread_engine

_ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 5.0
NUM_TURNS = 3
# Two pages and a bit, with odd ends.
OPENINGS = [[3 * place + 40 * number for place in range(19 + number)] for number in range(3)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=1, max_tokens=6, ignore_eos=True, n=2),
    SamplingParams(temperature=1.2, seed=2, max_tokens=9, ignore_eos=True),
]


def converse(llm: LLM, **options: Any) -> list[list[RequestOutput]]:
    """Three conversations side by side, turn by turn; each goes on from its first answer."""
    prompts = [list(opening) for opening in OPENINGS]
    turns = []
    for turn in range(NUM_TURNS):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, **options)
        turns.append(outputs)
        for prompt, output in zip(prompts, outputs, strict=True):
            prompt += [*output.outputs[0].token_ids, 200 + turn, 7, 9]
    return turns


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[RequestOutput]]:
    """One stage, one rank, no draft, nothing cached, in this process."""
    with thread_engine(folder, enable_prefix_caching=False) as llm:
        return converse(llm)


def drafting(draft_folder: Path) -> dict[str, Any]:
    return {
        "model": str(draft_folder),
        "num_speculative_tokens": 3,
        "confidence_schedule": False,
        "watchdog": False,
    }


def test_conversations_go_on_from_the_end_of_the_last_answer(
    folder: Path, draft_folder: Path, expected: list[list[RequestOutput]]
) -> None:
    with process_engine(
        folder,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        speculative_config=drafting(draft_folder),
        max_state_checkpoints=60,
    ) as llm:
        for salt in ("one", "two"):
            turns = converse(llm, cache_salt=salt)
            for outputs, others in zip(turns, expected, strict=True):
                for output, other in zip(outputs, others, strict=True):
                    assert_same_completions(output.outputs, other.outputs)
            for before, after in pairwise(turns):
                for output, following in zip(before, after, strict=True):
                    conversation = output.prompt_token_ids + output.outputs[0].token_ids
                    # The last token of an answer was never computed.
                    assert following.num_cached_tokens == len(conversation) - 1
            assert not any(output.num_cached_tokens for output in turns[0])
        llm.reset_prefix_cache()
        assert not any(output.num_cached_tokens for output in converse(llm, cache_salt="one")[0])
        assert_idle(llm)
        stats = llm.stats().prefix_cache
        assert stats is not None and stats.evictions["not_finite"] == 0


@pytest.mark.parametrize("victim", ["worker[0,1]", "worker[1,0]"])
def test_a_worker_that_dies_with_cached_states_is_named(
    folder: Path, draft_folder: Path, victim: str
) -> None:
    llm = process_engine(
        folder,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        speculative_config=drafting(draft_folder),
        kv_offloading_size=0.01,
        verify_cache=0.5,
    )
    watch = Watch(llm.client.engine.process_ids.values())
    stats = llm.stats().prefix_cache
    assert stats is not None and stats.num_checkpoints == 0
    begun = threading.Barrier(3)

    def talk_for_ever() -> None:
        for number in range(10_000):
            converse(llm)
            if number == 1:
                begun.wait(timeout=60)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(talk_for_ever) for _ in range(2)]
        begun.wait(timeout=60)
        stats = llm.stats().prefix_cache
        assert stats is not None and stats.num_hits > 0 and stats.num_checkpoints > 0
        os.kill(llm.client.engine.process_ids[victim], signal.SIGKILL)
        for future in waiting:
            error = future.exception(timeout=LIMIT_SECONDS)
            assert isinstance(error, WorkerDiedError)
            assert f"{victim} was killed by SIGKILL" in str(error)
    assert watch.running_after(LIMIT_SECONDS) == set()
    watch.close()
    llm.close()


def generate(folder: Path, temporary_folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "stagecoach", "generate", "--model", folder, "--num-threads", "1",
         "--log-level", "warning", "--ignore-eos", "--json", "--max-tokens", "3", "-pp", "2",
         "--dtype", "float64", "--max-num-seqs", "1", "--block-size", "8",
         "--prompt", "a prompt that comes twice", "--prompt", "a prompt that comes twice",
         *arguments],
        env={**os.environ, "TMPDIR": str(temporary_folder), "PYTHONPATH": str(_ROOT)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_command_line_caches_unless_told_not_to(folder: Path, temporary_folder: Path) -> None:
    shared = generate(folder, temporary_folder, "--cache-salt", "tenant")
    apart = generate(folder, temporary_folder, "--no-enable-prefix-caching")
    first, second = shared["outputs"]
    assert first["num_cached_tokens"] == 0
    # All but the last token of the prompt, which is always computed.
    assert second["num_cached_tokens"] == len("a prompt that comes twice") - 1
    assert shared["stats"]["prefix_cache"]["num_hits"] == 1
    assert [item["num_cached_tokens"] for item in apart["outputs"]] == [0, 0]
    assert apart["stats"]["prefix_cache"] is None
    texts = [[item["text"] for item in run["outputs"]] for run in (shared, apart)]
    assert texts[0] == texts[1]
