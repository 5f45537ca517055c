"""A drafter that knows the answers and is wrong as often as it is told, and windows to suit.

Owns what its context rows hold: each row names its token and its position, and a block reads
its whole context back from there. So a row that was not written, not copied with its page or
written by somebody else is found out, where a real draft would only be accepted less often.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.draft.drafter import Choose, Proposal
from stagecoach.kernels.ragged import BlockInputs, PackedBlocks, SegmentGroup, StepTensors
from stagecoach.schedule.draft_policy import Candidate, DraftPolicy

# Knuth's multiplicative hash.
_SCATTER = 2654435761
_WRONG_TOKEN = 1


class Knowledge(NamedTuple):
    """What the drafter knows of a schedule."""

    sequences: tuple[tuple[int, ...], ...]  # prompt and answer of each request
    num_drafts: int
    accuracy: float

    def drafts_behind(self, prefix: tuple[int, ...]) -> list[int]:
        """Drafts behind the anchor, the last token of `prefix`.

        Raises:
            AssertionError: no request begins so.
        """
        end = len(prefix)
        for sequence in self.sequences:
            # Drafting goes on behind a token that ends a request, which a device does not know.
            if sequence[:end] == prefix[: len(sequence)]:
                break
        else:
            raise AssertionError(
                f"the draft's context rows and the anchor at {end - 1} are of no request: "
                f"... {list(prefix[-8:])}"
            )
        right = sequence[end : end + self.num_drafts]
        right += (_WRONG_TOKEN,) * (self.num_drafts - len(right))
        return [
            token if self._is_right(end, place) else _WRONG_TOKEN
            for place, token in enumerate(right)
        ]

    def _is_right(self, end: int, place: int) -> bool:
        return (end * 31 + place * 17 + 5) * _SCATTER % 2**32 < self.accuracy * 2**32


class _Rows(NamedTuple):
    """Rows of one step that are still to be stored."""

    pairs_TP: Tensor  # int64: token and position
    cache_rows_T: Tensor
    draft_rows_YRD: Tensor


class ScatteredPolicy(DraftPolicy):
    """Windows of any length that they may have, another for each request and step."""

    _num_plans = 0

    def choose_lengths(self, candidates: Sequence[Candidate], num_other_tokens: int) -> list[int]:
        self._num_plans += 1
        scattered = [
            candidate._replace(limit=self._length(index, candidate.limit))
            for index, candidate in enumerate(candidates)
        ]
        return super().choose_lengths(scattered, num_other_tokens)

    def _length(self, index: int, limit: int) -> int:
        return (self._num_plans * 13 + index * 7) * _SCATTER % 2**32 % (limit + 1)


class KnowingDrafter:
    """Stands where DSparkDrafter stands, and like it writes its rows no sooner than it must."""

    has_confidences = False

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._waiting: list[_Rows] = []

    def write_context(self, taps_TBH: Tensor, step: StepTensors, draft_rows_YRD: Tensor) -> None:
        """Have token and position of each row stored before any is read."""
        assert len(taps_TBH) == step.num_tokens, "taps of other tokens"
        assert not taps_TBH.isnan().any(), "a tap is NaN"
        positions = [
            group.flat(group.starts_B.unsqueeze(1) + torch.arange(group.max_length))
            for _, group, _ in step.spans()
            if isinstance(group, SegmentGroup)
        ]
        if positions:
            pairs_TP = torch.stack((step.token_ids_T, torch.cat(positions)), dim=1)
            self._waiting.append(_Rows(pairs_TP, step.cache_rows_T, draft_rows_YRD))

    def finish_context(self) -> None:
        """Store what is due."""
        for pairs_TP, cache_rows_T, draft_rows_YRD in self._waiting:
            draft_rows_YRD[0, cache_rows_T, :2] = pairs_TP.to(draft_rows_YRD.dtype)
        self._waiting.clear()

    def drop_context(self) -> None:
        """Nothing is due any more."""
        self._waiting.clear()

    def propose(
        self, block: BlockInputs | PackedBlocks, draft_rows_YRD: Tensor, choose: Choose | None
    ) -> Proposal | None:
        """Drafts behind each anchor; None on ranks that do not choose."""
        assert isinstance(block, BlockInputs), "it knows blocks on a CPU"
        self.finish_context()
        contexts = draft_rows_YRD[0, block.context_rows_NL, :2]
        drafts = [
            self._knowledge.drafts_behind((*_tokens(rows[:start]), anchor))
            for rows, start, anchor in zip(
                contexts.tolist(), block.starts_N.tolist(), block.anchor_ids_N.tolist(), strict=True
            )
        ]
        return None if choose is None else Proposal(torch.tensor(drafts), None)


def _tokens(rows: Sequence[Sequence[float]]) -> list[int]:
    """Tokens of the context rows of positions 0, 1, ...

    Raises:
        AssertionError: a row is that of another position, or was never written.
    """
    for position, (_, stored) in enumerate(rows):
        assert stored == position, f"the draft's context row of position {position} holds {stored}"
    return [int(token) for token, _ in rows]
