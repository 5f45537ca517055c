"""For which steps graphs are captured: numbers of windows, and their widths.

Owns the ladder and the choice of a rung for a plan. Every rank of an engine makes the same
choice from the same plan.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from stagecoach.config.engine import ResolvedConfig
from stagecoach.runner.packed_inputs import GroupBounds, StepBounds

# Saves of a window that a graph has room for, on average: more than one comes only where
# checkpoints are closer together than a window is wide.
_SAVES_PER_WINDOW = 2


class Bucket(NamedTuple):
    """A kind of step: up to so many windows of up to so many tokens."""

    num_segments: int
    width: int

    @property
    def num_tokens(self) -> int:
        return self.num_segments * self.width


class Buckets:
    """All kinds of steps that are captured.

    Attributes:
        all: the largest first, as they are captured.
    """

    def __init__(self, sizes: Sequence[int], widths: Sequence[int]) -> None:
        self._sizes = sorted(sizes)
        self._widths = sorted(widths)
        self.all = sorted(
            (Bucket(size, width) for size in self._sizes for width in self._widths),
            key=lambda bucket: (bucket.num_tokens, bucket.num_segments),
            reverse=True,
        )

    def choose(self, num_segments: int, width: int) -> Bucket | None:
        """The smallest that has room; None if none has."""
        size = bisect_left(self._sizes, num_segments)
        place = bisect_left(self._widths, width)
        if size == len(self._sizes) or place == len(self._widths):
            return None
        return Bucket(self._sizes[size], self._widths[place])


def make_buckets(config: ResolvedConfig) -> Buckets:
    """The ladder that the options ask for.

    Without `cudagraph_capture_sizes`: 1, 2, 4, then every multiple of 8 up to 64 and of 16
    beyond, up to `max_num_seqs`. Widths double from 1 to that of the widest window, so that
    what is padded is less than what is there.
    """
    engine = config.engine
    most = min(engine.max_num_seqs, engine.max_num_batched_tokens)
    if engine.cudagraph_capture_sizes is not None:
        sizes = {size for size in engine.cudagraph_capture_sizes if size <= most}
    else:
        ladder = [1, 2, 4, *range(8, 64, 8), *range(64, most, 16)]
        sizes = {size for size in ladder if size < most} | {most}
    widest = 1 + config.num_draft_tokens
    widths = {2**power for power in range(widest.bit_length())} | {widest}
    return Buckets(sorted(sizes), sorted(widths))


def bounds_of(bucket: Bucket, config: ResolvedConfig) -> StepBounds:
    """Room for every plan that falls into the bucket."""
    has_saves = config.engine.enable_prefix_caching
    windows = GroupBounds(
        num_tokens=bucket.num_tokens,
        num_segments=bucket.num_segments,
        max_length=bucket.width,
        # The drafts of a last window may lie behind the longest request.
        max_context=config.max_model_len + config.num_draft_tokens,
        max_replay=config.num_draft_tokens,
        max_drafts=bucket.width - 1,
        num_saves=_SAVES_PER_WINDOW * bucket.num_segments if has_saves else 0,
    )
    return StepBounds(windows, None)


def pages_of(num_segments: int, config: ResolvedConfig) -> int:
    """Pages that the tables of so many longest requests name."""
    longest = config.max_model_len + config.num_draft_tokens
    return num_segments * -(-longest // config.engine.block_size)
