"""A drafter that knows the answers, and is wrong where it is told to be.

It keeps the token of every cache row it is told of where a real one keeps its context rows, and
reads its context back from there: a context that is not the beginning of an expected answer
fails the test. So it sees whether rows are written for every token, whatever the chunks,
whether those of rejected drafts are overwritten in time, and whether they go where a page goes
that is shared, copied, or moved.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stagecoach.draft.drafter import Proposal
from stagecoach.kernels.ragged import BlockInputs, StepTensors
from stagecoach.schedule.draft_policy import Candidate, DraftPolicy

# Knuth's multiplicative hash: scatters (start, place) without a generator's state.
_SCATTER = 2654435761


class Script(NamedTuple):
    """What the drafter knows, and how often it is right."""

    answers: tuple[tuple[int, ...], ...]  # prompt and output of every request
    num_drafts: int
    is_right: Callable[[int, int], bool]  # (position of the anchor, place in the block)
    wrong_token: int = 0


def mostly_right(start: int, place: int) -> bool:
    """Three of four drafts, scattered."""
    return (start * 31 + place * 17 + 5) * _SCATTER % 2**32 % 4 != 0


class ScriptedDrafter:
    """Stands where DSparkDrafter stands, on every rank of the last stage."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def write_context(self, taps_TNH: Tensor, step: StepTensors, draft_rows_YRD: Tensor) -> None:
        assert len(taps_TNH) == step.num_tokens
        assert not taps_TNH.isnan().any(), "a tap was read from free memory"
        draft_rows_YRD[0, step.cache_rows_T, 0] = step.token_ids_T.to(draft_rows_YRD.dtype)

    def finish_context(self) -> None:
        """Rows are written at once."""

    def drop_context(self) -> None:
        """No row is ever due."""

    def propose(
        self,
        block: BlockInputs,
        draft_rows_YRD: Tensor,
        choose: Callable[[int, Tensor, Tensor], Tensor] | None,
    ) -> Proposal | None:
        script = self._script
        token_ids, confidences = [], []
        for anchor_id, start, rows_L in zip(
            block.anchor_ids_N.tolist(),
            block.starts_N.tolist(),
            block.context_rows_NL.tolist(),
            strict=True,
        ):
            context = draft_rows_YRD[0, rows_L[:start], 0]
            assert not context.isnan().any(), "a context row was read from free memory"
            answer = self._answer(start, (*map(int, context.tolist()), anchor_id))
            right = [script.is_right(start, place) for place in range(script.num_drafts)]
            drafts = [
                token if is_right else script.wrong_token
                for token, is_right in zip(answer, right, strict=True)
            ]
            token_ids.append(drafts)
            confidences.append([0.9 if is_right else 0.3 for is_right in right])
        if choose is None:
            return None
        return Proposal(torch.tensor(token_ids), torch.tensor(confidences))

    def _answer(self, start: int, prefix: tuple[int, ...]) -> list[int]:
        """The expected tokens behind the anchor; past the answer's end, any."""
        for answer in self._script.answers:
            # A device goes on drafting behind a token that ends a request.
            if answer[: start + 1] == prefix[: len(answer)]:
                known = list(answer[start + 1 : start + 1 + self._script.num_drafts])
                return known + [self._script.wrong_token] * (self._script.num_drafts - len(known))
        raise AssertionError(f"no expected answer begins with {prefix}")


def use_script(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    """Engines of threads that start from here on draft from `script`."""

    def load_drafter(*_: Any, **__: Any) -> ScriptedDrafter:
        return ScriptedDrafter(script)

    monkeypatch.setattr("stagecoach.runner.stage_runner.load_drafter", load_drafter)


def scatter_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Windows of any length from nothing to all drafts, another for each request and step.

    Returns:
        Every length that is chosen from here on.
    """
    calls = 0
    chosen: list[int] = []

    def choose_lengths(
        self: DraftPolicy, candidates: Sequence[Candidate], num_other_tokens: int
    ) -> list[int]:
        nonlocal calls
        calls += 1
        lengths = [
            (calls * 13 + index * 7) * _SCATTER % 2**32 % (candidate.limit + 1)
            for index, candidate in enumerate(candidates)
        ]
        chosen.extend(lengths)
        return lengths

    monkeypatch.setattr(DraftPolicy, "choose_lengths", choose_lengths)
    return chosen


def verify_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are made and never looked at."""
    monkeypatch.setattr(
        DraftPolicy,
        "choose_lengths",
        lambda self, candidates, num_other_tokens: [0] * len(candidates),
    )
