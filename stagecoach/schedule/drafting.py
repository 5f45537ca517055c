"""How many drafts each window of a plan verifies, and who is proposed new ones.

Owns what the policy is asked and told. The policy chooses; here stands what it may choose from:
the drafts at hand, the budget, and pages that nobody else needs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stagecoach.request import Request
from stagecoach.schedule.chunking import DraftRoom, draft_budget, draft_limits
from stagecoach.schedule.draft_policy import Candidate, DraftPolicy
from stagecoach.schedule.step_plan import RowResult, Segment
from stagecoach.schedule.verify_window import can_use_proposal, most_drafts


class WindowRoom(NamedTuple):
    """What the memory leaves for the drafts of one window."""

    num_open_positions: int  # behind the anchor, in pages that the request holds
    num_promised_pages: int  # of the free pages, those promised to its seniors


class Drafting:
    """The drafts of an engine; without a policy there are none."""

    def __init__(self, policy: DraftPolicy | None, num_draft_tokens: int, block_size: int) -> None:
        """`policy` and `num_draft_tokens` as in Scheduler."""
        assert (policy is None) == (num_draft_tokens == 0), f"{num_draft_tokens} for {policy}"
        self._policy = policy
        self._num_draft_tokens = num_draft_tokens
        self._block_size = block_size

    def choose_lengths(
        self,
        cohort: Sequence[Request],
        *,
        budget: int,
        num_spare_pages: int,
        num_chunk_tokens: Callable[[], int],
        room: Callable[[Request], WindowRoom],
    ) -> list[int]:
        """Drafts of each window of the cohort, whose anchors all have their place.

        Args:
            budget: tokens of the plan that are left beside the anchors.
            num_spare_pages: free pages that drafts may take.
            num_chunk_tokens: prompt tokens that could join the plan, as far as its budget allows.
        """
        if self._policy is None or not cohort:
            return [0] * len(cohort)
        if not any(request.draft_token_ids for request in cohort):
            bare = [Candidate(request.request_id, (), 0) for request in cohort]
            return self._policy.choose_lengths(bare, 0)
        num_other_tokens = num_chunk_tokens()
        rooms = [
            DraftRoom(
                most_drafts(num_at_hand=len(request.draft_token_ids), num_left=request.num_left),
                *room(request),
            )
            for request in cohort
        ]
        limits = draft_limits(
            rooms,
            budget=draft_budget(budget, num_other_tokens),
            num_spare_pages=num_spare_pages,
            block_size=self._block_size,
        )
        candidates = [
            Candidate(request.request_id, request.confidences, limit)
            for request, limit in zip(cohort, limits, strict=True)
        ]
        lengths = self._policy.choose_lengths(candidates, min(budget, num_other_tokens))
        are_allowed = [0 <= a <= b for a, b in zip(lengths, limits, strict=True)]
        assert all(are_allowed), f"windows of {lengths} drafts, at most {limits} are allowed"
        return lengths

    def proposes(self, request: Request) -> bool:
        """Whether to draft behind what this request is about to sample."""
        return (
            self._policy is not None
            and can_use_proposal(request.num_left)
            and self._policy.should_propose(request.request_id)
        )

    def note_row(self, segment: Segment, row: RowResult) -> None:
        """Tell the policy what became of the drafts, and of those that are new."""
        if self._policy is None or not row.token_ids:
            return
        assert len(row.draft_token_ids) <= self._num_draft_tokens, f"too many drafts: {row}"
        if segment.num_draft_tokens:
            num_accepted = len(row.token_ids) - 1
            self._policy.note_window(segment.request_id, segment.num_draft_tokens, num_accepted)
        else:
            self._policy.note_plain(segment.request_id)
        if row.draft_token_ids:
            self._policy.note_proposal(segment.request_id, len(row.draft_token_ids))

    def forget(self, request_id: int) -> None:
        """The request is gone."""
        if self._policy is not None:
            self._policy.forget(request_id)
