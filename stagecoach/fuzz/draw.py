"""Random scripts from a seed.

Owns what is worth trying: lengths around every boundary, prefixes that are shared and part,
conversations, pools so small that requests are preempted and cached prefixes evicted. What the
caller has fixed is never drawn. Runs nothing.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.fuzz.grammars import WANTED
from stagecoach.fuzz.script import Ask, Script
from stagecoach.request import SamplingParams

# Tokens that the chunked recurrence works through at once.
_KERNEL_BLOCK = 64
_CONV_ROWS = 3
_LONGEST = 160
_CROWDED_LENGTH = 40
_FAMILIES = "ab"
# Of a schedule; each of its requests has one of them.
_SALTS: tuple[tuple[str | None, ...], ...] = (
    (None,), (None,), (None,), (None, "x"), (None, "x", "y")
)  # fmt: skip
_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
_STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True, "logprobs": 2},
    {"temperature": 0.9, "seed": 1, "ignore_eos": True},
    {"temperature": 1.2, "seed": 2, "top_k": 40, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.6, "min_p": 0.02, "min_tokens": 2},
    # A token that comes soon and ends the request, often inside a window.
    {"temperature": 0.9, "seed": 5, "logit_bias": {7: 5.0}, "stop_token_ids": (7,)},
    {"temperature": 0.8, "seed": 6, "logit_bias": {7: 7.0, 9: 6.0}, "stop_token_ids": (9,)},
    {"temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 1},
    {"temperature": 0.0, "ignore_eos": True, "skip_reading_prefix_cache": True},
)
_NEVER_WITH_GRAMMARS = ("ignore_eos", "min_tokens")


class Given(NamedTuple):
    """What is not drawn."""

    model: str
    options: dict[str, Any]  # engine options that the caller fixed, as JSON spells them
    layouts: tuple[tuple[int, int], ...]  # stages and ranks that the model can be split into
    draft: str | None  # a draft for the model; None: nothing to speculate with
    longest: int  # most tokens that the model takes
    has_vocabulary: bool = False  # for requests that obey a grammar


def draw_script(seed: int, index: int, given: Given) -> Script:
    """Script number `index` of a seed; the same for the same arguments."""
    random = Random(f"{seed}/{index}")
    engine = _draw_engine(random, given)
    if engine["pipeline_parallel_size"] == 1 and "speculative_config" not in engine:
        # Drawn apart, so that all else of a script is as it is without.
        engine.setdefault("async_scheduling", Random(f"{seed}/{index}/async").random() < 0.5)
    speculation = engine.get("speculative_config")
    knows_answers = speculation is not None and random.random() < 0.85
    return Script(
        model=given.model,
        engine=engine,
        draft_accuracy=random.choice((0.0, 0.5, 0.8, 0.9, 1.0)) if knows_answers else None,
        has_ragged_windows=speculation is not None and random.random() < 0.3,
        resets=_draw_resets(random),
        requests=tuple(_draw_requests(random, engine, has_vocabulary=given.has_vocabulary)),
    )


def _draw_engine(random: Random, given: Given) -> dict[str, Any]:
    """Engine options: those given, and all others that change a schedule."""
    options = dict(given.options)

    def pick(name: str, choices: Sequence[Any]) -> Any:
        drawn = random.choice(choices)
        return options.setdefault(name, drawn)

    options.setdefault("dtype", "float64")
    options.setdefault("debug_poison", True)
    options.setdefault("log_level", "error")
    _draw_layout(random, given, options)
    # Requests that grow side by side in a pool for one of them: somebody is preempted.
    is_crowded = random.random() < 0.3
    block_size = pick("block_size", (4, 8, 8, 8, 8, 16, 32))
    longest = pick(
        "max_model_len",
        [
            min(length, given.longest)
            for length in ((24, 32, 40) if is_crowded else (48, 64, 64, 96, _LONGEST))
        ],
    )
    pick("max_num_seqs", (3, 4, 6) if is_crowded else (1, 2, 2, 3, 4, 6))
    pick("max_num_batched_tokens", (5, 8, 9, 13, 16, 24, 40, _KERNEL_BLOCK, 200))
    if "kv_cache_memory_bytes" not in options:
        least = NUM_RESERVED_PAGES + -(-longest // block_size)
        pick(
            "num_gpu_blocks_override",
            [least + more for more in ((0, 0, 1) if is_crowded else (0, 1, 2, 4, 8, 40))],
        )
    if given.draft is not None and random.random() < 0.6:
        options.setdefault(
            "speculative_config",
            {
                "model": given.draft,
                "num_speculative_tokens": random.randint(1, 7),
                "confidence_schedule": False,
                "watchdog": False,
            },
        )
    if pick("enable_prefix_caching", (True,) * 9 + (False,)):
        pick("state_checkpoint_interval", (0, 8, 8, 16, 32, 512))
        pick("max_state_checkpoints", (None, 0, 1, 2, 3, 5, 8))
        pick("kv_offloading_size", (None,) * 7 + (0.0003, 0.001, 0.004))
        pick("verify_cache", (0.0,) * 4 + (0.5, 1.0))
    return {name: value for name, value in options.items() if value is not None}


def _draw_resets(random: Random) -> tuple[int, ...]:
    """One schedule in ten has one, in turns 1 to 20."""
    drawn = random.random()
    return (1 + int(drawn * 200),) if drawn < 0.1 else ()


def _draw_layout(random: Random, given: Given, options: dict[str, Any]) -> None:
    # Ranks of a stage are threads, and cost the most.
    weights = [1.0 / (stages * ranks**3) for stages, ranks in given.layouts]
    [(stages, ranks)] = random.choices(given.layouts, weights)
    options.setdefault("pipeline_parallel_size", stages)
    options.setdefault("tensor_parallel_size", ranks)


def _draw_requests(random: Random, engine: dict[str, Any], *, has_vocabulary: bool) -> list[Ask]:
    lengths = _lengths(engine)
    is_crowded = engine["max_model_len"] <= _CROWDED_LENGTH
    stem = random.choice(_FAMILIES), random.choice(lengths)
    salts = random.choice(_SALTS)
    requests: list[Ask] = []
    turn = 0
    for index in range(random.choice((1, 2, 3, 3, 4, 5, 6))):
        turn += random.choice((0, 0, 1) if is_crowded else (0, 0, 0, 1, 2, 4, 8))
        prompt, after = _draw_prompt(random, requests, stem, lengths)
        # Greedy, or in the one style of its prompt: so one-shot results are soon known.
        style = _STYLES[crc32(prompt.encode()) % len(_STYLES)]
        style = _GREEDY if random.random() < 0.4 else style
        if has_vocabulary:
            style = _constrain(style, prompt)
        params = SamplingParams(
            max_tokens=random.choice((6, 10) if is_crowded else (1, 2, 4, 4, 9)), **style
        )
        if params.min_tokens > (params.max_tokens or 0):
            params = SamplingParams(**(style | {"max_tokens": params.min_tokens}))
        if after is None and index and random.random() < (0.1 if is_crowded else 0.3):
            after = random.randrange(index)
        is_aborted = random.random() < 0.15
        requests.append(
            Ask(
                prompt=prompt,
                params=params,
                turn=turn,
                after=after,
                abort_after=random.randrange(1, 9) if is_aborted else None,
                salt=random.choice(salts),
                checkpoint_position=random.choice(lengths) if random.random() < 0.1 else None,
            )
        )
    return requests


def _constrain(style: dict[str, Any], prompt: str) -> dict[str, Any]:
    """One prompt in three has a grammar, always the same, and ends with it."""
    number, is_free = divmod(crc32(f"grammar of {prompt}".encode()), 3)
    if is_free:
        return style
    kept = {name: value for name, value in style.items() if name not in _NEVER_WITH_GRAMMARS}
    return kept | {"structured_outputs": WANTED[number % len(WANTED)]}


def _draw_prompt(
    random: Random, earlier: Sequence[Ask], stem: tuple[str, int], lengths: Sequence[int]
) -> tuple[str, int | None]:
    """A prompt, and the request that it goes on from."""
    kind = random.random()
    if earlier and kind < 0.3:
        # A conversation, whose answer may still be on its way.
        other = random.randrange(len(earlier))
        more = random.choice(("", " b1", " c2", f" c{random.choice(lengths)}"))
        return f"@{other}{more}", other if random.random() < 0.8 else None
    if earlier and kind < 0.45:
        return random.choice(earlier).prompt, None
    family, length = stem
    if kind < 0.8:
        # The same beginning, up to a length of its own, and then another text.
        shared = random.choice((length, length, random.choice(lengths)))
        tail = random.choice(
            ("", "", " b1", " c3", f" {random.choice('bc')}{random.choice(lengths)}")
        )
        return f"{family}{shared}{tail}", None
    return f"{random.choice('yzab')}{random.choice(lengths)}", None


def _lengths(engine: dict[str, Any]) -> list[int]:
    """Prompt lengths at which something begins or ends."""
    block, chunk = engine["block_size"], engine["max_num_batched_tokens"]
    drafts = (engine.get("speculative_config") or {}).get("num_speculative_tokens", 0)
    interval = engine.get("state_checkpoint_interval", 0)
    edges = (1, _CONV_ROWS, block, 2 * block, 3 * block, chunk, drafts + 1, interval, 5)
    around = {edge + more for edge in (*edges, _KERNEL_BLOCK) for more in (-1, 0, 1)}
    return sorted(length for length in around if 1 <= length < engine["max_model_len"])
