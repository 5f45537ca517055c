"""Grammars that are compiled beside the loop: who waits, who does not, and what is left over."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.config.engine import ResolvedSpeculation
from stagecoach.engine.compiling import CompilePool, Job
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import (
    Abort,
    EngineFailed,
    EngineStats,
    ForgetClient,
    GetStats,
    GetTimeline,
    Hello,
    Outputs,
    RequestRefused,
    RunPlan,
    Shutdown,
    Submit,
    Timeline,
    TokenMasks,
)
from stagecoach.engine.ports import CLIENT_SHIFT
from stagecoach.errors import RequestError
from stagecoach.request import FinishReason, StructuredOutputsParams
from tests.cpu.engine.fakes import (
    ScriptedPort,
    endings,
    expected_tokens,
    outputs,
    resolved,
    submit,
)
from tests.cpu.table_constraint import TableCompiler, TableConstraint, line, table, use_tables

pytestmark = pytest.mark.cpu

_SECONDS = 20.0
VOCAB_SIZE = 512


def constrained(request_id: int, number: int = 0, **params: Any) -> Submit:
    return submit(request_id, structured_outputs=table(number), **params)


class Run:
    """A loop whose compiles happen when the script says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *tables: Any, **options: Any) -> None:
        use_tables(monkeypatch, list(tables))
        self.config = resolved(debug_poison=True, **options)
        self.port = ScriptedPort(self.config)
        self.port.say(Hello())
        self.port.ready()
        self.jobs: list[Job] = []
        self.loop = EngineLoop(self.config, self.port, start_compile=self.jobs.append)

    def compile(self, count: int = 1) -> Callable[[], None]:
        def act() -> None:
            for _ in range(count):
                self.jobs.pop(0)()

        return act

    def run(self) -> ScriptedPort:
        self.loop.run()
        return self.port


def test_a_request_waits_for_its_grammar_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, later = constrained(1), submit(2)
    run = Run(monkeypatch, line(*expected_tokens(slow), 0))
    port = run.port

    def ask() -> None:
        port.say(slow)
        port.say(later)
        port.say(GetStats(query_id=1))
        port.say(GetTimeline(query_id=2, first_step=0))

    def served() -> None:
        assert outputs(port, 2) == expected_tokens(later)
        assert outputs(port, 1) == [] and not run.loop.scheduler.has_work
        run.compile()()
        assert port.num_wakes == 1

    port.then(ask, port.finish_plan, port.finish_plan, served, port.finish_all)
    run.run()
    [stats] = port.sent(EngineStats)
    assert (stats.num_waiting, stats.num_running, stats.num_prompt_tokens) == (2, 0, 3)
    [timeline] = port.sent(Timeline)
    assert {item.request_id: item.state for item in timeline.requests} == {
        1: "compiling",
        2: "waiting",
    }
    assert outputs(port, 1) == expected_tokens(slow)
    assert endings(port) == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}


def test_masks_come_behind_their_plan_and_to_the_one_that_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = constrained(1)
    run = Run(
        monkeypatch,
        line(*expected_tokens(asked), 0),
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        max_num_batched_tokens=2,
    )
    port = run.port
    port.then(lambda: port.say(asked), run.compile(), port.finish_all)
    run.run()
    # The first plan holds a part of the prompt, and nothing of it is sampled.
    sent = [message for message in port.to_workers if isinstance(message, RunPlan | TokenMasks)]
    assert [type(message) for message in sent] == [
        RunPlan,
        RunPlan,
        TokenMasks,
        RunPlan,
        TokenMasks,
    ]
    masks = [message for _, message in port.to_one_worker if isinstance(message, TokenMasks)]
    assert [message.step for message in masks] == [1, 2]
    assert {rank for rank, _ in port.to_one_worker} == {port.topology.sampler_rank} == {2}
    for message, token_id in zip(masks, expected_tokens(asked), strict=True):
        bits = int.from_bytes(message.masks, "little")
        assert len(message.masks) == VOCAB_SIZE // 8 and bits == 1 << token_id


def test_a_grammar_that_cannot_be_compiled_refuses_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch)
    port = run.port
    nonsense = StructuredOutputsParams(regex="nonsense here")
    port.then(
        lambda: port.say(submit(1, structured_outputs=nonsense)), run.compile(), port.finish_all
    )
    run.run()
    [refused] = port.sent(RequestRefused)
    assert (refused.request_id, refused.field) == (1, "structured_outputs")
    assert "nonsense" in refused.reason
    assert not run.loop.scheduler.has_work


def test_what_is_wrong_besides_is_told_before_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_model_len=16)
    port = run.port

    def ask() -> None:
        port.say(submit(1, structured_outputs=table(0), num_prompt_tokens=16))
        port.say(submit(2, structured_outputs=table(0), ignore_eos=True))
        port.say(submit(3, structured_outputs=StructuredOutputsParams()))

    port.then(ask, port.finish_all)
    run.run()
    assert not run.jobs
    refused = [(message.request_id, message.field) for message in port.sent(RequestRefused)]
    assert refused == [(1, "prompt"), (2, "structured_outputs"), (3, "structured_outputs")]


