"""Drafters on their own: what the draft tests share.

A Stage holds the ranks of one, each with a cache that is NaN where nothing was written, and the
contexts of a few requests on scattered rows.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from stagecoach.config.draft import DraftConfig, load_draft_config
from stagecoach.draft.drafter import Choose, DSparkDrafter, Proposal
from stagecoach.draft.load import fill_draft
from stagecoach.draft.model import DraftModel
from stagecoach.kernels.ragged import BlockInputs, BlockRun, StepTensors
from tests.cpu.model.model_runs import (
    NUM_PAGES,
    PAGE_SIZE,
    Part,
    Row,
    cache_row,
    step_tensors,
    thread_ranks,
)

VOCAB, HIDDEN = 512, 64

T = TypeVar("T")


def target_tables(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Embedding and head of a target, float64 [V, H] each."""
    generator = torch.Generator().manual_seed(seed)
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    return embedding, head / HIDDEN**0.5


class Request(NamedTuple):
    """Taps of a request's tokens, and where their rows are."""

    taps: Tensor  # float64 [tokens, taps, H]
    row: Row


def make_requests(lengths: Sequence[int], num_taps: int, seed: int = 4) -> list[Request]:
    """Requests of so many tokens; pages are handed out backwards, page 0 to nobody."""
    generator = torch.Generator().manual_seed(seed)
    free = list(range(1, NUM_PAGES))
    requests = []
    for index, length in enumerate(lengths):
        taps = torch.randn(length, num_taps, HIDDEN, generator=generator, dtype=torch.float64)
        pages = [free.pop() for _ in range(-(-length // PAGE_SIZE))]
        requests.append(Request(taps, Row(index + 1, pages)))
    return requests


def greedy(place: int, logits_NV: Tensor, drafts_NJ: Tensor) -> Tensor:
    assert drafts_NJ.shape == (len(logits_NV), place)
    return logits_NV.argmax(-1)


class Stage:
    """The drafter of every rank of a last stage.

    Args:
        drafters: one a rank.
        dtype: of taps and cache.
    """

    def __init__(
        self, config: DraftConfig, drafters: Sequence[DSparkDrafter], dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.drafters = drafters
        self.caches = []
        for _ in drafters:
            width = config.cache_row_width(len(drafters))
            shape = (config.num_layers, NUM_PAGES * PAGE_SIZE, width)
            cache = torch.full(shape, float("nan"), dtype=dtype)
            cache[:, :PAGE_SIZE] = 0.0  # the null page
            self.caches.append(cache)

    @classmethod
    def read(
        cls,
        folder: Path,
        dtype: torch.dtype = torch.float64,
        tp_size: int = 1,
        num_draft_tokens: int = 7,
    ) -> Self:
        """Of a folder's draft, with `target_tables` as embedding and head."""
        config = load_draft_config(folder)
        embedding_VH, head_VH = (table.to(dtype) for table in target_tables())
        drafters = []
        for tp in thread_ranks(tp_size):
            model = DraftModel(config, tp, dtype)
            fill_draft(model, folder)
            drafters.append(
                DSparkDrafter(
                    model,
                    lambda token_ids: embedding_VH[token_ids],
                    lambda hidden_RH: hidden_RH @ head_VH.t(),
                    num_draft_tokens,
                )
            )
        return cls(config, drafters, dtype)

    def write(self, parts: Sequence[tuple[Request, int]]) -> None:
        """One step that computes so many further tokens of each request."""
        tokens = [Part(request.row, [0] * count) for request, count in parts]
        taps = torch.cat(
            [
                request.taps[request.row.num_computed : request.row.num_computed + count]
                for request, count in parts
            ]
        )
        step = step_tensors(tokens)
        self.on_ranks(
            lambda drafter, cache: drafter.write_context(taps.to(self.dtype), step, cache)
        )
        for request, count in parts:
            request.row.num_computed += count

    def write_all(self, requests: Sequence[Request]) -> None:
        self.write([(request, len(request.taps)) for request in requests])

    def propose(
        self, requests: Sequence[Request], anchors: Sequence[int], choose: Choose = greedy
    ) -> Proposal:
        """Blocks behind all that the requests have computed."""
        block = block_inputs([request.row for request in requests], anchors)
        ranks = iter([choose] + [None] * (len(self.drafters) - 1))
        chooses = {id(drafter): next(ranks) for drafter in self.drafters}
        for drafter in self.drafters:
            drafter.context.write()
        before = [cache.clone() for cache in self.caches]
        proposals = self.on_ranks(
            lambda drafter, cache: drafter.propose(block, cache, chooses[id(drafter)])
        )
        for cache, old in zip(self.caches, before, strict=True):
            torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)
        first, *others = proposals
        assert first is not None and others == [None] * len(others)
        return first

    def on_ranks(self, call: Callable[[DSparkDrafter, Tensor], T]) -> list[T]:
        def run(pair: tuple[DSparkDrafter, Tensor]) -> T:
            torch.set_num_threads(1)
            with torch.inference_mode():
                return call(*pair)

        pairs = list(zip(self.drafters, self.caches, strict=True))
        if len(pairs) == 1:
            return [run(pairs[0])]
        with ThreadPoolExecutor(len(pairs)) as pool:
            return list(pool.map(run, pairs))


def block_inputs(rows: Sequence[Row], anchors: Sequence[int]) -> BlockInputs:
    """Past a context stands a row that holds nothing: page 1 is handed out last."""
    longest = max(row.num_computed for row in rows)
    unused = PAGE_SIZE
    # The first alone, the others together.
    lengths = [row.num_computed for row in rows]
    parts = [part for part in (lengths[:1], lengths[1:]) if part]
    return BlockInputs(
        anchor_ids_N=torch.tensor(anchors),
        starts_N=torch.tensor([row.num_computed for row in rows]),
        context_rows_NL=torch.tensor(
            [
                [cache_row(row, position) for position in range(row.num_computed)]
                + [unused] * (longest - row.num_computed)
                for row in rows
            ]
        ),
        runs=tuple(BlockRun(len(part), max(part)) for part in parts),
    )


def empty_step() -> StepTensors:
    nothing = torch.empty(0, dtype=torch.int64)
    return StepTensors(0, nothing, nothing, (), ())
