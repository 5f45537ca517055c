"""Runs a split model step by step, without the runner: what the model tests share.

A Grid holds the stages and ranks of one model, each rank's memory filled with NaN where the
plan has not written, and the ranks of a stage as threads that meet in their collectives.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from stagecoach.config.model import Taps, load_model_config
from stagecoach.config.quantization import NO_QUANTIZATION, QuantizationChoice
from stagecoach.kernels.chunk_layout import lay_out_chunks
from stagecoach.kernels.ragged import SegmentGroup, StepTensors
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import SingleRank, TensorParallel
from stagecoach.model.stage_memory import KdaMemory, StageMemory, memory_shapes
from stagecoach.model.weights import load_stage
from stagecoach.pipeline.stage import make_stages

T = TypeVar("T")

PAGE_SIZE = 4
NUM_PAGES = 64
NUM_SLOTS = 6


class ThreadRank:
    """One of several ranks that are threads; collectives meet at a barrier."""

    def __init__(self, rank: int, size: int, barrier: Barrier, mailbox: list[Tensor | None]):
        self.rank, self.size = rank, size
        self._barrier, self._mailbox = barrier, mailbox

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._mailbox[self.rank] = tensor
        self._barrier.wait(timeout=30)
        tensors = [part.clone() for part in self._mailbox if part is not None]
        self._barrier.wait(timeout=30)
        return tensors

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(tensor), dim=dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor)[0]


def thread_ranks(size: int) -> list[TensorParallel]:
    if size == 1:
        return [SingleRank()]
    barrier, mailbox = Barrier(size), [None] * size
    return [ThreadRank(rank, size, barrier, mailbox) for rank in range(size)]


@dataclass
class Row:
    """One request: its slot, its pages, and how many tokens it has computed."""

    slot: int
    page_ids: list[int]
    num_computed: int = 0


@dataclass
class Part:
    """A row's tokens in a step; as a window the recurrent kernels run it."""

    row: Row
    token_ids: Sequence[int]
    is_window: bool = field(default=False)


def segment_group(parts: list[Part]) -> SegmentGroup:
    lengths = [len(part.token_ids) for part in parts]
    width, num_tokens = max(lengths), sum(lengths)
    ends = [part.row.num_computed + length for part, length in zip(parts, lengths, strict=True)]
    pad_index = torch.zeros(len(parts), width, dtype=torch.int64)
    is_real = torch.zeros(len(parts), width, dtype=torch.bool)
    context_rows = torch.zeros(len(parts), max(ends), dtype=torch.int64)
    flat_index, first = [], 0
    for index, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        pad_index[index, :length] = torch.arange(first, first + length)
        is_real[index, :length] = True
        flat_index += [index * width + place for place in range(length)]
        rows = [cache_row(part.row, position) for position in range(ends[index])]
        context_rows[index, : ends[index]] = torch.tensor(rows)
        first += length
    starts = [part.row.num_computed for part in parts]
    return SegmentGroup(
        num_tokens=num_tokens,
        max_length=width,
        lengths_B=torch.tensor(lengths),
        starts_B=torch.tensor(starts),
        pad_index_BW=pad_index,
        is_real_BW=is_real,
        flat_index_T=torch.tensor(flat_index),
        read_slots_B=torch.tensor(
            [part.row.slot if part.row.num_computed else 0 for part in parts]
        ),
        write_slots_B=torch.tensor([part.row.slot for part in parts]),
        replay_B=torch.zeros(len(parts), dtype=torch.int64),
        max_replay=0,
        num_drafts_B=torch.zeros(len(parts), dtype=torch.int64),
        max_drafts=0,
        context_rows_BL=context_rows,
        context_lengths_B=torch.tensor(ends),
        chunk_layout=lay_out_chunks(np.array(lengths), saves=None),
    )


