"""A drafter and a policy that do as they like: tokens must not depend on either."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from stagecoach.schedule.draft_policy import Candidate


class Drafts(NamedTuple):
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]


class FakeDrafter:
    """Proposes what follows with some of it made wrong: all, none, or from some place on.

    `habits` are the odds that a draft is right, one drawn for each block.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        *,
        seed: int = 0,
        habits: Sequence[float] = (1.0, 0.8, 0.5, 0.0),
        has_confidences: bool = True,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._random = Random(seed)
        self._habits = habits
        self._has_confidences = has_confidences

    def propose(self, right_ids: Sequence[int], vocab_size: int) -> Drafts:
        """A block, given the tokens that would be right."""
        odds = self._random.choice(self._habits)
        token_ids = tuple(
            token if self._random.random() < odds else (token + 1) % vocab_size
            for token in right_ids
        )
        confidences = tuple(self._random.random() for _ in token_ids)
        return Drafts(token_ids, confidences if self._has_confidences else ())


class ChoiceSeen(NamedTuple):
    candidates: tuple[Candidate, ...]
    num_other_tokens: int
    lengths: tuple[int, ...]


class FakePolicy:
    """Windows as long as allowed, or of random lengths; keeps what it was asked and told.

    Args:
        seed: None for the longest windows and a proposal whenever one is asked for.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else Random(seed)
        self.choices: list[ChoiceSeen] = []
        self.asked: list[int] = []
        self.proposals: list[tuple[int, int]] = []  # (request, drafts)
        self.windows: list[tuple[int, int, int]] = []  # (request, drafts, accepted)
        self.plain: list[int] = []
        self.forgotten: list[int] = []

    def choose_lengths(self, candidates: Sequence[Candidate], num_other_tokens: int) -> list[int]:
        limits = [candidate.limit for candidate in candidates]
        if self._random is None or self._random.random() < 0.3:
            lengths = limits
        else:
            lengths = [self._random.randint(0, limit) for limit in limits]
        self.choices.append(ChoiceSeen(tuple(candidates), num_other_tokens, tuple(lengths)))
        return lengths

    def should_propose(self, request_id: int) -> bool:
        self.asked.append(request_id)
        return self._random is None or self._random.random() < 0.8

    def note_proposal(self, request_id: int, num_drafts: int) -> None:
        self.proposals.append((request_id, num_drafts))

    def note_window(self, request_id: int, num_drafts: int, num_accepted: int) -> None:
        self.windows.append((request_id, num_drafts, num_accepted))

    def note_plain(self, request_id: int) -> None:
        self.plain.append(request_id)

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)
