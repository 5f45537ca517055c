"""What callers hear when a worker or the loop of an engine in this process breaks."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stagecoach import LLM, SamplingParams
from stagecoach.errors import EngineDeadError, StagecoachError, WorkerDiedError
from stagecoach.runner.stage_runner import StageRunner
from stagecoach.schedule.scheduler import Scheduler
from tests.small_engine import thread_engine

LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, n=2)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with thread_engine(folder, pipeline_parallel_size=2, tensor_parallel_size=2) as llm:
        yield llm


def errors_of_callers(llm: LLM, break_it: Any) -> list[BaseException | None]:
    """What three callers get who all had output before it broke."""
    begun = threading.Barrier(4)

    def stream() -> None:
        for number, _ in enumerate(llm.stream("hello", LONG)):
            if number == 0:
                begun.wait(timeout=30)

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(stream) for _ in range(3)]
        begun.wait(timeout=30)
        broken_at = time.monotonic()
        break_it()
        errors = [future.exception(timeout=5.0) for future in waiting]
        assert time.monotonic() - broken_at < 5.0
    return errors


def check(llm: LLM, errors: list[BaseException | None], kind: type, text: str) -> None:
    for error in errors:
        assert type(error) is kind
        assert text in str(error)
    for call in (lambda: llm.generate("hello"), llm.stats):
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value)


@pytest.mark.parametrize("stage", [0, 1])
def test_an_exception_of_one_worker(llm: LLM, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    run = StageRunner.run

    def break_it() -> None:
        def failing(self: StageRunner, *arguments: Any) -> Any:
            if threading.current_thread().name == f"worker[{stage},0]":
                raise RuntimeError("the device is gone")
            return run(self, *arguments)

        monkeypatch.setattr(StageRunner, "run", failing)

    errors = errors_of_callers(llm, break_it)
    check(llm, errors, WorkerDiedError, f"worker[{stage},0] failed: RuntimeError: the device is go")


def test_an_exception_of_the_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it() -> None:
        def failing(self: Scheduler, result: Any) -> Any:
            raise AssertionError("lost a page")

        monkeypatch.setattr(Scheduler, "commit", failing)

    check(llm, errors_of_callers(llm, break_it), EngineDeadError, "lost a page")


def test_an_engine_after_a_broken_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: StageRunner, *_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(StagecoachError, match="MemoryError"):
        patch.setattr(StageRunner, "load", failing)
        thread_engine(folder, pipeline_parallel_size=2)
    with thread_engine(folder) as llm:
        assert llm.generate("hello", SamplingParams(max_tokens=1))
