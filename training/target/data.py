"""Batches for training, made on the fly.

A batch holds separate right-padded conversations of one length bucket, `TOKENS_PER_BATCH` tokens
in all. The model is causal and every row starts fresh, so padding needs no mask but a weight of 0.
"""

import bisect
import multiprocessing
import random
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stagecoach.demo.example import Example
from stagecoach.demo.families import retrieval
from stagecoach.demo.tasks import generate
from stagecoach.text.chat_format import Segment, answer_segments, render_segments
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer
from training.target.configuration import EOS_TOKEN_ID, PAD_TOKEN_ID

TOKENS_PER_BATCH = 98_304
# Each divides TOKENS_PER_BATCH.
BUCKETS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
PLAIN_TEXT_BUCKET = 512

# Examples drawn of each kind, out of the sum. "plain_text" draws documents; "people" is the kind of
# retrieval that is learnt last.
MIXES = {
    "whole": {
        "arithmetic": 24,
        "tool_calls": 18,
        "extraction": 12,
        "retrieval": 14,
        "multi_turn": 12,
        "lists_dates": 22,
        "small_talk": 1,
        "plain_text": 6,
    },
    "retrieval": {
        "arithmetic": 9,
        "tool_calls": 5,
        "extraction": 3,
        "retrieval": 10,
        "people": 60,
        "multi_turn": 7,
        "lists_dates": 20,
        "small_talk": 1,
        "plain_text": 1,
    },
}
# A prompt's tokens weigh at most this much each, and together at most half of the answer.
MAX_PROMPT_WEIGHT = 0.1
PLAIN_TEXT_WEIGHT = 0.3

# Longest rows by the share of training done.
LENGTH_CURRICULUM = ((0.06, 768), (0.15, 1536), (0.25, 3072), (1.0, 4096))


class Row(NamedTuple):
    """A tokenised conversation: ids, and the weight of each as a target."""

    ids: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Arrays of `[rows, bucket]`."""

    ids_BT: np.ndarray
    weights_BT: np.ndarray


class RowMaker:
    """Renders and encodes examples, keeping the ids of short segments that come again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[Segment, list[int]] = {}

    def encode(self, segment: Segment) -> list[int]:
        """The token ids of one segment."""
        if segment.is_special:
            return [self._tokenizer.special_id(segment.text)]
        if len(segment.text) > 12:
            return self._tokenizer.encode(segment.text)
        ids = self._known.get(segment)
        if ids is None:
            ids = self._tokenizer.encode(segment.text)
            if len(self._known) < 20_000:
                self._known[segment] = ids
        return ids

    def conversation(self, example: Example) -> Row:
        """The prompt and the expected answer of an example."""
        ids: list[int] = []
        is_answer: list[bool] = []
        prompt = render_segments(
            example.messages,
            tools=example.tools,
            response_format=example.response_format,
            thinking=example.thinking,
        )
        answer = answer_segments(example.answer_message, thinking=example.thinking)
        for segment in (*prompt, *answer):
            tokens = self.encode(segment)
            ids += tokens
            is_answer += [segment.is_assistant] * len(tokens)
        num_answer = sum(is_answer)
        prompt_weight = min(MAX_PROMPT_WEIGHT, 0.5 * num_answer / (len(ids) - num_answer))
        weights = [1.0 if answer else prompt_weight for answer in is_answer]
        return Row(ids, weights)

    def plain_text(self, document: str, source: random.Random) -> Row:
        """A window of a document, from its start or from the start of a word."""
        start = source.randrange(max(1, len(document) - 1200)) if source.random() < 0.7 else 0
        start = document.find(" ", start) + 1 if start else 0
        ids = self._tokenizer.encode(document[start : start + 2400])
        ids = [*ids, EOS_TOKEN_ID][:PLAIN_TEXT_BUCKET]
        return Row(ids, [PLAIN_TEXT_WEIGHT] * len(ids))


def pad(rows: list[Row], bucket: int) -> Batch:
    """The rows of one bucket as arrays."""
    ids_BT = np.full((len(rows), bucket), PAD_TOKEN_ID, dtype=np.int16)
    weights_BT = np.zeros((len(rows), bucket), dtype=np.float16)
    for index, row in enumerate(rows):
        ids_BT[index, : len(row.ids)] = row.ids
        weights_BT[index, : len(row.ids)] = row.weights
    return Batch(ids_BT, weights_BT)


def longest_row(progress: float, mix: str) -> int:
    """The longest row that training takes after this share of it."""
    if mix != "whole":
        return BUCKETS[-1]
    return next(length for share, length in LENGTH_CURRICULUM if progress <= share)


def training_batches(
    worker: int, *, seed: int, tokenizer_folder: Path, documents: list[str], mix: dict[str, int],
    longest: Synchronized, tokens_per_batch: int,
) -> Iterator[Batch]:  # fmt: skip
    """Endless batches of one worker. No two workers or seeds draw the same examples."""
    source = random.Random(f"{seed}/{worker}")
    maker = RowMaker(load_tokenizer(tokenizer_folder))
    pools: dict[int, list[Row]] = {bucket: [] for bucket in BUCKETS}
    families = [name for name in mix if documents or name != "plain_text"]
    weights = [mix[name] for name in families]
    index = 0
    while True:
        for family in source.choices(families, weights, k=256):
            index += 1
            if family == "plain_text":
                row = maker.plain_text(source.choice(documents), source)
            elif family == "people":
                example = retrieval.draw_people(source)
                if example.split != "train":
                    continue
                row = maker.conversation(example)
            else:
                row = maker.conversation(generate(family, seed, index * 1024 + worker, "train"))
            if len(row.ids) > longest.value:
                continue
            bucket = BUCKETS[bisect.bisect_left(BUCKETS, len(row.ids))]
            pool = pools[bucket]
            pool.append(row)
            if len(pool) == max(1, tokens_per_batch // bucket):
                yield pad(pool, bucket)
                pool.clear()


def _work(queue: Queue, make_batches: Callable[[int], Iterator[tuple]], worker: int) -> None:
    for batch in make_batches(worker):
        queue.put(batch)


class BatchStream:
    """Worker processes that make training batches ahead."""

    def __init__(self, num_workers: int, make_batches: Callable[[int], Iterator[tuple]]) -> None:
        """Start the workers; each iterates over `make_batches` of its number."""
        context = multiprocessing.get_context("fork")
        self._queue: Queue = context.Queue(maxsize=64)
        self._workers = [
            context.Process(target=_work, args=(self._queue, make_batches, worker), daemon=True)
            for worker in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def next(self) -> Any:
        """The next batch of any worker."""
        return self._queue.get()

    def size(self) -> int:
        """How many batches are waiting."""
        return self._queue.qsize()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
