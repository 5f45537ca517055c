"""Makes a failing script short: what is left is needed for the failure.

Owns what counts as simpler and the order in which it is tried: fewer requests, plainer engines,
plainer requests, shorter prompts. Whether a script still fails is the caller's to say.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from stagecoach.errors import StagecoachError
from stagecoach.fuzz.check import Finding
from stagecoach.fuzz.script import Ask, Script
from stagecoach.request import SamplingParams

# Simpler values of an option, the simplest first; None: the default.
_SIMPLER_OPTIONS: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_size": (1, 2),
    "tensor_parallel_size": (1, 2),
    "speculative_config": (None,),
    "kv_offloading_size": (None,),
    "verify_cache": (None,),
    "enable_prefix_caching": (False,),
    "state_checkpoint_interval": (0,),
    "max_state_checkpoints": (None, 8),
    "max_num_batched_tokens": (256, 64),
    "num_gpu_blocks_override": (256, 64),
    "max_num_seqs": (1, 2, 4),
    "block_size": (8, 4),
}
_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Shrunk(NamedTuple):
    """What a script was shrunk to."""

    script: Script
    finding: Finding
    num_runs: int


def shrink(
    script: Script,
    finding: Finding,
    run: Callable[[Script], Finding | None],
    answers: Callable[[Script], Sequence[Sequence[int]]],
    *,
    fixed: frozenset[str] = frozenset(),
    max_seconds: float = 60.0,
) -> Shrunk:
    """The smallest script found that still fails; the script itself at worst.

    Args:
        run: runs a script; a StagecoachError says that there is no such script.
        answers: the one-shot answer of each request of a script.
        fixed: engine options that stay as they are.
        max_seconds: time for it all; a run that has begun is awaited.
    """
    deadline = time.monotonic() + max_seconds
    best = Shrunk(script, finding, 0)
    num_runs = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for simpler in _passes(best.script, answers, fixed):
            # A pass goes on from the smallest script found in it.
            place = 0
            while (candidate := simpler(best.script, place)) is not None:
                if time.monotonic() > deadline:
                    return best._replace(num_runs=num_runs)
                num_runs += 1
                failure = _try(run, candidate)
                if failure is None:
                    place += 1
                else:
                    best = Shrunk(candidate, failure, num_runs)
                    is_smaller = True
    return best._replace(num_runs=num_runs)


def _try(run: Callable[[Script], Finding | None], script: Script) -> Finding | None:
    try:
        return run(script)
    except StagecoachError:
        return None


# The `place`-th simpler form of a script; None when there are no more.
_Pass = Callable[[Script, int], Script | None]


def _passes(
    script: Script,
    answers: Callable[[Script], Sequence[Sequence[int]]],
    fixed: frozenset[str],
) -> list[_Pass]:
    def drop(script: Script, place: int) -> Script | None:
        index = len(script.requests) - 1 - place
        if index < 0 or len(script.requests) == 1:
            return None
        return without_request(script, index, answers(script)[index])

    return [
        drop,
        _listed(lambda script: _plainer_engines(script, fixed)),
        _listed(_plainer_requests),
        _listed(_shorter_prompts),
    ]


def _listed(candidates: Callable[[Script], Iterator[Script]]) -> _Pass:
    """A pass over all that differ from the script."""

    def nth(script: Script, place: int) -> Script | None:
        remaining = place
        for candidate in candidates(script):
            if candidate == script:
                continue
            if not remaining:
                return candidate
            remaining -= 1
        return None

    return nth


def without_request(script: Script, index: int, answer: Sequence[int]) -> Script:
    """A script without one request; whoever goes on from it holds its prompt and answer."""
    gone = script.requests[index]
    text = f"{gone.prompt} [{','.join(map(str, answer))}]"

    def moved(match: re.Match[str]) -> str:
        other = int(match[1])
        return text if other == index else f"@{other - (other > index)}"

    requests = []
    for ask in (*script.requests[:index], *script.requests[index + 1 :]):
        after = ask.after
        if after is not None:
            after = gone.after if after == index else after - (after > index)
        requests.append(
            msgspec.structs.replace(ask, prompt=re.sub(r"@(\d+)", moved, ask.prompt), after=after)
        )
    return msgspec.structs.replace(script, requests=tuple(requests))


def _plainer_engines(script: Script, fixed: frozenset[str]) -> Iterator[Script]:
    replace = msgspec.structs.replace
    yield replace(script, resets=())
    yield replace(script, has_ragged_windows=False)
    for name, simpler in _SIMPLER_OPTIONS.items():
        if name in fixed or name not in script.engine:
            continue
        for value in simpler:
            if value == script.engine[name]:
                break
            options = {key: item for key, item in script.engine.items() if key != name}
            yield replace(script, engine=options if value is None else options | {name: value})
    speculation = script.engine.get("speculative_config")
    if speculation and "speculative_config" not in fixed:
        for num_drafts in range(1, speculation.get("num_speculative_tokens", 1)):
            shorter = speculation | {"num_speculative_tokens": num_drafts}
            yield replace(script, engine=script.engine | {"speculative_config": shorter})
    if script.draft_accuracy not in (None, 1.0):
        yield replace(script, draft_accuracy=1.0)


def _plainer_requests(script: Script) -> Iterator[Script]:
    for index, ask in enumerate(script.requests):
        for plainer in _plainer(ask):
            yield _with_request(script, index, plainer)


def _plainer(ask: Ask) -> Iterator[Ask]:
    replace = msgspec.structs.replace
    for name in ("abort_after", "salt", "checkpoint_position", "after"):
        yield replace(ask, **{name: None})
    yield replace(ask, turn=0)
    yield replace(ask, turn=ask.turn // 2)
    params, most = ask.params, ask.params.max_tokens or 1
    yield replace(ask, params=SamplingParams(**_GREEDY, max_tokens=most))
    if params.structured_outputs is not None:
        bare = SamplingParams(
            temperature=0.0, max_tokens=most, structured_outputs=params.structured_outputs
        )
        yield replace(ask, params=bare)
    for num_tokens in (1, most // 2, most - 1):
        if 0 < num_tokens < most:
            shorter = replace(
                params, max_tokens=num_tokens, min_tokens=min(params.min_tokens, num_tokens)
            )
            yield replace(ask, params=shorter)


def _shorter_prompts(script: Script) -> Iterator[Script]:
    for index, ask in enumerate(script.requests):
        pieces = ask.prompt.split()
        for place, piece in enumerate(pieces):
            before, behind = pieces[:place], pieces[place + 1 :]
            if len(pieces) > 1:
                yield _with_prompt(script, index, [*before, *behind])
            if not piece[0].isalpha():
                continue
            length = int(piece[1:])
            for shorter in dict.fromkeys((1, length // 2, length * 3 // 4, length - 1)):
                if 0 < shorter < length:
                    yield _with_prompt(script, index, [*before, f"{piece[0]}{shorter}", *behind])


def _with_prompt(script: Script, index: int, pieces: Sequence[str]) -> Script:
    ask = msgspec.structs.replace(script.requests[index], prompt=" ".join(pieces))
    return _with_request(script, index, ask)


def _with_request(script: Script, index: int, ask: Ask) -> Script:
    requests = (*script.requests[:index], ask, *script.requests[index + 1 :])
    return msgspec.structs.replace(script, requests=requests)
