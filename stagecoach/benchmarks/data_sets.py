"""What is asked: the conversations of a run, made before it starts.

Owns the data sets and the lengths that they promise. A conversation is the requests that one
user sends one after the other; every set but multi-turn has one request in each.
Knows neither servers nor time.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagecoach.benchmarks.vocabulary import Vocabulary
from stagecoach.errors import ConfigError

# The bounds of the ShareGPT sample that published figures use, in tokens.
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One prompt, and how long its answer may be.

    In a conversation of several requests, `prompt` is what the user says next.
    """

    prompt: str | list[int]
    num_prompt_tokens: int
    num_output_tokens: int


Conversation = tuple[BenchRequest, ...]


def random_requests(
    token_ids: Sequence[int],
    rng: np.random.Generator,
    *,
    num_requests: int,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
) -> list[Conversation]:
    """Prompts of random tokens.

    Each has `prefix_len` tokens that all share, then a number of its own drawn evenly from
    [input_len (1 - range_ratio), input_len (1 + range_ratio)]; the answer's length likewise, at
    least 1. Prompts draw their tokens independently.

    Args:
        token_ids: the alphabet.

    Raises:
        ConfigError: an option is out of range.
    """
    if not 0.0 <= range_ratio < 1.0:
        raise ConfigError(f"--random-range-ratio={range_ratio}: must be in [0, 1)")
    _check_counts({"--random-input-len": input_len, "--random-prefix-len": prefix_len}, at_least=0)
    _check_counts({"--random-output-len": output_len}, at_least=1)
    if prefix_len + math.floor(input_len * (1 - range_ratio)) < 1:
        raise ConfigError(
            f"--random-input-len={input_len}: with --random-range-ratio={range_ratio} and "
            f"--random-prefix-len={prefix_len} a prompt may be empty"
        )
    prefix = _draw(token_ids, rng, prefix_len)
    input_lens = _draw_lengths(rng, input_len, range_ratio, num_requests)
    output_lens = np.maximum(_draw_lengths(rng, output_len, range_ratio, num_requests), 1)
    return [
        (_request(prefix + _draw(token_ids, rng, num_tokens), num_output_tokens),)
        for num_tokens, num_output_tokens in zip(
            input_lens.tolist(), output_lens.tolist(), strict=True
        )
    ]


def prefix_repetition_requests(
    token_ids: Sequence[int],
    rng: np.random.Generator,
    *,
    num_requests: int,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
) -> list[Conversation]:
    """Prompts that share one of `num_prefixes` beginnings, in random order.

    Every prefix is used as often as every other, but for one where the number does not divide.

    Raises:
        ConfigError: an option is out of range.
    """
    _check_counts(
        {
            "--prefix-repetition-num-prefixes": num_prefixes,
            "--prefix-repetition-prefix-len": prefix_len,
            "--prefix-repetition-output-len": output_len,
        },
        at_least=1,
    )
    _check_counts({"--prefix-repetition-suffix-len": suffix_len}, at_least=0)
    prefixes = [_draw(token_ids, rng, prefix_len) for _ in range(num_prefixes)]
    order = rng.permutation(num_requests) % num_prefixes
    return [
        (_request(prefixes[number] + _draw(token_ids, rng, suffix_len), output_len),)
        for number in order.tolist()
    ]


def multi_turn_conversations(
    token_ids: Sequence[int],
    rng: np.random.Generator,
    *,
    num_requests: int,
    num_turns: int,
    input_len: int,
    output_len: int,
    prefix_len: int = 0,
) -> list[Conversation]:
    """Conversations of `num_turns` messages of `input_len` random tokens each.

    The first message of every conversation opens with the same `prefix_len` tokens. There are
    `num_requests` messages in all, so the last conversation may be shorter.

    Raises:
        ConfigError: an option is out of range.
    """
    _check_counts(
        {
            "--multi-turn-num-turns": num_turns,
            "--random-input-len": input_len,
            "--random-output-len": output_len,
        },
        at_least=1,
    )
    _check_counts({"--random-prefix-len": prefix_len}, at_least=0)
    prefix = _draw(token_ids, rng, prefix_len)
    conversations = []
    for start in range(0, num_requests, num_turns):
        turns = [
            _request(_draw(token_ids, rng, input_len), output_len)
            for _ in range(min(num_turns, num_requests - start))
        ]
        turns[0] = _request(prefix + _draw(token_ids, rng, input_len), output_len)
        conversations.append(tuple(turns))
    return conversations