def cache_row(row: Row, position: int) -> int:
    return row.page_ids[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def step_tensors(parts: list[Part], most_in_group: int = 8) -> StepTensors:
    """Windows first, then chunks, as in a step plan, in groups of so many segments."""
    windows = [part for part in parts if part.is_window]
    chunks = [part for part in parts if not part.is_window]
    ordered = windows + chunks
    token_ids = [token for part in ordered for token in part.token_ids]
    cache_rows = [
        cache_row(part.row, part.row.num_computed + place)
        for part in ordered
        for place in range(len(part.token_ids))
    ]
    return StepTensors(
        num_tokens=len(token_ids),
        token_ids_T=torch.tensor(token_ids),
        cache_rows_T=torch.tensor(cache_rows),
        windows=segment_groups(windows, most_in_group),
        chunks=segment_groups(chunks, most_in_group),
    )


def segment_groups(parts: list[Part], most: int) -> tuple[SegmentGroup, ...]:
    return tuple(segment_group(parts[start : start + most]) for start in range(0, len(parts), most))


class Grid:
    """All stages and ranks of one model, with their memory.

    Attributes:
        taps: those of the newest step by stage, and there by id.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        partition: Sequence[int] | None = None,
        tp_size: int = 1,
        load_format: str = "auto",
        taps: Taps | None = None,
        quantization: QuantizationChoice = NO_QUANTIZATION,
        row_dtype: torch.dtype | None = None,
    ) -> None:
        self.taps: list[dict[int, Tensor]] = []
        self.config = load_model_config(folder)
        self.dtype = dtype
        stages = make_stages(partition or (self.config.num_layers,))
        self.models: list[list[StageModel]] = []
        self.memories: list[list[StageMemory]] = []
        for stage in stages:
            ranks = thread_ranks(tp_size)
            self.models.append(
                [
                    load_stage(
                        folder,
                        self.config,
                        stage,
                        tp,
                        dtype,
                        dummy_seed=0 if load_format == "dummy" else None,
                        taps=taps,
                        quantization=quantization,
                    )
                    for tp in ranks
                ]
            )
            shapes = memory_shapes(self.config, stage, tp_size, dtype, row_dtype=row_dtype)
            self.memories.append(
                [poisoned(shapes.allocate(NUM_SLOTS, NUM_PAGES * PAGE_SIZE)) for _ in ranks]
            )
        self._next_page, self._next_slot = 1, 1

    def row(self, max_tokens: int) -> Row:
        """A new request with room for that many tokens."""
        num_pages = -(-max_tokens // PAGE_SIZE)
        pages = list(range(self._next_page, self._next_page + num_pages))
        self._next_page += num_pages
        self._next_slot += 1
        assert self._next_page <= NUM_PAGES and self._next_slot <= NUM_SLOTS
        # Out of order, so that a position is never its own cache row.
        return Row(self._next_slot - 1, pages[::-1])

    def step(self, parts: list[Part], most_in_group: int = 8) -> Tensor:
        """Run one step; logits [T, vocab] of every token, windows' tokens first."""
        step = step_tensors(parts, most_in_group)
        streams: list[StageEnd] | None = None
        self.taps = []
        for models, memories in zip(self.models, self.memories, strict=True):
            streams = run_ranks(
                [
                    stage_call(model, memory, step, None if streams is None else streams[rank])
                    for rank, (model, memory) in enumerate(zip(models, memories, strict=True))
                ]
            )
            self.taps.append(streams[0].taps)
            for of_rank in streams:
                assert of_rank.taps.keys() == self.taps[-1].keys()
                for tap, tap_TH in of_rank.taps.items():
                    assert torch.equal(tap_TH, self.taps[-1][tap]), f"ranks disagree on {tap}"
        for part in parts:
            part.row.num_computed += len(part.token_ids)
        assert streams is not None
        first = streams[0].result
        for other in streams:
            assert torch.equal(first, other.result), "ranks disagree about the logits"
        return first

    def prefill(self, row: Row, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """Logits of every token of a prompt, computed in chunks of that size."""
        size = chunk or len(token_ids)
        return torch.cat(
            [
                self.step([Part(row, token_ids[start : start + size])])
                for start in range(0, len(token_ids), size)
            ]
        )

    def decode(self, row: Row, token_ids: Sequence[int]) -> Tensor:
        """Logits of tokens fed one at a time."""
        return torch.cat([self.step([Part(row, [token], is_window=True)]) for token in token_ids])


class StageEnd(NamedTuple):
    """What one rank of a stage leaves."""

    result: Tensor  # the running sum, or the logits of the last stage
    bank_TBH: Tensor
    taps: dict[int, Tensor]


def stage_call(
    model: StageModel, memory: StageMemory, step: StepTensors, received: StageEnd | None
) -> Callable[[], StageEnd]:
    def call() -> StageEnd:
        torch.set_num_threads(1)
        if received is None:
            stream = model.embed(step.token_ids_T)
        else:
            stream = model.resume(received.result, received.bank_TBH)
        seen: list[int] = []
        stream = model.forward(stream, step, memory, lambda layer, _: seen.append(layer))
        assert seen == list(model.stage.layers)
        if model.stage.is_last:
            logits = model.logits(stream, torch.arange(step.num_tokens))
            return StageEnd(logits, stream.bank_TBH, stream.taps)
        assert stream.bank_TBH.is_contiguous()
        return StageEnd(stream.partial_TH, stream.bank_TBH, stream.taps)

    return call


def run_ranks(calls: list[Callable[[], T]]) -> list[T]:
    """The calls of a stage's ranks, at once, because they wait for each other."""
    if len(calls) == 1:
        return [calls[0]()]
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def poisoned(memory: StageMemory) -> StageMemory:
    """NaN everywhere but in slot 0 and page 0, which hold zeros for ever."""
    for layer in memory.layers.values():
        first = 1 if isinstance(layer, KdaMemory) else PAGE_SIZE
        for tensor in layer:
            tensor[first:] = float("nan")
    return memory


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest magnitude of the reference."""
    reference = reference.to(ours.dtype)
    return float((ours - reference).abs().max() / reference.abs().max())
