"""Context rows: what the drafter knows of the tokens that the target has run.

Owns when they are made: no later than a block pass reads them, and until then together, since
the rows of one token take nearly the time of those of sixty. So a step behind which nothing is
proposed hardly pays for the drafter. What a row holds is the model's business.

Dimensions: T tokens, B taps, H hidden size, Y draft layers, R cache rows, D row width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.draft.model import DraftModel
from stagecoach.kernels.quantization import movable, narrowed

# Tokens whose taps wait at most; more would not be cheaper, and would take memory.
MOST_WAITING = 64


class _Waiting(NamedTuple):
    """Tokens of one step."""

    taps_TBH: Tensor
    positions_T: Tensor
    cache_rows_T: Tensor
    draft_rows_YRD: Tensor


class ContextRows:
    """Writes rows late, and in the order of the steps: a cache row may be written anew."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._waiting: list[_Waiting] = []
        self._num_tokens = 0

    def add(
        self, taps_TBH: Tensor, positions_T: Tensor, cache_rows_T: Tensor, draft_rows_YRD: Tensor
    ) -> None:
        """Rows of one step's tokens are due.

        Args:
            taps_TBH: not rewritten by the caller.
            positions_T: int64, place of each token within its request.
            cache_rows_T: int64, all different.
            draft_rows_YRD: where they go.
        """
        if self._waiting and self._waiting[0].draft_rows_YRD is not draft_rows_YRD:
            self.write()
        self._waiting.append(_Waiting(taps_TBH, positions_T, cache_rows_T, draft_rows_YRD))
        self._num_tokens += len(positions_T)
        if self._num_tokens >= MOST_WAITING:
            self.write()

    def write(self) -> None:
        """Make all rows that are due."""
        if not self._waiting:
            return
        sizes = [len(item.positions_T) for item in self._waiting]
        rows_TYD = self._model.context_rows(
            _joined([item.taps_TBH for item in self._waiting]),
            _joined([item.positions_T for item in self._waiting]),
        )
        dtype = self._waiting[0].draft_rows_YRD.dtype
        rows_YTD = movable(narrowed(rows_TYD.transpose(0, 1), dtype))
        for item, part_YTD in zip(self._waiting, rows_YTD.split(sizes, dim=1), strict=True):
            movable(item.draft_rows_YRD).index_copy_(1, item.cache_rows_T, part_YTD)
        self.drop()

    def drop(self) -> None:
        """No row is due any more."""
        self._waiting.clear()
        self._num_tokens = 0


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