def test_drafts_that_stand_whatever_the_target_says_obey_no_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch)
    speculation = ResolvedSpeculation(
        draft=None,  # type: ignore[arg-type]
        checkpoint=None,  # type: ignore[arg-type]
        num_speculative_tokens=3,
        acceptance="shared",
        has_confidence_schedule=False,
        has_watchdog=False,
        synthetic_acceptance_length=2.5,
    )
    object.__setattr__(run.config, "speculation", speculation)
    port = run.port
    port.then(lambda: port.say(constrained(1)), port.finish_all)
    run.run()
    [refused] = port.sent(RequestRefused)
    assert refused.field == "structured_outputs"
    assert "synthetic_acceptance_length=2.5" in refused.reason and not run.jobs


@pytest.mark.parametrize("is_late", [False, True])
def test_an_abort_while_a_grammar_is_compiled_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Before its compile began, or when the result is there and not taken yet."""
    run = Run(monkeypatch, line(*expected_tokens(constrained(2)), 0))
    port = run.port

    def ask() -> None:
        port.say(constrained(1))
        port.say(constrained(2))

    def abort() -> None:
        if is_late:
            run.compile()()
        port.say(Abort(request_ids=(1, 77)))

    port.then(ask, abort, run.compile(1 if is_late else 2), port.finish_all)
    run.run()
    assert outputs(port, 1) == [] and not port.sent(RequestRefused)
    assert outputs(port, 2) == expected_tokens(constrained(2))
    run.loop.scheduler.check_idle()


def test_of_a_client_that_is_gone_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = constrained((1 << CLIENT_SHIFT) + 1)
    ours = constrained(1)
    run = Run(monkeypatch, line(*expected_tokens(ours), 0))
    port = run.port

    def ask() -> None:
        port.say(Hello(), client=1)
        port.say(theirs, client=1)
        port.say(ours)
        port.say(ForgetClient(client=1))

    port.then(ask, run.compile(2), port.finish_all)
    run.run()
    assert outputs(port, 1) == expected_tokens(ours)
    assert not outputs(port, theirs.request_id) and not port.sent(RequestRefused)


def test_a_shutdown_does_not_wait_for_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    port = run.port
    port.then(lambda: port.say(constrained(1)), lambda: port.say(Shutdown()))
    run.run()
    assert not port.sent(EngineFailed)
    run.compile()()  # too late: nobody is told
    assert not port.sent(RequestRefused)


def test_a_grammar_that_ends_in_the_middle_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an error, when its next row is committed; what was committed stays."""
    broken, free = constrained(1, max_tokens=6), submit(2, max_tokens=6)
    run = Run(monkeypatch, line(*expected_tokens(broken), 0))
    port = run.port
    grammars: list[TableConstraint] = []
    compile_table = TableCompiler.compile

    def keep(compiler: TableCompiler, params: StructuredOutputsParams) -> TableConstraint:
        grammars.append(compile_table(compiler, params))
        return grammars[-1]

    monkeypatch.setattr(TableCompiler, "compile", keep)

    def ask() -> None:
        port.say(broken)
        port.say(free)

    def spoil() -> None:
        grammars[0].error = "too many states"
        port.finish_plan()

    port.then(ask, run.compile(), port.finish_plan, port.finish_plan, spoil, port.finish_all)
    run.run()
    assert endings(port) == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert 0 < len(outputs(port, 1)) < 6 and len(outputs(port, 2)) == 6
    errors = {item.error for message in port.sent(Outputs) for item in message.items}
    assert errors == {None, "GrammarError: too many states"}


# The pool by itself, with its threads.


