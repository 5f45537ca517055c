"""The judge of a run: each thing that can be wrong is told apart."""

from dataclasses import dataclass, field, replace

import msgspec
import pytest

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.engine.messages import EngineStats
from stagecoach.fuzz.check import check
from stagecoach.fuzz.oracle import Answer, Expected
from stagecoach.fuzz.script import Ask, Script
from stagecoach.request import FinishReason, SamplingParams, TokenLogprobs
from tests.engine_stats import engine_stats

PARAMS = SamplingParams(logprobs=1)
ANSWER = Answer(
    (4, 5),
    (TokenLogprobs(4, -0.5, 1, (4,), (-0.5,)), TokenLogprobs(5, -1.5, 2, (9,), (-1.0,))),
    (),
    FinishReason.LENGTH,
)
CUT = TokenLogprobs(5, -1.5 + 1e-6, 2, (9,), (-1.0,))
STATS = engine_stats(
    num_steps=3,
    num_pages=8,
    num_free_pages=8,
    num_slots=4,
    num_free_slots=4,
    prefix_cache=PrefixCacheStats(num_queries=2, num_hits=1, num_query_tokens=6, num_hit_tokens=2),
)


@dataclass
class Got:
    """One request of a run."""

    answer: Answer = ANSWER
    num_cached_tokens: int = 0
    is_aborted: bool = False


@dataclass
class Run:
    """Two requests, the second of which found the first two tokens cached."""

    salts: tuple[str | None, str | None] = (None, None)
    requests: list[Got] = field(default_factory=lambda: [Got(), Got(num_cached_tokens=2)])
    stats: EngineStats = STATS

    def kind(self) -> str | None:
        prompts = ((1, 2, 3), (1, 2, 8))
        script = Script(
            model="tiny",
            requests=tuple(Ask(prompt="a3", params=PARAMS, salt=salt) for salt in self.salts),
        )
        expected = [Expected(prompt, PARAMS, ANSWER) for prompt in prompts]
        finding = check(script, expected, self.requests, self.stats)
        return None if finding is None else finding.kind


def test_a_run_as_it_should_be() -> None:
    assert Run().kind() is None


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ANSWER._replace(token_ids=(4, 6)), "tokens"),
        (ANSWER._replace(token_ids=(4, 5, 5)), "tokens"),
        (ANSWER._replace(token_ids=(4,)), "tokens"),
        (ANSWER._replace(finish_reason=FinishReason.STOP), "ending"),
        (ANSWER._replace(stop_reason=5), "ending"),
        (ANSWER._replace(logprobs=(ANSWER.logprobs[0], CUT)), "logprobs"),
        (ANSWER._replace(logprobs=ANSWER.logprobs[:1]), "logprobs"),
        (ANSWER._replace(prompt_logprobs=ANSWER.logprobs), "logprobs"),
    ],
)
def test_an_answer_that_differs(answer: Answer, kind: str) -> None:
    assert Run(requests=[Got(answer), Got(num_cached_tokens=2)]).kind() == kind


def test_an_aborted_request_has_the_beginning_of_its_answer() -> None:
    part = Answer(ANSWER.token_ids[:1], ANSWER.logprobs[:1])
    assert Run(requests=[Got(part, is_aborted=True), Got(num_cached_tokens=2)]).kind() is None
    wrong = part._replace(token_ids=(6,))
    assert Run(requests=[Got(wrong, is_aborted=True), Got()]).kind() == "tokens"


def test_cached_tokens_are_of_a_common_beginning_and_the_same_salt() -> None:
    assert Run(requests=[Got(), Got(num_cached_tokens=3)]).kind() == "cached tokens"
    assert Run(salts=(None, "x")).kind() == "cached tokens"
    assert Run(salts=("x", "x")).kind() is None


@pytest.mark.parametrize(
    "changes",
    [{"num_free_pages": 7}, {"num_free_slots": 3}, {"num_running": 1}, {"num_waiting": 1}],
)
def test_something_is_still_held(changes: dict[str, int]) -> None:
    assert Run(stats=msgspec.structs.replace(STATS, **changes)).kind() == "counts"


@pytest.mark.parametrize(
    "changes",
    [{"num_hit_tokens": 1}, {"num_hit_tokens": 3}, {"num_hits": 3}, {"num_mismatches": 1},
     {"num_queries": 3}, {"evictions": {"room": 2, "quarantine": 1}},
     {"evictions": {"not_finite": 1}}],
)  # fmt: skip
def test_counts_of_the_cache_that_disagree(changes: dict[str, int]) -> None:
    assert STATS.prefix_cache is not None
    cache = msgspec.structs.replace(STATS.prefix_cache, **changes)
    run = replace(Run(), stats=msgspec.structs.replace(STATS, prefix_cache=cache))
    assert run.kind() == "counts"
