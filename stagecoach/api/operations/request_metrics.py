"""Metrics of requests, counted as they happen: names, labels and buckets as vLLM has them.

Owns the counters and histograms that this process writes. With several API processes
prometheus_client keeps them in files and sums over all; that is decided before it is imported.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, multiprocess, values
from prometheus_client.core import Metric

from stagecoach.api.request_watch import (
    CompletionRecord,
    Observer,
    PromptRecord,
    RequestRecord,
)

PREFIX = "stagecoach:"
# One engine serves; vLLM numbers its engines.
LABEL_NAMES = ("model_name", "engine")
ENGINE = "0"

_FINISHED_REASONS = ("stop", "length", "abort", "error")
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_NUM_COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)


class RequestMetrics(Observer):
    """An observer of requests that counts."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model_name, ENGINE)
        lengths = length_buckets(max_model_len)
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests, once each, cached ones too."
        )
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens that a prefix hit spared."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens of completions.")
        success = Counter(
            f"{PREFIX}request_success",
            "Completions that ended, by finish reason.",
            (*LABEL_NAMES, "finished_reason"),
            registry=self._registry,
        )
        self._ended = {
            reason: success.labels(*self._labels, reason) for reason in _FINISHED_REASONS
        }
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "Until the first token of a completion.",
            _FIRST_TOKEN_SECONDS,
        )
        self._token_gap = self._histogram(
            "inter_token_latency_seconds",
            "Between one arrival of tokens of a completion and the next.",
            _TOKEN_SECONDS,
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Decode time of a completion over its tokens but the first.",
            _TOKEN_SECONDS,
        )
        self._total = self._histogram(
            "e2e_request_latency_seconds",
            "From a request to the end of a completion.",
            _REQUEST_SECONDS,
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "From a request to its first step plan.",
            _REQUEST_SECONDS,
        )
        self._inference = self._histogram(
            "request_inference_time_seconds",
            "From the first step plan to the last token.",
            _REQUEST_SECONDS,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds",
            "From the first step plan to the first token.",
            _REQUEST_SECONDS,
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_SECONDS
        )
        self._request_prompt = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", lengths
        )
        self._request_generation = self._histogram(
            "request_generation_tokens", "Tokens of a completion.", lengths
        )
        self._longest = self._histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest completion of a prompt.",
            lengths,
        )
        self._params_n = self._histogram(
            "request_params_n", "The parameter n of requests.", _NUM_COMPLETIONS
        )
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens",
            "The parameter max_tokens of requests that have one.",
            lengths,
        )
        self._http_requests = Counter(
            f"{PREFIX}http_requests",
            "Answers, by route and status.",
            ("handler", "method", "status"),
            registry=self._registry,
        )

    def collect(self) -> Iterable[Metric]:
        """All that was counted, by all API processes."""
        if not values.ValueClass._multiprocess:
            return self._registry.collect()
        shared = CollectorRegistry()
        multiprocess.MultiProcessCollector(shared)
        return shared.collect()

    def answered(self, route: str, method: str, status: int) -> None:
        self._http_requests.labels(route, method, str(status)).inc()

    def prompt_computed(self, prompt: PromptRecord) -> None:
        self._prompt_tokens.inc(prompt.num_tokens)
        self._cached_tokens.inc(prompt.num_cached_tokens)

    def tokens_came(
        self, completion: CompletionRecord, num_tokens: int, gap_seconds: float | None
    ) -> None:
        self._generation_tokens.inc(num_tokens)
        if gap_seconds is not None:
            self._token_gap.observe(gap_seconds)
        elif completion.first_token_seconds is not None:
            self._first_token.observe(completion.first_token_seconds)

    def completion_ended(self, completion: CompletionRecord) -> None:
        assert completion.finish_reason is not None, f"it runs: {completion}"
        self._ended[completion.finish_reason].inc()
        if completion.finish_reason not in ("stop", "length"):
            return
        self._request_generation.observe(completion.num_tokens)
        for histogram, seconds in (
            (self._total, completion.total_seconds),
            (self._queue, completion.queue_seconds),
            (self._inference, completion.inference_seconds),
            (self._prefill, completion.prefill_seconds),
            (self._decode, completion.decode_seconds),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if completion.num_tokens > 1 and completion.decode_seconds is not None:
            self._per_token.observe(completion.decode_seconds / (completion.num_tokens - 1))

    def request_ended(self, request: RequestRecord) -> None:
        for prompt in request.prompts:
            if not prompt.is_computed:
                continue
            self._request_prompt.observe(prompt.num_tokens)
            self._longest.observe(max(item.num_tokens for item in prompt.completions))
            self._params_n.observe(request.params.n)
            if request.params.max_tokens is not None:
                self._params_max_tokens.observe(request.params.max_tokens)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(PREFIX + name, text, LABEL_NAMES, registry=self._registry)
        return counter.labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, text, LABEL_NAMES, registry=self._registry, buckets=buckets
        )
        return histogram.labels(*self._labels)


def length_buckets(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `longest`."""
    return tuple(_lengths(longest))


def _lengths(longest: int) -> Iterator[float]:
    scale = 1
    while scale <= longest:
        yield from (float(digit * scale) for digit in (1, 2, 5) if digit * scale <= longest)
        scale *= 10
