"""What must hold of a finished run.

Owns every comparison: each request with its one-shot result, what it says of the cache with
what the script made possible, and the counts of the engine with each other.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.engine.messages import EngineStats
from stagecoach.fuzz.oracle import Answer, Expected
from stagecoach.fuzz.script import Script
from stagecoach.request import TokenLogprobs

# Batches of other shapes add up in another order; nothing else may differ in float64.
LOGPROB_TOLERANCE = 1e-9


class Finding(NamedTuple):
    """What is wrong: the kind in a word, and a text that says all of it."""

    kind: str
    text: str


class Returned(Protocol):
    """A request of a run, as far as it is judged."""

    answer: Answer
    num_cached_tokens: int
    is_aborted: bool


def check(
    script: Script,
    expected: Sequence[Expected],
    requests: Sequence[Returned],
    stats: EngineStats,
) -> Finding | None:
    """The first thing that is wrong, or None."""
    for index, (item, got) in enumerate(zip(expected, requests, strict=True)):
        finding = _check_answer(item.answer, got)
        if finding is None:
            finding = _check_cached(script, expected, index, got.num_cached_tokens)
        if finding is not None:
            return Finding(finding.kind, f"request {index}: {finding.text}")
    return _check_stats(requests, stats)


def _check_answer(wanted: Answer, got: Returned) -> Finding | None:
    answer = got.answer
    num_tokens = len(answer.token_ids)
    if answer.token_ids != wanted.token_ids[:num_tokens]:
        place = next(
            place
            for place, pair in enumerate(
                zip(answer.token_ids, (*wanted.token_ids, *[None] * num_tokens), strict=False)
            )
            if pair[0] != pair[1]
        )
        return Finding(
            "tokens",
            f"output token {place} is {answer.token_ids[place]}: {list(answer.token_ids)}, "
            f"alone {list(wanted.token_ids)}",
        )
    if not got.is_aborted:
        for name in ("finish_reason", "stop_reason"):
            ours, theirs = getattr(answer, name), getattr(wanted, name)
            if ours != theirs:
                return Finding("ending", f"{name} {ours}, alone {theirs}")
        if num_tokens != len(wanted.token_ids):
            return Finding("tokens", f"{num_tokens} tokens, alone {len(wanted.token_ids)}")
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(answer, name), getattr(wanted, name)
        if not got.is_aborted and len(ours) != len(theirs):
            return Finding("logprobs", f"{len(ours)} {name}, alone {len(theirs)}")
        for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if not _are_close(one, other):
                return Finding("logprobs", f"{name} {place} is {one}, alone {other}")
    return None


def _are_close(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    if (one.token_id, one.rank, one.top_ids) != (other.token_id, other.rank, other.top_ids):
        return False
    pairs = zip((one.logprob, *one.top_logprobs), (other.logprob, *other.top_logprobs), strict=True)
    return all(abs(a - b) <= LOGPROB_TOLERANCE for a, b in pairs)


def _check_cached(
    script: Script, expected: Sequence[Expected], index: int, num_cached: int
) -> Finding | None:
    """No more than what requests of the same salt have in common with it, and never all of it."""
    ask, item = script.requests[index], expected[index]
    limit = 0
    is_cached = script.engine.get("enable_prefix_caching", True)
    if is_cached and not ask.params.skip_reading_prefix_cache:
        limit = max(
            (
                _num_common(item.prompt_token_ids, other.sequence)
                for place, (other, other_ask) in enumerate(
                    zip(expected, script.requests, strict=True)
                )
                if place != index and other_ask.salt == ask.salt
            ),
            default=0,
        )
    limit = min(limit, len(item.prompt_token_ids) - 1)
    if 0 <= num_cached <= limit:
        return None
    return Finding(
        "cached tokens",
        f"{num_cached} of {len(item.prompt_token_ids)} prompt tokens came from the cache, where "
        f"{limit} could",
    )


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _check_stats(requests: Sequence[Returned], stats: EngineStats) -> Finding | None:
    """Nothing is held, and counts agree."""
    wrong = []
    for name in ("pages", "slots"):
        free, total = getattr(stats, f"num_free_{name}"), getattr(stats, f"num_{name}")
        if free != total:
            wrong.append(f"{total - free} of {total} {name} are still held")
    if stats.num_running or stats.num_waiting:
        wrong.append(f"{stats.num_running} requests run, {stats.num_waiting} wait")
    if stats.prefix_cache is not None:
        wrong += _cache_faults(requests, stats.prefix_cache)
    return Finding("counts", "; ".join(wrong)) if wrong else None


def _cache_faults(requests: Sequence[Returned], cache: PrefixCacheStats) -> list[str]:
    faults = []
    told = sum(request.num_cached_tokens for request in requests)
    are_told = not any(request.is_aborted for request in requests)
    if told > cache.num_hit_tokens or (are_told and told != cache.num_hit_tokens):
        faults.append(f"requests tell of {told} cached tokens, {cache.num_hit_tokens} were")
    if cache.num_hits > cache.num_queries or cache.num_hit_tokens > cache.num_query_tokens:
        faults.append(f"more hits than queries: {cache}")
    if cache.num_queries > len(requests):
        faults.append(f"{cache.num_queries} queries of {len(requests)} requests")
    for cause in ("not_finite", "quarantine"):
        if cache.evictions.get(cause):
            faults.append(f"{cache.evictions[cause]} dropped from the cache: {cause}")
    if cache.num_mismatches:
        faults.append(f"{cache.num_mismatches} verified hits are wrong")
    return faults
