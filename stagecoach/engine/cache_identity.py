"""What cached pages and states of an engine depend on, and what they weigh.

Owns the text that tells the caches of different engines apart, and the way from numbers of pages
and slots to bytes. Knows no entry of the cache.
"""

from collections.abc import Sequence

import msgspec

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.cache.memory_plan import MemoryNeeds
from stagecoach.config.engine import ResolvedConfig


def cache_identity(config: ResolvedConfig) -> str:
    """All that the rows and states of a prefix depend on beside its tokens, dtype and page size.

    Weights are known by their folder, and by the seed where they are random. Pages hold the
    draft's rows as well, so the draft belongs to it. How the model is split does not: every
    rank keeps its part of the same values, unless it quantises its own columns while it loads.
    """
    parts = [str(config.checkpoint), repr(config.model), f"dummy seed {config.dummy_seed}"]
    parts += [repr(config.quantization), f"rows {config.cache_dtype}"]
    if config.quantization.fp8 is not None:
        parts.append(f"tp {config.engine.tensor_parallel_size}")
    if config.speculation is not None:
        parts += [str(config.speculation.checkpoint), repr(config.speculation.draft)]
        parts += [repr(config.draft_quantization), f"draft rows {config.draft_cache_dtype}"]
    return "\n".join(parts)


def with_bytes(stats: PrefixCacheStats, needs: Sequence[MemoryNeeds]) -> PrefixCacheStats:
    """The same counts with the bytes of each tier.

    Args:
        needs: one entry a worker; a page or a slot is memory on each of them.
    """
    page_bytes = sum(need.bytes_per_page for need in needs)
    slot_bytes = sum(need.bytes_per_slot for need in needs)
    return msgspec.structs.replace(
        stats,
        device_bytes=stats.num_cached_pages * page_bytes + stats.num_checkpoints * slot_bytes,
        host_bytes=stats.num_host_pages * page_bytes + stats.num_host_checkpoints * slot_bytes,
    )
