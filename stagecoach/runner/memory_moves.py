"""The moves of a plan: pages and slots to the host tier and back, cleared, and copied.

Owns how they are carried out, each list at once over every tensor; on an accelerator in the order
of the current stream, for which the host does not wait. What is moved, and that no move undoes
another of the same plan, is decided where the plan is made.

Dimensions: P pages, B rows of a page, D width of a cache row, N pages or slots of one list.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stagecoach.cache.memory_moves import MemoryMoves, PageCopy, Transfer
from stagecoach.kernels.quantization import movable
from stagecoach.model.stage_memory import KdaMemory, StageMemory
from stagecoach.runner.transfer import to_device, upload

_FP8_NAN = 0x7F


def moves_pages(moves: MemoryMoves) -> bool:
    """Whether cache rows are read or written, so that all that are due must be there."""
    return bool(moves.store_pages or moves.scrub_pages or moves.load_pages or moves.copies)


class MovablePools:
    """Every tensor of a stage's memory, by page or by slot in dimension 0.

    Args:
        block_size: cache rows of a page.
        fill: what scrubbed memory holds.
    """

    def __init__(self, memory: StageMemory, block_size: int, fill: float) -> None:
        rows = []
        self._slots: list[Tensor] = []
        for layer in memory.layers.values():
            if isinstance(layer, KdaMemory):
                self._slots += layer
            else:
                rows.append(layer.cache_RD)
        if memory.draft_rows_YRD is not None:
            rows += memory.draft_rows_YRD.unbind()
        # [P, B, D]; what has no arithmetic is moved as bytes.
        self._pages = [movable(rows_RD).unflatten(0, (-1, block_size)) for rows_RD in rows]
        self._block_size = block_size
        self._fill = fill

    def apply(self, moves: MemoryMoves, host: "MovablePools") -> None:
        """Make all moves, in the order of the fields."""
        _transfer(moves.store_pages, self._pages, host._pages, to_host=True)
        _transfer(moves.store_slots, self._slots, host._slots, to_host=True)
        self.scrub(moves.scrub_pages, moves.scrub_slots)
        _transfer(moves.load_pages, self._pages, host._pages, to_host=False)
        _transfer(moves.load_slots, self._slots, host._slots, to_host=False)
        self._copy(moves.copies)

    def clear(self) -> None:
        """Fill everything with zeros."""
        for pool in (*self._pages, *self._slots):
            pool.zero_()

    def scrub(self, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        for pools, numbers in ((self._pages, page_ids), (self._slots, slots)):
            if numbers and pools:
                numbers_N = upload(numbers, torch.int64, pools[0].device)
                for pool in pools:
                    pool.index_fill_(0, numbers_N, self._fill_of(pool))

    def _fill_of(self, pool: Tensor) -> float:
        if pool.dtype != torch.uint8:
            return self._fill
        return _FP8_NAN if math.isnan(self._fill) else 0

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        """The first rows of one page to another, for all copies and in every layer."""
        if not copies or not self._pages:
            return
        source_N1, target_N1, count_N1 = torch.tensor(
            [(copy.source, copy.target, copy.num_tokens) for copy in copies]
        ).T.unsqueeze(2)
        places_B = torch.arange(self._block_size)
        is_copied_NB = places_B < count_N1
        device = self._pages[0].device
        source_rows, target_rows = (
            to_device((page_N1 * self._block_size + places_B)[is_copied_NB], device)
            for page_N1 in (source_N1, target_N1)
        )
        for pages_PBD in self._pages:
            rows_RD = pages_PBD.flatten(0, 1)
            rows_RD.index_copy_(0, target_rows, rows_RD.index_select(0, source_rows))


def _transfer(
    transfers: Sequence[Transfer], device: list[Tensor], host: list[Tensor], *, to_host: bool
) -> None:
    if not transfers or not device:
        return
    if device[0].is_cuda:
        _transfer_pinned(transfers, device, host, to_host=to_host)
        return
    device_N, host_N = torch.tensor([(item.device, item.host) for item in transfers]).unbind(1)
    sides = ((device, device_N), (host, host_N))
    (sources, source_N), (targets, target_N) = sides if to_host else sides[::-1]
    for source, target in zip(sources, targets, strict=True):
        target.index_copy_(0, target_N, source.index_select(0, source_N))


def _transfer_pinned(
    transfers: Sequence[Transfer], device: list[Tensor], host: list[Tensor], *, to_host: bool
) -> None:
    """Piece by piece between a device and pinned memory, so that the host waits for nothing.

    What a later plan loads was stored on the same stream before.
    """
    for on_device, on_host in zip(device, host, strict=True):
        for transfer in transfers:
            ours, theirs = on_device[transfer.device], on_host[transfer.host]
            source, target = (ours, theirs) if to_host else (theirs, ours)
            target.copy_(source, non_blocking=True)
