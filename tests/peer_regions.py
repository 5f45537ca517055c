"""Ranks of a stage as regions of one process, for kernels that write into peer memory.

What waits for another rank would wait for ever in one process: every rank gives before one takes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from stagecoach.kernels.peer import peer_kernel, word_kernel
from stagecoach.kernels.peer.peer_kernel import give_to_stage, take_from_stage
from stagecoach.kernels.peer.word_kernel import give_words, take_words
from stagecoach.pipeline.peer_links import RegionLayout, StageExchange


@triton.jit
def give_kernel(
    x_ptr,
    out_ptr,
    counts_ptr,
    flags_ptr,
    data_ptr,
    distances_ptr,
    num_values,
    tiles,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAM_VALUES: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    give_to_stage(
        x_ptr, counts_ptr, flags_ptr, data_ptr, distances_ptr, num_values, tiles,
        RANK, SIZE, MAX_PROGRAMS, PROGRAM_VALUES, TILE, VALUE_BYTES,
    )  # fmt: skip


@triton.jit
def take_kernel(
    x_ptr,
    out_ptr,
    counts_ptr,
    flags_ptr,
    data_ptr,
    distances_ptr,
    num_values,
    tiles,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAM_VALUES: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    take_from_stage(
        x_ptr, out_ptr, counts_ptr, flags_ptr, data_ptr, num_values, tiles,
        RANK, SIZE, MAX_PROGRAMS, PROGRAM_VALUES, TILE, SUMS,
    )  # fmt: skip


@triton.jit
def give_words_kernel(
    x_ptr,
    out_ptr,
    counts_ptr,
    marked_ptr,
    distances_ptr,
    num_words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    SUMMED_BYTES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    give_words(x_ptr, counts_ptr, marked_ptr, distances_ptr, num_words, RANK, SIZE, MAX_WORDS, TILE)


@triton.jit
def take_words_kernel(
    x_ptr,
    out_ptr,
    counts_ptr,
    marked_ptr,
    distances_ptr,
    num_words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    SUMMED_BYTES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    take_words(
        x_ptr, out_ptr, counts_ptr, marked_ptr, num_words, RANK, SIZE, MAX_WORDS, TILE, SUMMED_BYTES
    )


# What a launch is made of: all ranks run the first, then all run the second.
_HALVES = {
    "exchange_kernel": (give_kernel, take_kernel),
    "exchange_words_kernel": (give_words_kernel, take_words_kernel),
}


class Regions:
    """PeerMemory where all workers' regions lie in this process, full of NaN but for the flags."""

    def __init__(self, num_ranks: int, layout: RegionLayout, device: str = "cpu") -> None:
        self._regions = [
            torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8, device=device)
            for _ in range(num_ranks)
        ]
        for region in self._regions:
            region[: layout.words] = 0
        self.addresses = tuple(region.data_ptr() for region in self._regions)

    def of(self, rank: int) -> "Region":
        return Region(self, rank)

    def region(self, rank: int) -> Tensor:
        return self._regions[rank]


class Region:
    def __init__(self, regions: Regions, rank: int) -> None:
        self._regions = regions
        self.rank = rank
        self.addresses = regions.addresses

    def view(self, rank: int, offset: int, num_values: int, dtype: torch.dtype) -> Tensor:
        end = offset + num_values * dtype.itemsize
        return self._regions.region(rank)[offset:end].view(dtype)


class Stage:
    """All ranks of a stage, which is not the first one."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
        layout = RegionLayout(size)
        regions = Regions(2 * size, layout, device)
        ranks = tuple(range(size, 2 * size))
        self.exchanges = [
            StageExchange(regions.of(rank), ranks, layout)  # type: ignore[arg-type]
            for rank in ranks
        ]
        self._launches: list[Noted] = []
        for module, name in (
            (peer_kernel, "exchange_kernel"),
            (word_kernel, "exchange_words_kernel"),
        ):
            monkeypatch.setattr(module, name, Noting(name, self._launches))

    def exchange(self, call: Callable[[StageExchange, int], Tensor]) -> list[Tensor]:
        """`call` on every rank, given before any takes."""
        self._launches.clear()
        outputs = [call(exchange, rank) for rank, exchange in enumerate(self.exchanges)]
        for half in (0, 1):
            for launch in self._launches:
                kernel = _HALVES[launch.kernel][half]
                kernel[launch.grid](*launch.arguments, **launch.constants)
        return outputs


class Noted(NamedTuple):
    kernel: str
    grid: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class Noting:
    """Stands for a kernel that is launched later."""

    def __init__(self, kernel: str, launches: list[Noted]) -> None:
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def note(*arguments: Any, **constants: Any) -> None:
            self._launches.append(Noted(self._kernel, grid, arguments, constants))

        return note
