"""The engine loop and the prefix cache: what requests ask of it, and what it tells."""

from typing import Any

import msgspec
import pytest

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.engine.messages import (
    EngineStats,
    GetStats,
    Outputs,
    ResetPrefixCache,
    Shutdown,
    StepEcho,
    Submit,
)
from stagecoach.engine.mismatch_report import MismatchReporter
from stagecoach.schedule.shadow import Shadows, Verdict
from stagecoach.schedule.step_plan import plan_digest
from tests.cpu.engine.fakes import LoopRun, ScriptedPort, submit

pytestmark = pytest.mark.cpu


def run_one_after_the_other(run: LoopRun, *messages: Submit | ResetPrefixCache) -> ScriptedPort:
    """Each request ends before the next comes; then the engine tells its counts and ends."""
    port = run.port
    waiting = list(messages)

    def next_event() -> None:
        if port.plans:
            port.finish_plan()
        elif waiting:
            port.say(waiting.pop(0))
        else:
            port.say(GetStats(query_id=1))
            port.say(Shutdown())
            return
        port.events.appendleft(next_event)

    port.then(next_event)
    return run.run()


def cached_tokens(port: ScriptedPort) -> dict[int, int]:
    """Prompt tokens that a hit spared each request, by its id."""
    return {
        progress.request_id: progress.num_cached_tokens
        for message in port.sent(Outputs)
        for progress in message.items
    }


def cache_stats(port: ScriptedPort) -> PrefixCacheStats | None:
    [stats] = port.sent(EngineStats)
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)
    return stats.prefix_cache


def salted(request_id: int, salt: str | None, **fields: Any) -> Submit:
    return msgspec.structs.replace(submit(request_id, num_prompt_tokens=10), cache_salt=salt)


def test_only_requests_with_the_same_salt_share() -> None:
    salts = (None, "a", "a", "b", None)
    requests = [salted(number, salt) for number, salt in enumerate(salts, start=1)]
    port = run_one_after_the_other(LoopRun(), *requests)
    assert cached_tokens(port) == {1: 0, 2: 0, 3: 9, 4: 0, 5: 9}


def test_a_checkpoint_is_left_where_a_request_asks_for_it() -> None:
    plain = submit(1, num_prompt_tokens=11)
    # It parts from the first behind the seventh token.
    other = (*plain.prompt_token_ids[:7], 90, 91)
    second = msgspec.structs.replace(submit(2), prompt_token_ids=other)
    for position, num_cached in ((None, 0), (6, 6), (8, 0)):
        first = msgspec.structs.replace(plain, checkpoint_position=position)
        run = LoopRun(state_checkpoint_interval=0)
        assert cached_tokens(run_one_after_the_other(run, first, second)) == {1: 0, 2: num_cached}


def test_a_reset_forgets_what_was_before_it() -> None:
    requests = [submit(number, num_prompt_tokens=10) for number in (1, 2, 3, 4)]
    first, second, third, fourth = requests
    port = run_one_after_the_other(LoopRun(), first, second, ResetPrefixCache(), third, fourth)
    assert cached_tokens(port) == {1: 0, 2: 9, 3: 0, 4: 9}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_statistics_have_the_bytes_on_all_workers(num_stages: int) -> None:
    run = LoopRun(pipeline_parallel_size=num_stages, tensor_parallel_size=2)
    requests = [submit(number, num_prompt_tokens=10) for number in (1, 2)]
    stats = cache_stats(run_one_after_the_other(run, *requests))
    assert stats is not None
    assert (stats.num_queries, stats.num_hits) == (2, 1)
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (20, 9)
    assert stats.num_cached_pages > 0 and stats.num_checkpoints > 0
    each = stats.num_cached_pages * 64 + stats.num_checkpoints * 128
    assert (stats.device_bytes, stats.host_bytes) == (2 * num_stages * each, 0)


def test_without_a_cache_there_are_no_statistics_of_it() -> None:
    run = LoopRun(enable_prefix_caching=False)
    requests = [submit(number, num_prompt_tokens=10) for number in (1, 2)]
    port = run_one_after_the_other(run, *requests, ResetPrefixCache())
    assert cached_tokens(port) == {1: 0, 2: 0}
    assert cache_stats(port) is None


def test_the_host_tier_is_allocated_within_its_bytes() -> None:
    gib = 1 << 30
    run = LoopRun(
        pipeline_parallel_size=2, max_num_seqs=2, max_model_len=32, kv_offloading_size=4096 / gib
    )
    run.port.then(lambda: run.port.say(Shutdown()))
    run.run()
    [memory] = [item.memory for item in run.port.to_workers if hasattr(item, "memory")]
    assert memory.num_host_pages > 0 and memory.num_host_slots > 0
    assert 2 * (memory.num_host_pages * 64 + memory.num_host_slots * 128) <= 4096


def test_differences_of_all_workers_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, tuple[float, ...]]] = []
    monkeypatch.setattr(
        Shadows,
        "note_differences",
        lambda _, step, differences: noted.append((step, differences)),
    )
    run = LoopRun(pipeline_parallel_size=2)
    port = run.port

    def answer() -> None:
        plan = port.plans.popleft()
        name = port.topology.worker(0).name
        digest = plan_digest(port.encoded[plan.step])
        port.reply(
            StepEcho(
                worker=name, step=plan.step, digest=digest, busy_seconds=0.1, differences=(0.5, 0.0)
            )
        )
        port.result(plan)

    port.then(lambda: port.say(submit(1, max_tokens=1)), answer, port.finish_all)
    run.run()
    assert (0, (0.5, 0.0)) in noted


def test_a_verdict_of_the_last_echo_is_reported_though_nothing_else_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker that compares last is not the one that samples; then the engine is shut down."""
    verdict = Verdict(1, (5, 6), 1, 0.5, 0.0, 1e-9)
    reported: list[Verdict] = []
    monkeypatch.setattr(
        Shadows, "note_differences", lambda self, *_: self._verdicts.append(verdict)
    )
    monkeypatch.setattr(MismatchReporter, "report", lambda _, item: reported.append(item))
    run = LoopRun(pipeline_parallel_size=2)
    port = run.port
    late: list[StepEcho] = []

    def result_without_echo() -> None:
        plan = port.plans.popleft()
        digest = plan_digest(port.encoded[plan.step])
        late.append(
            StepEcho(
                worker=port.topology.worker(0).name,
                step=plan.step,
                digest=digest,
                busy_seconds=0.1,
                differences=(0.5,),
            )
        )
        port.result(plan)

    port.then(
        lambda: port.say(submit(1, max_tokens=1)),
        result_without_echo,
        lambda: (reported.clear(), port.reply(late[0])),
        lambda: port.say(Shutdown()),
    )
    run.run()
    assert reported == [verdict]
