"""What the prefix cache has done since the start and what it holds, as it is told."""

from dataclasses import dataclass, fields

import msgspec


class PrefixCacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of tokens and entries. A query is a request's first admission."""

    num_queries: int = 0
    num_hits: int = 0  # queries that found a checkpoint
    num_query_tokens: int = 0  # prompt tokens of the queries
    num_hit_tokens: int = 0  # of them, not computed because of a hit
    num_lost_tokens: int = 0  # pages were there and no checkpoint was: computed again
    num_resumed_tokens: int = 0  # not computed again after a preemption
    num_filed: int = 0  # checkpoints filed: saved by a plan, or left by a request that ended
    num_unfiled: int = 0  # checkpoints wanted for which there was no slot
    evictions: dict[str, int] = {}  # by cause, cached pages and checkpoints
    num_checkpoints: int = 0  # at present, on the device
    num_cached_pages: int = 0  # in the index, whether a request holds them or not
    num_host_checkpoints: int = 0
    num_host_pages: int = 0
    num_stored: int = 0  # pages and checkpoints moved to the host tier
    num_loaded: int = 0  # and back
    device_bytes: int = 0  # of cached pages and checkpoints, over all workers
    host_bytes: int = 0
    num_verified: int = 0  # hits recomputed from scratch (--verify-cache) and found equal
    num_mismatches: int = 0  # and found different: entries in quarantine
    num_unverified: int = 0  # verifications begun and given up, for want of memory

    def after(self, earlier: "PrefixCacheStats") -> "PrefixCacheStats":
        """The same together with what an earlier cache, which is gone, had counted."""
        counts = {name: getattr(self, name) + getattr(earlier, name) for name in _COUNTS}
        evictions = dict(earlier.evictions)
        for cause, count in self.evictions.items():
            evictions[cause] = evictions.get(cause, 0) + count
        return msgspec.structs.replace(self, evictions=evictions, **counts)

    @property
    def hit_rate(self) -> float | None:
        """Share of all prompt tokens that a hit spared; None before the first query."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else None


@dataclass(slots=True)
class CacheCounts:
    """The counts of PrefixCacheStats that grow with admissions and checkpoints."""

    num_queries: int = 0
    num_hits: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_lost_tokens: int = 0
    num_resumed_tokens: int = 0
    num_filed: int = 0
    num_unfiled: int = 0

    def note_query(self, position: int, num_prompt_tokens: int) -> None:
        """A request was first admitted, behind `position` tokens."""
        self.num_queries += 1
        self.num_query_tokens += num_prompt_tokens
        self.num_hits += position > 0
        self.num_hit_tokens += position


# Those of PrefixCacheStats that only grow; the others say what is there now.
_COUNTS = (
    *(item.name for item in fields(CacheCounts)),
    "num_stored",
    "num_loaded",
    "num_verified",
    "num_mismatches",
    "num_unverified",
)
