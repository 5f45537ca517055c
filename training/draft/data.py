"""Conversations for the draft: whole rows, and where their answers lie.

Rows are right-padded in the length buckets of the target's training.
"""

import bisect
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stagecoach.demo.example import Example
from stagecoach.demo.tasks import ALL_FAMILIES, FAMILIES, generate
from stagecoach.text.chat_format import answer_segments, render_segments
from stagecoach.text.tokenizer import load_tokenizer
from training.target.configuration import PAD_TOKEN_ID
from training.target.data import BUCKETS, RowMaker

# Examples drawn of each family, out of the sum. Long rows hold few answer tokens, so retrieval
# gets less than it gets in the target's training.
MIX = {
    "arithmetic": 26,
    "tool_calls": 18,
    "extraction": 12,
    "retrieval": 5,
    "multi_turn": 12,
    "lists_dates": 26,
    "small_talk": 1,
}
# Blocks of a row: one for so many tokens of its bucket, up to a limit.
TOKENS_PER_BLOCK = 16
MAX_BLOCKS = 64


class Conversation(NamedTuple):
    """A tokenised conversation."""

    ids: list[int]
    answer_start: int
    family: str


class Batch(NamedTuple):
    """Conversations of one bucket; a row without one starts and ends at 0."""

    ids_BT: np.ndarray
    start_B: np.ndarray  # where the answer begins
    end_B: np.ndarray  # behind its last token
    family_B: np.ndarray  # index in ALL_FAMILIES


def blocks_per_row(bucket: int) -> int:
    """How many blocks a row of a bucket is trained on at once."""
    return min(bucket // TOKENS_PER_BLOCK, MAX_BLOCKS)


def conversation(example: Example, maker: RowMaker) -> Conversation:
    """The prompt and the expected answer of an example."""
    prompt = render_segments(
        example.messages,
        tools=example.tools,
        response_format=example.response_format,
        thinking=example.thinking,
    )
    answer = answer_segments(example.answer_message, thinking=example.thinking)
    prompt_ids = [token_id for segment in prompt for token_id in maker.encode(segment)]
    answer_ids = [token_id for segment in answer for token_id in maker.encode(segment)]
    return Conversation(prompt_ids + answer_ids, len(prompt_ids), example.family)


def pad(rows: list[Conversation], bucket: int, num_rows: int) -> Batch:
    """The rows of one bucket as arrays of `num_rows` rows."""
    ids_BT = np.full((num_rows, bucket), PAD_TOKEN_ID, dtype=np.int16)
    start_B, end_B, family_B = (np.zeros(num_rows, dtype=np.int32) for _ in range(3))
    for index, row in enumerate(rows):
        ids_BT[index, : len(row.ids)] = row.ids
        start_B[index], end_B[index] = row.answer_start, len(row.ids)
        family_B[index] = ALL_FAMILIES.index(row.family)
    return Batch(ids_BT, start_B, end_B, family_B)


def batches(
    rows: Iterable[Conversation], tokens_per_batch: int, *, room: int = 0
) -> Iterator[Batch]:
    """Sort rows into buckets with `room` behind them; full batches first, then what is left."""
    pools: dict[int, list[Conversation]] = {bucket: [] for bucket in BUCKETS}
    for row in rows:
        if len(row.ids) + room > BUCKETS[-1]:
            continue
        bucket = BUCKETS[bisect.bisect_left(BUCKETS, len(row.ids) + room)]
        num_rows = max(1, tokens_per_batch // bucket)
        pools[bucket].append(row)
        if len(pools[bucket]) == num_rows:
            yield pad(pools[bucket], bucket, num_rows)
            pools[bucket].clear()
    for bucket, pool in pools.items():
        if pool:
            yield pad(pool, bucket, max(1, tokens_per_batch // bucket))


def training_batches(
    worker: int, *, seed: int, tokenizer_folder: Path, tokens_per_batch: int
) -> Iterator[Batch]:
    """Endless batches of one worker. No two workers or seeds draw the same examples."""
    maker = RowMaker(load_tokenizer(tokenizer_folder))

    def rows() -> Iterator[Conversation]:
        source = random.Random(f"draft/{seed}/{worker}")
        index = 0
        while True:
            for family in source.choices(list(MIX), list(MIX.values()), k=256):
                index += 1
                yield conversation(generate(family, seed, index * 1024 + worker, "train"), maker)

    yield from batches(rows(), tokens_per_batch)


def held_out_batches(
    *, seed: int, limit: int, tokenizer_folder: Path, tokens_per_batch: int, room: int
) -> Iterator[Batch]:
    """`limit` held-out examples of each scored family."""
    maker = RowMaker(load_tokenizer(tokenizer_folder))
    rows = (
        conversation(generate(family, seed, index, "held_out"), maker)
        for family in FAMILIES
        for index in range(limit)
    )
    yield from batches(rows, tokens_per_batch, room=room)
