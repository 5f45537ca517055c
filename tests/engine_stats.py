"""Counts of an engine that has done nothing, for tests in which few of them matter."""

from typing import Any

from stagecoach.engine.messages import EngineStats
from stagecoach.observe.histogram import Histogram


def engine_stats(**counts: Any) -> EngineStats:
    """An idle engine of one stage, one page and one slot; `counts` replace some of its own."""
    one_stage = dict.fromkeys(
        ("stage_busy_seconds", "stage_hop_seconds", "stage_idle_seconds"), (0.0,)
    )
    one_each = dict.fromkeys(("num_pages", "num_free_pages", "num_slots", "num_free_slots"), 1)
    others: dict[str, Any] = {
        "iteration_tokens": Histogram((), (0,), 0.0),
        "speculation": None,
        "prefix_cache": None,
    }
    nothing = dict.fromkeys(EngineStats.__struct_fields__, 0)
    return EngineStats(**nothing | one_stage | one_each | others | counts)
