"""Shrinking: what is left is needed, and what was fixed stays."""

import time

import pytest

from stagecoach.errors import ConfigError
from stagecoach.fuzz.check import Finding
from stagecoach.fuzz.script import Ask, Script
from stagecoach.fuzz.shrink import shrink, without_request
from stagecoach.request import SamplingParams

FINDING = Finding("tokens", "wrong")
LONG = SamplingParams(temperature=0.7, max_tokens=9, logprobs=2)


def make_script() -> Script:
    return Script(
        model="tiny",
        engine={
            "pipeline_parallel_size": 3,
            "block_size": 16,
            "verify_cache": 0.5,
            "speculative_config": {"model": "tiny-draft", "num_speculative_tokens": 5},
        },
        draft_accuracy=0.5,
        resets=(3,),
        requests=(
            Ask(prompt="a16 b3", params=LONG, turn=2),
            Ask(prompt="c40", params=LONG, turn=4, salt="x", abort_after=3),
            Ask(prompt="@0 b9", params=LONG, turn=9, after=0),
            Ask(prompt="a16", params=LONG, turn=12, after=2),
        ),
    )


def answers(script: Script) -> list[tuple[int, ...]]:
    return [(1, 2)] * len(script.requests)


def test_what_does_not_matter_goes() -> None:
    """The failure needs two requests, the first of 11 tokens or more, and two stages."""

    def run(script: Script) -> Finding | None:
        first, *others = script.requests
        piece = first.prompt.split()[0]
        is_long = piece[0].isalpha() and int(piece[1:]) >= 11
        has_stages = script.engine.get("pipeline_parallel_size", 1) >= 2
        return FINDING if others and is_long and has_stages else None

    shrunk = shrink(make_script(), FINDING, run, answers)
    assert shrunk.finding == FINDING and shrunk.num_runs > 10
    assert shrunk.script.engine == {"pipeline_parallel_size": 2, "block_size": 8}
    first, second = (ask.prompt for ask in shrunk.script.requests)
    assert first == "a11" and len(second) == 2 and second[1] == "1"
    assert all(ask.turn == 0 and ask.after is None for ask in shrunk.script.requests)
    assert all(ask.params.max_tokens == 1 for ask in shrunk.script.requests)
    assert all(ask.params.logprobs is None for ask in shrunk.script.requests)
    assert not shrunk.script.resets


def test_fixed_options_stay() -> None:
    fixed = frozenset({"pipeline_parallel_size", "speculative_config"})
    shrunk = shrink(make_script(), FINDING, lambda script: FINDING, answers, fixed=fixed)
    assert shrunk.script.engine["pipeline_parallel_size"] == 3
    assert shrunk.script.engine["speculative_config"]["num_speculative_tokens"] == 5
    assert "verify_cache" not in shrunk.script.engine


def test_a_script_that_cannot_run_is_no_failure() -> None:
    script = make_script()

    def run(candidate: Script) -> Finding | None:
        if candidate != script:
            raise ConfigError("no such layout")
        return FINDING

    assert shrink(script, FINDING, run, answers).script == script


def test_time_is_bounded() -> None:
    began = time.monotonic()

    def run(script: Script) -> Finding | None:
        time.sleep(0.02)
        return None

    shrunk = shrink(make_script(), FINDING, run, answers, max_seconds=0.2)
    assert time.monotonic() - began < 5.0
    assert 0 < shrunk.num_runs < 60


@pytest.mark.parametrize("index", range(4))
def test_without_a_request_the_others_ask_the_same(index: int) -> None:
    script = make_script()
    shorter = without_request(script, index, (5, 6))
    assert len(shorter.requests) == 3
    if index == 0:
        assert [ask.prompt for ask in shorter.requests] == ["c40", "a16 b3 [5,6] b9", "a16"]
        assert [ask.after for ask in shorter.requests] == [None, None, 1]
    if index == 1:
        assert [ask.prompt for ask in shorter.requests] == ["a16 b3", "@0 b9", "a16"]
        assert [ask.after for ask in shorter.requests] == [None, 0, 1]
    if index == 2:
        assert [ask.after for ask in shorter.requests] == [None, None, 0]
