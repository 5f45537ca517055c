"""Running one set of requests under many schedules, and comparing what came back."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stagecoach.config.engine import EngineConfig
from stagecoach.engine.client import EngineClient
from stagecoach.errors import StagecoachError
from stagecoach.request import SamplingParams, TokenLogprobs
from stagecoach.resolve import resolve
from stagecoach.schedule.commit import Progress

# A page of the test engines; prompts lie around its multiples.
BLOCK_SIZE = 8


class Ask(NamedTuple):
    """A request, and whether it is aborted at its first token."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    is_aborted: bool = False
    cache_salt: str | None = None
    checkpoint_position: int | None = None


class Answer(NamedTuple):
    """What one request returned."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    preemptions: int
    num_cached_tokens: int
    num_windows: int  # verify rounds
    num_accepted_tokens: int  # drafts that they accepted


def start_client(checkpoint: Path, **options: Any) -> EngineClient:
    """An engine of threads in float64 whose free memory is NaN."""
    defaults: dict[str, Any] = {
        "model": str(checkpoint),
        "dtype": "float64",
        "distributed_executor_backend": "uni",
        "debug_poison": True,
        "num_threads": 1,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 6,
        "max_model_len": 128,
        "log_level": "warning",
    }
    return EngineClient(resolve(EngineConfig(**{**defaults, **options})))


def run(client: EngineClient, asks: Sequence[Ask], timeout_seconds: float = 60.0) -> list[Answer]:
    """Submit all, wait for all; aborted ones return what they had."""
    parts: list[list[Progress]] = [[] for _ in asks]
    ids: list[int] = []
    errors: list[StagecoachError] = []
    open_requests = set(range(len(asks)))
    is_submitted = threading.Event()
    is_done = threading.Event()

    def on_news(index: int, news: Progress | StagecoachError) -> None:
        if isinstance(news, StagecoachError):
            errors.append(news)
            is_done.set()
            return
        parts[index].append(news)
        is_over = news.finish_reason is not None
        if asks[index].is_aborted and news.token_ids and not is_over:
            is_submitted.wait()
            client.abort([ids[index]])
            is_over = True
        if is_over:
            open_requests.discard(index)
        if not open_requests:
            is_done.set()

    for index, ask in enumerate(asks):
        ids.append(
            client.submit(
                ask.prompt_token_ids,
                ask.params,
                lambda news, index=index: on_news(index, news),
                cache_salt=ask.cache_salt,
                checkpoint_position=ask.checkpoint_position,
            )
        )
    is_submitted.set()
    assert is_done.wait(timeout_seconds), f"requests {sorted(open_requests)} hang"
    if errors:
        raise errors[0]
    return [
        Answer(
            token_ids=tuple(token for part in progress for token in part.token_ids),
            logprobs=tuple(entry for part in progress for entry in part.logprobs),
            prompt_logprobs=tuple(entry for part in progress for entry in part.prompt_logprobs),
            preemptions=max((part.preemptions for part in progress), default=0),
            num_cached_tokens=max((part.num_cached_tokens for part in progress), default=0),
            num_windows=max((part.num_windows for part in progress), default=0),
            num_accepted_tokens=max((part.num_accepted_tokens for part in progress), default=0),
        )
        for progress in parts
    ]


def run_alone(checkpoint: Path, asks: Sequence[Ask]) -> list[Answer]:
    """Each request alone, its prompt in one chunk, on one stage and one rank, nothing cached."""
    client = start_client(checkpoint, enable_prefix_caching=False)
    try:
        return [run(client, [ask])[0] for ask in asks]
    finally:
        client.close()


def assert_same(got: Answer, expected: Answer, tolerance: float) -> None:
    """Equal tokens; equal ranks and alternatives, and log-probabilities within `tolerance`."""
    assert got.token_ids == expected.token_ids
    for ours, theirs in (
        (got.logprobs, expected.logprobs),
        (got.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.token_id, one.rank, one.top_ids) == (
                other.token_id,
                other.rank,
                other.top_ids,
            )
            assert abs(one.logprob - other.logprob) < tolerance
            for a, b in zip(one.top_logprobs, other.top_logprobs, strict=True):
                assert abs(a - b) < tolerance


def assert_idle(client: EngineClient) -> None:
    """Nothing is held; the debug mode of the engine checks the pools at every step as well."""
    stats = client.stats()
    assert stats.num_waiting == stats.num_running == 0
    assert stats.num_free_pages == stats.num_pages
    assert stats.num_free_slots == stats.num_slots
