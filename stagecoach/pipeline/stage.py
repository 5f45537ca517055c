"""A pipeline stage: one contiguous range of decoder layers.

Owns the range and what its two ends do. Knows no tensor, no process and no rank; the layers
of a stage are always named by their number in the whole model.

    layer   0 ......... start ............. end ......... num_layers
            | before    | this stage        | after      |
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers [start, end) of the model, as one of `num_stages` such ranges."""

    index: int
    num_stages: int
    start: int
    end: int

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.num_stages, f"no such stage: {self}"
        assert 0 <= self.start < self.end, f"empty stage: {self}"
        assert (self.start == 0) == self.is_first, f"the first stage starts at layer 0: {self}"

    @property
    def is_first(self) -> bool:
        """Holds the embedding; every other stage receives its input."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Holds the final norm and the output head."""
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> range:
        """Numbers of its layers in the whole model."""
        return range(self.start, self.end)

    @property
    def num_layers(self) -> int:
        return self.end - self.start


def make_stages(partition: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of a partition; together they hold each layer exactly once.

    Args:
        partition: number of layers of each stage, first stage first; each at least 1.
    """
    stages: list[Stage] = []
    start = 0
    for index, num_layers in enumerate(partition):
        stages.append(
            Stage(index=index, num_stages=len(partition), start=start, end=start + num_layers)
        )
        start += num_layers
    return tuple(stages)


def whole_model(num_layers: int) -> Stage:
    """The only stage of a model that is not split."""
    return Stage(index=0, num_stages=1, start=0, end=num_layers)
