"""Metrics of the engine, made of its counts when somebody asks.

Owns their names. Keeps nothing: the engine loop counts, and never backwards.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from stagecoach.api.operations.request_metrics import ENGINE, LABEL_NAMES, PREFIX
from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.messages import EngineStats
from stagecoach.observe.histogram import Histogram
from stagecoach.schedule.speculation_stats import SpeculationStats

# Values by a further label, as (its value, the number).
_ByLabel = Iterable[tuple[str, float]]


class EngineMetrics:
    """The metrics of one engine under the name of its model."""

    def __init__(self, config: ResolvedConfig, model_name: str, version: str) -> None:
        self._config = config
        self._labels = (model_name, ENGINE)
        self._version = version

    def collect(self, stats: EngineStats | None) -> Iterator[Metric]:
        """All families; without counts only what is known without an engine."""
        yield self._info("build_info", "What runs.", {"version": self._version})
        yield self._gauge("engine_up", "1 while the engine answers.", float(stats is not None))
        if stats is None:
            return
        yield self._cache_config(stats)
        yield from self._queues(stats)
        yield from self._steps(stats)
        yield from self._stages(stats)
        yield from self._slots(stats)
        if stats.prefix_cache is not None:
            yield from self._prefix_cache(stats.prefix_cache)
        if stats.speculation is not None:
            yield from self._speculation(stats.speculation)

    def _queues(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge(
            "num_requests_running", "Requests that are being computed.", stats.num_running
        )
        yield self._gauge("num_requests_waiting", "Requests that wait.", stats.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the pages that requests hold, from 0 to 1.",
            _share(stats.num_pages - stats.num_free_pages, stats.num_pages),
        )
        yield self._counter("num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter(
            "num_recoveries", "Lost workers were brought back.", stats.num_recoveries
        )
        yield self._counter(
            "recovery_seconds", "Nothing was computed meanwhile.", stats.recovery_seconds
        )

    def _steps(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("num_steps", "Step plans that were committed.", stats.num_steps)
        yield self._gauge("plans_in_flight", "Step plans on their way.", stats.num_plans_in_flight)
        yield self._histogram(
            "iteration_tokens_total", "Tokens of a step plan, drafts too.", stats.iteration_tokens
        )
        yield self._histogram(
            "window_length", "Tokens of a verify window, anchor and drafts.", _windows(stats)
        )
        yield self._counter(
            "loop_seconds", "The engine loop planned, encoded and committed.", stats.loop_seconds
        )
        yield self._counter(
            "forward_seconds", "Inside the last stage's layers.", stats.forward_seconds
        )

    def _stages(self, stats: EngineStats) -> Iterator[Metric]:
        for kind, text, seconds in (
            ("busy", "A stage computes or sends.", stats.stage_busy_seconds),
            ("hop", "A stage has a plan and waits for the one before.", stats.stage_hop_seconds),
            ("idle", "A stage has nothing to do.", stats.stage_idle_seconds),
        ):
            yield self._counter_by(f"stage_{kind}_seconds", text, "stage", _numbered(seconds))

    def _slots(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_state_slots", "State slots there are.", stats.num_slots)
        yield self._gauge(
            "num_state_slots_used",
            "State slots that are written or read; evictable checkpoints are not.",
            stats.num_slots - stats.num_free_slots,
        )
        if stats.prefix_cache is not None:
            yield self._gauge(
                "num_checkpoint_slots",
                "State slots that checkpoints could have: all but those of running requests.",
                stats.num_slots - stats.num_running,
            )
            yield self._gauge(
                "num_checkpoint_slots_used",
                "State slots that hold a checkpoint.",
                stats.prefix_cache.num_checkpoints,
            )

    def _prefix_cache(self, stats: PrefixCacheStats) -> Iterator[Metric]:
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.num_query_tokens),
            ("prefix_cache_hits", "Of them, found.", stats.num_hit_tokens),
            (
                "prefix_cache_lost_tokens",
                "Of them, in the cache with no checkpoint to go on from.",
                stats.num_lost_tokens,
            ),
            ("prefix_cache_checkpoints_filed", "Checkpoints filed.", stats.num_filed),
            (
                "prefix_cache_checkpoints_unfiled",
                "Checkpoints for which there was no slot.",
                stats.num_unfiled,
            ),
            ("prefix_cache_verified", "Hits verified and found equal.", stats.num_verified),
            ("prefix_cache_mismatches", "Hits verified and found wrong.", stats.num_mismatches),
            ("prefix_cache_unverified", "Verifications given up.", stats.num_unverified),
            ("prefix_cache_stored", "Pages and checkpoints moved to the host.", stats.num_stored),
            ("prefix_cache_loaded", "And back.", stats.num_loaded),
        ):
            yield self._counter(name, text, value)
        yield self._counter_by(
            "prefix_cache_evictions",
            "Cached pages and checkpoints that were dropped.",
            "cause",
            stats.evictions.items(),
        )
        yield self._gauge_by(
            "prefix_cache_bytes",
            "Memory of cached pages and checkpoints, over all workers.",
            "tier",
            (("device", stats.device_bytes), ("host", stats.host_bytes)),
        )

    def _speculation(self, stats: SpeculationStats) -> Iterator[Metric]:
        yield self._counter("spec_decode_num_drafts", "Verify rounds.", stats.num_windows)
        yield self._counter(
            "spec_decode_num_draft_tokens", "Drafts that were verified.", stats.num_draft_tokens
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Drafts accepted.", stats.num_accepted_tokens
        )
        yield self._counter_by(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by place in the window from 0.",
            "position",
            _numbered(stats.accepted_per_position),
        )
        yield self._gauge(
            "spec_decode_paused", "1 while drafting does not pay.", float(stats.is_paused)
        )
        yield self._counter(
            "spec_decode_pauses", "Times that drafting began not to pay.", stats.num_pauses
        )

    def _cache_config(self, stats: EngineStats) -> Metric:
        engine = self._config.engine
        labels = {
            "block_size": engine.block_size,
            "cache_dtype": self._config.cache_dtype or self._config.dtype,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "num_gpu_blocks": stats.num_pages,
            "num_state_slots": stats.num_slots,
        }
        texts = {name: str(value) for name, value in labels.items()}
        return self._info("cache_config_info", "How memory is divided.", texts)

    def _info(self, name: str, text: str, labels: dict[str, str]) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=(*LABEL_NAMES, *labels))
        family.add_metric((*self._labels, *labels.values()), 1.0)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=LABEL_NAMES)
        family.add_metric(self._labels, value)
        return family

    def _gauge_by(self, name: str, text: str, label: str, values: _ByLabel) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=(*LABEL_NAMES, label))
        for which, value in values:
            family.add_metric((*self._labels, which), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=LABEL_NAMES)
        family.add_metric(self._labels, value)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: _ByLabel) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=(*LABEL_NAMES, label))
        for which, value in values:
            family.add_metric((*self._labels, which), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=LABEL_NAMES)
        bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
        counts = [float(count) for count in histogram.cumulative()]
        buckets = list(zip(bounds, counts, strict=True))
        family.add_metric(self._labels, buckets, histogram.total)
        return family


def _windows(stats: EngineStats) -> Histogram:
    """How many windows had which length."""
    if stats.speculation is None:
        return Histogram((1.0,), (stats.num_windows, 0), stats.num_window_tokens)
    counts = stats.speculation.window_lengths
    total = sum(length * count for length, count in enumerate(counts, start=1))
    bounds = tuple(float(length) for length in range(1, len(counts) + 1))
    return Histogram(bounds, (*counts, 0), total)


def _numbered(values: Sequence[float]) -> Iterator[tuple[str, float]]:
    return ((str(number), value) for number, value in enumerate(values))


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0