def share_gpt_requests(
    path: Path,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    *,
    num_requests: int,
    output_len: int | None = None,
) -> list[Conversation]:
    """The first message of conversations of a ShareGPT file, in random order.

    The answer is as long as the file's own, unless `output_len` says otherwise. Left out, as in
    published figures: prompts and answers under 4 tokens, prompts over 1,024 and pairs over 2,048.
    A file with too few is used again from its beginning.

    Raises:
        ConfigError: the file is not usable, or nothing of it is.
    """
    if output_len is not None:
        _check_counts({"--sharegpt-output-len": output_len}, at_least=1)
    entries = _read_share_gpt(path)
    requests: list[Conversation] = []
    for number in rng.permutation(len(entries)).tolist():
        if len(requests) == num_requests:
            break
        prompt, answer = entries[number][:2]
        num_prompt_tokens = len(vocabulary.encode(prompt))
        if num_prompt_tokens < _MIN_TOKENS or num_prompt_tokens > _MAX_PROMPT_TOKENS:
            continue
        wanted = output_len if output_len is not None else len(vocabulary.encode(answer))
        is_short = output_len is None and wanted < _MIN_TOKENS
        if is_short or num_prompt_tokens + wanted > _MAX_TOTAL_TOKENS:
            continue
        request = BenchRequest(
            prompt=prompt, num_prompt_tokens=num_prompt_tokens, num_output_tokens=wanted
        )
        requests.append((request,))
    if not requests:
        raise ConfigError(f"--dataset-path={path}: no conversation has a usable length")
    return _repeated(requests, num_requests)


def share_gpt_conversations(
    path: Path,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    *,
    num_requests: int,
    num_turns: int,
    output_len: int,
) -> list[Conversation]:
    """Up to `num_turns` user messages of each conversation of a ShareGPT file, in random order.

    Raises:
        ConfigError: the file is not usable, or holds no message.
    """
    _check_counts(
        {"--multi-turn-num-turns": num_turns, "--random-output-len": output_len}, at_least=1
    )
    entries = _read_share_gpt(path)
    conversations: list[Conversation] = []
    num_missing = num_requests
    while num_missing > 0:
        for number in rng.permutation(len(entries)).tolist():
            texts = entries[number][0::2][: min(num_turns, num_missing)]
            conversations.append(
                tuple(
                    BenchRequest(
                        prompt=text,
                        num_prompt_tokens=len(vocabulary.encode(text)),
                        num_output_tokens=output_len,
                    )
                    for text in texts
                )
            )
            num_missing -= len(texts)
            if num_missing == 0:
                break
    return conversations


def as_text(conversations: list[Conversation], vocabulary: Vocabulary) -> list[Conversation]:
    """The same with every prompt as text, whose tokens may then be others."""
    return [
        tuple(
            BenchRequest(
                prompt=request.prompt
                if isinstance(request.prompt, str)
                else vocabulary.decode(request.prompt),
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
            )
            for request in conversation
        )
        for conversation in conversations
    ]


def _request(token_ids: list[int], num_output_tokens: int) -> BenchRequest:
    return BenchRequest(
        prompt=token_ids,
        num_prompt_tokens=len(token_ids),
        num_output_tokens=num_output_tokens,
    )


def _draw(token_ids: Sequence[int], rng: np.random.Generator, num_tokens: int) -> list[int]:
    return [token_ids[place] for place in rng.integers(0, len(token_ids), num_tokens).tolist()]


def _draw_lengths(
    rng: np.random.Generator, mean: int, range_ratio: float, num_lengths: int
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    low = math.floor(mean * (1 - range_ratio))
    high = math.ceil(mean * (1 + range_ratio))
    return rng.integers(low, high + 1, num_lengths)


def _check_counts(counts: dict[str, int], *, at_least: int) -> None:
    for option, count in counts.items():
        if count < at_least:
            raise ConfigError(f"{option}={count}: must be at least {at_least}")


def _repeated(conversations: list[Conversation], num_requests: int) -> list[Conversation]:
    return [conversations[number % len(conversations)] for number in range(num_requests)]


def _read_share_gpt(path: Path) -> list[list[str]]:
    """The texts of each conversation that has an answer; the user's are every other, from 0."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path={path}: {error}") from None
    if not isinstance(content, list):
        raise ConfigError(f"--dataset-path={path}: must hold a JSON list of conversations")
    entries = [texts for entry in content if len(texts := _texts(entry)) >= 2]
    if not entries:
        raise ConfigError(
            f"--dataset-path={path}: no entry has `conversations` with two texts in `value`"
        )
    return entries


def _texts(entry: object) -> list[str]:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        return []
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns]
    kept = [text for text in texts if isinstance(text, str) and text]
    return kept if len(kept) == len(texts) else []
