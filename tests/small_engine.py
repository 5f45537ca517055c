"""A small model, the options of the engines that tests start on it, and what must hold after.

The vocabulary is the bytes and the special tokens, so a token of a letter is its code.
"""

import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stagecoach import LLM, CompletionOutput, RequestOutput
from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.model.tiny import TinyShape, kimi_k3_config, write_tiny_model
from stagecoach.request import TokenLogprobs

EOS = 258  # <|end_of_msg|>
MAX_MODEL_LEN = 128
LETTERS = tuple(map(ord, string.ascii_lowercase))
# Makes every output a text of small letters.
ONLY_LETTERS = dict.fromkeys(LETTERS, 60.0)

LOGPROB_TOLERANCE = 1e-9

SHAPE = TinyShape(num_layers=4, mla_layers=(2, 3), block_size=2, max_length=512)

OPTIONS: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "block_size": 8,
    "num_threads": 1,
    "log_level": "warning",
    "debug_poison": True,
}


def write_small_model(folder: Path) -> Path:
    """4 layers (KDA KDA MLA MLA), packed experts, two shards or more."""
    write_tiny_model(folder, kimi_k3_config(SHAPE), seed=3, max_shard_bytes=200_000)
    return folder


def write_small_draft(folder: Path) -> Path:
    """A random draft for the small model, which accepts hardly any of its tokens."""
    write_tiny_draft(folder, mla_draft_config(TinyDraftShape(taps=(3, -1, 1))), seed=4)
    return folder


def thread_engine(folder: Path, **options: Any) -> LLM:
    """An engine whose loop and workers are threads of this process."""
    return LLM(
        str(folder),
        show_progress=False,
        **(OPTIONS | {"distributed_executor_backend": "uni"} | options),
    )


def process_engine(folder: Path, **options: Any) -> LLM:
    """An engine of real processes."""
    return LLM(str(folder), show_progress=False, **(OPTIONS | options))


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Of each completion of each request."""
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def assert_same_logprobs(
    entries: Sequence[TokenLogprobs | None] | None, others: Sequence[TokenLogprobs | None] | None
) -> None:
    """Equal but for the order in which a batch of another shape adds up its sums."""
    assert (entries is None) == (others is None)
    for entry, other in zip(entries or (), others or (), strict=True):
        assert (entry is None) == (other is None)
        if entry is None or other is None:
            continue
        assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
        assert entry.top_ids == other.top_ids
        assert entry.logprob == pytest.approx(other.logprob, abs=LOGPROB_TOLERANCE)
        assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=LOGPROB_TOLERANCE)


def assert_same_completions(
    completions: Sequence[CompletionOutput], others: Sequence[CompletionOutput]
) -> None:
    for one, other in zip(completions, others, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert (one.index, one.finish_reason, one.stop_reason) == (
            other.index,
            other.finish_reason,
            other.stop_reason,
        )
        assert_same_logprobs(one.logprobs, other.logprobs)


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, and every page and slot is free.

    The question follows the aborts that were sent before on the same way, so there is nothing
    to wait for but the plan in flight: what it leaves in the cache is not free before its result.
    """
    deadline = time.monotonic() + 10.0
    while True:
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        free, there = (
            (stats.num_free_pages, stats.num_free_slots),
            (stats.num_pages, stats.num_slots),
        )
        if free == there or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    assert free == there
