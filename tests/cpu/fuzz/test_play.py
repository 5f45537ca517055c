"""Playing scripts: a fixed seed set finds nothing, and every run of a script is the same run."""

from collections import Counter

import msgspec
import pytest

from stagecoach.engine.messages import EngineStats
from stagecoach.fuzz.draw import Given, draw_script
from stagecoach.fuzz.play import Outcome, Player
from stagecoach.fuzz.script import Ask, Script
from stagecoach.request import FinishReason, SamplingParams
from stagecoach.runner.memory_moves import MovablePools
from stagecoach.runner.newest_tokens import NewestTokens
from stagecoach.schedule.step_plan import StepPlan

NUM_SCHEDULES = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_a_fixed_seed_set_finds_nothing_and_does_everything(given: Given, player: Player) -> None:
    """Between them the schedules reach what can go wrong."""
    counts: Counter[str] = Counter()
    for index in range(NUM_SCHEDULES):
        script = draw_script(0, index, given._replace(has_vocabulary=index % 3 == 0))
        outcome = player.play(script)
        assert outcome.finding is None, f"schedule {index}: {outcome.finding}"
        assert outcome.stats is not None
        counts.update(_counted(script, outcome, outcome.stats))
    for name in (
        "preemptions",
        "aborted",
        "resets",
        "hits beside a salt",
        "accepted drafts",
        "hits",
        "evictions",
        "lost tokens",
        "resumed tokens",
        "stored",
        "loaded",
        "verified",
        "constrained",
        "whole texts",
    ):
        assert counts[name] > 0, f"no {name} in {NUM_SCHEDULES} schedules: {counts}"


def test_schedules_of_a_quantised_model_find_nothing(given: Given, player: Player) -> None:
    """Against one stage with as many ranks, as each quantises its own columns."""
    formats = {
        "online_quantization": "ptpc_fp8",
        "online_quantization_exclude": ["*.experts.*", "*.b_proj.*"],
        "kv_cache_dtype": "fp8",
    }
    ranks = set()
    for index in range(8):
        script = draw_script(5, index, given)
        script = msgspec.structs.replace(script, engine=script.engine | formats)
        ranks.add(script.engine["tensor_parallel_size"])
        if script.engine["tensor_parallel_size"] == 1:  # the experts have one group of columns
            script = msgspec.structs.replace(
                script, engine=script.engine | {"mxfp4_experts": "packed"}
            )
        outcome = player.play(script)
        assert outcome.finding is None, f"schedule {index}: {outcome.finding}"
        assert outcome.stats is not None
    assert len(ranks) > 1