class SlowCompiler:
    """Compiles what it is told to; `regex` "wait" waits until it may end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_compiled = 0

    def compile(self, params: StructuredOutputsParams) -> TableConstraint:
        if params.regex == "wait":
            assert self.may_end.wait(_SECONDS)
        if params.regex == "bug":
            raise KeyError("oh")
        self.num_compiled += 1
        return TableConstraint(line(1), VOCAB_SIZE)


def asked(request_id: int, regex: str) -> Submit:
    return submit(request_id, structured_outputs=StructuredOutputsParams(regex=regex))


def test_one_slow_compile_does_not_hold_up_another() -> None:
    compiler, woken = SlowCompiler(), threading.Semaphore(0)
    pool = CompilePool(lambda: compiler, woken.release)
    pool.submit(0, asked(1, "wait"))
    pool.submit(3, asked(2, "quick"))
    assert woken.acquire(timeout=_SECONDS)
    [compiled] = pool.take_compiled()
    assert (compiled.client, compiled.message.request_id) == (3, 2)
    assert isinstance(compiled.outcome, TableConstraint)
    assert [item.message.request_id for item in pool.waiting] == [1]
    compiler.may_end.set()
    assert woken.acquire(timeout=_SECONDS)
    assert [item.message.request_id for item in pool.take_compiled()] == [1]
    assert not pool.waiting
    pool.close()


def test_a_flood_of_large_grammars_holds_up_no_small_one() -> None:
    jobs: list[Job] = []
    compiler = SlowCompiler()
    pool = CompilePool(lambda: compiler, lambda: None, jobs.append)
    for number, regex in enumerate(("quick" + " " * 900, "quick" + " " * 500, "quick", "quick")):
        pool.submit(0, asked(number, regex))
    order = []
    for job in jobs:
        job()
        order += [item.message.request_id for item in pool.take_compiled()]
    assert order == [2, 3, 1, 0]


def test_threads_are_few_and_end_with_the_pool() -> None:
    compiler, woken = SlowCompiler(), threading.Semaphore(0)
    pool = CompilePool(lambda: compiler, woken.release)
    before = threading.active_count()
    for number in range(20):
        pool.submit(0, asked(number, "wait"))
    assert threading.active_count() - before <= 4
    for number in range(10, 20):
        pool.abort(number)
    compiler.may_end.set()
    for _ in range(10):
        assert woken.acquire(timeout=_SECONDS)
    assert {item.message.request_id for item in pool.take_compiled()} == set(range(10))
    # Those that nobody waited for any more were not begun.
    assert compiler.num_compiled == 10
    pool.close()
    deadline = time.monotonic() + _SECONDS
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "a thread of the pool hangs"
        time.sleep(0.005)


def test_a_fault_of_the_compiler_ends_one_request() -> None:
    woken = threading.Semaphore(0)
    pool = CompilePool(SlowCompiler, woken.release)
    pool.submit(0, asked(1, "bug"))
    assert woken.acquire(timeout=_SECONDS)
    [compiled] = pool.take_compiled()
    assert isinstance(compiled.outcome, RequestError)
    assert compiled.outcome.field == "structured_outputs" and "oh" in compiled.outcome.reason
    pool.submit(0, asked(2, "fine"))
    assert woken.acquire(timeout=_SECONDS)
    assert isinstance(pool.take_compiled()[0].outcome, TableConstraint)
    pool.close()


def test_the_compiler_is_made_once_and_only_when_it_is_wanted() -> None:
    made: list[SlowCompiler] = []

    def load() -> SlowCompiler:
        made.append(SlowCompiler())
        return made[-1]

    done = threading.Semaphore(0)
    pool = CompilePool(load, done.release)
    assert not made
    for number in range(6):
        pool.submit(0, asked(number, "fine"))
    for _ in range(6):
        assert done.acquire(timeout=_SECONDS)
    assert len(made) == 1
    pool.close()


LEAVING = """
import time

from stagecoach.config.engine import EngineConfig
from stagecoach.engine.compiling import CompilePool, load_compiler
from stagecoach.engine.messages import Submit
from stagecoach.request import SamplingParams, StructuredOutputsParams
from stagecoach.resolve import resolve

config = resolve(EngineConfig(model="tiny"))
compiler = load_compiler(config)
grammar = StructuredOutputsParams(json={"enum": [f"value {number}" for number in range(4000)]})
pool = CompilePool(lambda: compiler, lambda: None)
params = SamplingParams(structured_outputs=grammar)
pool.submit(0, Submit(request_id=1, prompt_token_ids=(1,), params=params, seed=0))
time.sleep(0.1)
pool.close()
"""


def test_a_process_may_end_in_the_middle_of_a_compile() -> None:
    """A thread that came back from one into a Python that is gone would crash it."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", LEAVING],
        cwd=root,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


class Recorder:
    """Compiles nothing, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[StructuredOutputsParams] = []

    def compile(self, params: StructuredOutputsParams) -> TableConstraint:
        self.asked.append(params)
        raise RequestError("structured_outputs", "nothing is compiled here")


def test_the_vocabulary_is_read_while_weights_load_if_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder()
    monkeypatch.setattr("stagecoach.engine.compiling.load_compiler", lambda config: recorder)
    config = resolved()
    jobs: list[Job] = []
    for is_prepared in (False, True):
        # It has not heard of a worker yet.
        EngineLoop(
            config,
            ScriptedPort(config),
            start_compile=jobs.append,
            prepares_grammars=is_prepared,
        )
        assert len(jobs) == is_prepared
    jobs[0]()
    assert len(recorder.asked) == 1


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_model_without_a_vocabulary_refuses_the_request(is_prepared: bool, tmp_path: Any) -> None:
    config = resolved(checkpoint=tmp_path, debug_poison=True)
    port = ScriptedPort(config)
    port.say(Hello())
    port.ready()
    loop = EngineLoop(config, port, start_compile=lambda job: job(), prepares_grammars=is_prepared)
    port.then(lambda: port.say(constrained(1)), port.finish_all)
    loop.run()
    [refused] = port.sent(RequestRefused)
    assert refused.field == "structured_outputs" and "tokenizer" in refused.reason
