"""Workers of a running engine are killed; with --recover nobody who waits notices."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from stagecoach import LLM, RequestOutput, SamplingParams
from stagecoach.engine.launch import ProcessEngine
from stagecoach.errors import WorkerDiedError
from stagecoach.request import StructuredOutputsParams
from tests.e2e import two_hosts as two_hosts_module
from tests.e2e.process_watch import Watch
from tests.e2e.two_hosts import complete, two_hosts
from tests.small_engine import (
    assert_idle,
    assert_same_completions,
    assert_same_logprobs,
    process_engine,
)

LIMIT_SECONDS = 60.0
STEM = [(7 * number) % 250 for number in range(1, 33)]
PROMPTS = [[1, 2, 3], STEM, [*STEM, 4, 5], [9, 8, 7, 6]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, max_tokens=44, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=5, max_tokens=44, ignore_eos=True, frequency_penalty=0.4),
    SamplingParams(
        temperature=1.0,
        seed=7,
        max_tokens=44,
        structured_outputs=StructuredOutputsParams(regex="([a-f]{3}-){9}[a-f]{3}"),
    ),
]


class Streams:
    """Streams of all prompts at once, and how far they have come."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self._latest: list[RequestOutput | None] = [None] * len(PROMPTS)
        self._futures = [self._pool.submit(self._stream, place) for place in range(len(PROMPTS))]

    def _stream(self, place: int) -> None:
        told: list[int] = []
        for output in self._llm.stream(PROMPTS[place], PARAMS[place]):
            [completion] = output.outputs
            assert completion.token_ids[: len(told)] == told, "what was told stays"
            assert len(completion.token_ids) >= len(told)
            told = list(completion.token_ids)
            self._latest[place] = output

    def wait_for(self, num_tokens: int) -> None:
        """Until each has as many tokens, and none is at its end."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while min(self.num_tokens) < num_tokens:
            assert time.monotonic() < deadline, self.num_tokens
            time.sleep(0.002)

    @property
    def num_tokens(self) -> list[int]:
        return [0 if item is None else len(item.outputs[0].token_ids) for item in self._latest]

    def finish(self) -> list[RequestOutput]:
        for future in self._futures:
            future.result(timeout=LIMIT_SECONDS)
        self._pool.shutdown()
        return [item for item in self._latest if item is not None]


def check_same(outputs: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> None:
    for one, other in zip(outputs, others, strict=True):
        assert_same_completions(one.outputs, other.outputs)
        assert_same_logprobs(one.prompt_logprobs, other.prompt_logprobs)


def kill(llm: LLM, *victims: str, how: signal.Signals = signal.SIGKILL) -> None:
    for victim in victims:
        os.kill(llm.client.engine.process_ids[victim], how)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_recovering(llm: LLM) -> bool:
    return llm.client.recovering_from is not None


def test_streams_notice_nothing(folder: Path, draft_folder: Path) -> None:
    """With drafts, prefix hits, a grammar, penalties and log-probabilities."""
    with process_engine(
        folder,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        speculative_config={
            "model": str(draft_folder),
            "confidence_schedule": False,
            "watchdog": False,
        },
        recover=True,
        max_recoveries=50,
    ) as llm:
        undisturbed = Streams(llm).finish()
        assert llm.stats().num_recoveries == 0
        each_rank_in_turn_in_the_middle_of_streams(llm, undisturbed)
        in_the_middle_of_a_prefill(llm, undisturbed)
        during_a_recovery(llm, undisturbed)
        all_of_an_idle_engine(llm, undisturbed)
        assert_idle(llm)
        assert isinstance(llm.client.engine, ProcessEngine)
        meetings = list(llm.client.engine.folder.glob("rendezvous-*"))
        assert len(meetings) == 1, f"earlier ones leave nothing: {meetings}"


def each_rank_in_turn_in_the_middle_of_streams(llm: LLM, undisturbed: list[RequestOutput]) -> None:
    before = dict(llm.client.engine.process_ids)
    streams = Streams(llm)
    for number, victim in enumerate(["worker[0,0]", "worker[0,1]", "worker[1,0]", "worker[1,1]"]):
        streams.wait_for(8 * (number + 1))
        wait_until(lambda: not is_recovering(llm))
        pids = dict(llm.client.engine.process_ids)
        kill(llm, victim)
        wait_until(lambda: llm.stats().num_recoveries == number + 1)  # noqa: B023
        wait_until(lambda: not is_recovering(llm))
        changed = {name for name, pid in llm.client.engine.process_ids.items() if pids[name] != pid}
        assert changed == {victim}, "the others keep their weights"
    check_same(streams.finish(), undisturbed)
    stats = llm.stats()
    assert stats.num_recoveries == 4 and 0 < stats.recovery_seconds < 4 * LIMIT_SECONDS
    assert before["engine loop"] == llm.client.engine.process_ids["engine loop"]
    assert_idle(llm)


def in_the_middle_of_a_prefill(llm: LLM, undisturbed: list[RequestOutput]) -> None:
    llm.reset_prefix_cache()
    num_steps, num_before = llm.stats().num_steps, llm.stats().num_recoveries
    streams = Streams(llm)
    wait_until(lambda: llm.stats().num_steps > num_steps)
    kill(llm, "worker[1,0]", "worker[0,1]")
    check_same(streams.finish(), undisturbed)
    assert llm.stats().num_recoveries > num_before
    assert_idle(llm)


def during_a_recovery(llm: LLM, undisturbed: list[RequestOutput]) -> None:
    """The one that loads, and one that waits for it; a new request and an abort come meanwhile."""
    streams = Streams(llm)
    streams.wait_for(10)
    kill(llm, "worker[1,0]")
    wait_until(lambda: is_recovering(llm))
    old = dict(llm.client.engine.process_ids)
    wait_until(lambda: old != llm.client.engine.process_ids)
    kill(llm, "worker[1,0]", "worker[0,0]")
    aborted = llm.stream([3, 3, 3], PARAMS[0])
    first = threading.Thread(target=lambda: next(aborted), daemon=True)
    late = ThreadPoolExecutor(1)
    answer = late.submit(llm.generate, PROMPTS[0], PARAMS[0])
    first.start()
    check_same(streams.finish(), undisturbed)
    assert_same_completions(answer.result()[0].outputs, undisturbed[0].outputs)
    first.join(LIMIT_SECONDS)
    aborted.close()
    late.shutdown()
    assert_idle(llm)


def all_of_an_idle_engine(llm: LLM, undisturbed: list[RequestOutput]) -> None:
    num_before = llm.stats().num_recoveries
    kill(llm, *(f"worker[{stage},{rank}]" for stage in range(2) for rank in range(2)))
    wait_until(lambda: llm.stats().num_recoveries > num_before and not is_recovering(llm))
    check_same(Streams(llm).finish(), undisturbed)


def test_a_worker_that_hangs_is_started_anew(folder: Path) -> None:
    """Not so the next stage, which has waited for it."""
    with process_engine(
        folder,
        pipeline_parallel_size=2,
        execute_model_timeout_seconds=1,
        recover=True,
        max_recoveries=20,
    ) as llm:
        expected = llm.generate(PROMPTS, PARAMS)
        old = dict(llm.client.engine.process_ids)
        kill(llm, "worker[0,0]", how=signal.SIGSTOP)
        check_same(llm.generate(PROMPTS, PARAMS), expected)
        assert llm.client.engine.process_ids["worker[0,0]"] != old["worker[0,0]"]


def test_too_many_deaths_are_the_end(folder: Path) -> None:
    llm = process_engine(folder, pipeline_parallel_size=2, recover=True, max_recoveries=1)
    watch = Watch(llm.client.engine.process_ids.values())
    stream = llm.stream([1, 2, 3], PARAMS[0])
    next(stream)
    kill(llm, "worker[1,0]")
    wait_until(lambda: llm.stats().num_recoveries == 1 and not is_recovering(llm))
    second = Watch(llm.client.engine.process_ids.values())
    kill(llm, "worker[0,0]")
    with pytest.raises(WorkerDiedError, match="max-recoveries"):
        for _ in stream:
            pass
    assert watch.running_after(5.0) == second.running_after(5.0) == set()
    with pytest.raises(WorkerDiedError, match="max-recoveries"):
        llm.generate("hello")
    watch.close()
    second.close()
    llm.close()


def worker_ids(process_ids: Sequence[int]) -> list[int]:
    """Those of the processes that a forkserver, which is one of them, has forked."""
    processes = [psutil.Process(process_id) for process_id in process_ids]
    servers = {process.pid for process in processes if "forkserver" in " ".join(process.cmdline())}
    return [process.pid for process in processes if process.ppid() in servers]


def test_a_worker_of_another_host_over_http(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its member starts it anew; the answer takes longer and is the same, and metrics say why."""
    # No cable is cut here, and over loopback no name is looked up.
    monkeypatch.setattr(two_hosts_module, "_join", lambda names: False)
    with two_hosts(tmp_path) as hosts:
        hosts.start(folder, "--recover")
        hosts.first.wait_until_ready()
        with hosts.first.client() as client, ThreadPoolExecutor(1) as pool:
            expected = complete(client, folder, [1, 2, 3], max_tokens=100)
            num_steps = client.get("/server_info").json()["stats"]["num_steps"]
            answer = pool.submit(complete, client, folder, [1, 2, 3], max_tokens=100)
            while client.get("/server_info").json()["stats"]["num_steps"] < num_steps + 20:
                assert not answer.done()
            os.kill(worker_ids(hosts.second.process_ids())[-1], signal.SIGKILL)
            assert answer.result(LIMIT_SECONDS) == expected
            assert "stagecoach:num_recoveries_total{" in client.get("/metrics").text
            stats = client.get("/server_info").json()["stats"]
            assert stats["num_recoveries"] == 1 and stats["recovery_seconds"] > 0
            assert client.get("/ready").json()["status"] == "ok"
        hosts.first.process.send_signal(signal.SIGTERM)
        assert hosts.first.wait() == hosts.second.wait() == 0