def test_chained_schedules_find_nothing(
    given: Given, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps launched before the tokens of those before are back change none."""
    num_chained = 0
    told = NewestTokens.told

    def counted(self: NewestTokens, plan: StepPlan) -> StepPlan:
        nonlocal num_chained
        num_chained += sum(segment.is_chained for segment in plan.segments)
        return told(self, plan)

    monkeypatch.setattr(NewestTokens, "told", counted)
    options = given.options | {"async_scheduling": True}
    chaining = given._replace(options=options, layouts=((1, 1), (1, 2)), draft=None)
    for index in range(20):
        script = draw_script(1, index, chaining._replace(has_vocabulary=index % 5 == 0))
        finding = player.play(script).finding
        assert finding is None, f"schedule {index}: {finding}"
    assert num_chained > 150, num_chained


def _counted(script: Script, outcome: Outcome, stats: EngineStats) -> dict[str, int]:
    counts = {
        "preemptions": stats.num_preemptions,
        "resets": len(script.resets),
        "hits beside a salt": sum(
            ask.salt is not None and request.num_cached_tokens > 0
            for ask, request in zip(script.requests, outcome.requests, strict=True)
        ),
        "aborted": sum(request.is_aborted for request in outcome.requests),
    }
    for ask, request in zip(script.requests, outcome.requests, strict=True):
        if ask.params.structured_outputs is not None:
            counts["constrained"] = 1 + counts.get("constrained", 0)
            if request.answer.finish_reason is FinishReason.STOP:
                counts["whole texts"] = 1 + counts.get("whole texts", 0)
    if stats.speculation is not None:
        counts["accepted drafts"] = stats.speculation.num_accepted_tokens
    cache = stats.prefix_cache
    if cache is not None:
        counts |= {
            "hits": cache.num_hits,
            "evictions": sum(cache.evictions.values()),
            "lost tokens": cache.num_lost_tokens,
            "resumed tokens": cache.num_resumed_tokens,
            "stored": cache.num_stored,
            "loaded": cache.num_loaded,
            "verified": cache.num_verified,
        }
    return counts


@pytest.mark.parametrize("index", [3, 11])
def test_a_script_runs_the_same_each_time(index: int, given: Given, player: Player) -> None:
    script = draw_script(1, index, given)
    outcomes = [player.play(script), Player().play(script)]
    one, other = (
        msgspec.structs.replace(
            outcome.stats,
            loop_seconds=0.0,
            forward_seconds=0.0,
            step_seconds=0.0,
            uptime_seconds=0.0,
            stage_busy_seconds=(),
            stage_hop_seconds=(),
            stage_idle_seconds=(),
        )
        for outcome in outcomes
        if outcome.stats is not None
    )
    assert one == other
    assert outcomes[0].requests == outcomes[1].requests


def test_turns_say_when_requests_arrive_and_are_aborted(model: str, player: Player) -> None:
    script = Script(
        model=model,
        engine={"dtype": "float64", "debug_poison": True, "max_model_len": 64, "block_size": 8},
        requests=(
            Ask(prompt="a9", params=GREEDY, turn=2),
            Ask(prompt="b9", params=GREEDY, turn=3, abort_after=2),
            Ask(prompt="@0 c1", params=GREEDY, after=0),
            Ask(prompt="a9", params=GREEDY, turn=500),
        ),
    )
    outcome = player.play(script)
    assert outcome.finding is None
    first, aborted, behind, late = outcome.requests
    assert (first.arrival, aborted.arrival, late.arrival) == (2, 3, 500)
    assert aborted.is_aborted and len(aborted.answer.token_ids) == 2
    assert behind.arrival is not None and behind.arrival >= 2 + 6
    assert first.answer.finish_reason is FinishReason.LENGTH
    assert behind.num_cached_tokens >= 9, "it goes on from the end of the first answer"
    assert late.num_cached_tokens == 8


def test_a_verified_hit_that_is_wrong_is_a_finding_that_names_it(
    model: str, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check but the verification is on, and the answer may well be right."""
    script = Script(
        model=model,
        engine={"dtype": "float64", "max_model_len": 64, "block_size": 8, "verify_cache": 1.0},
        requests=(Ask(prompt="a13", params=GREEDY), Ask(prompt="a13", params=GREEDY, after=0)),
    )
    assert player.play(script).finding is None
    monkeypatch.setattr(MovablePools, "_copy", lambda self, copies: None)
    finding = player.play(script).finding
    assert finding is not None and finding.kind == "AssertionError"
    assert finding.text.startswith("a hit at 12 of 13 tokens of request 1 is wrong: the state ")


def test_an_exception_is_a_finding_that_names_its_place(
    model: str, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    script = Script(
        model=model,
        engine={"dtype": "float64", "max_model_len": 64},
        requests=(Ask(prompt="a9", params=GREEDY),),
    )
    player.oracle.expect(script, _resolved(script))
    monkeypatch.setattr("stagecoach.engine.worker.plan_digest", fail)
    finding = player.play(script).finding
    assert finding is not None and finding.kind == "RuntimeError"
    assert finding.text.startswith("out of luck (stagecoach/engine/worker.py, line ")
    monkeypatch.undo()
    assert player.play(script).finding is None, "a failure leaves nothing behind"


def _resolved(script: Script) -> object:
    from stagecoach.resolve import resolve

    return resolve(script.engine_config())
