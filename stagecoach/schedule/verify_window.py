"""The verify window: an anchor and its drafts, which row it may return, and what follows it.

Owns the bounds of a window, the acceptance rule, and where the next segment stands. Knows
neither who proposed the drafts nor how tokens are sampled. L drafts, a row of m tokens:

    token index   start = N - 1   N ............... N + L - 1
                  | anchor        | drafts         |            end = N + L
    committed     |               | row of m      |             1 <= m <= L + 1
    next window                   start + m: the newest token; m - 1 rows of the record count

Every segment that samples ends in a window; a plain decode and a final chunk in one of L = 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stagecoach.schedule.step_plan import Segment


class Standing(NamedTuple):
    """Where a request stands once a window's row is known."""

    num_computed: int  # tokens forwarded and committed: all but the newest
    num_replay: int  # the last of them whose state is in the record only


class VerifyWindow(NamedTuple):
    """The tokens of a segment whose successors are sampled, each by the same forward."""

    start: int  # index of the anchor
    draft_token_ids: tuple[int, ...]

    @staticmethod
    def of(segment: Segment) -> "VerifyWindow":
        """The window that a sampling segment ends in."""
        num_certain = segment.num_tokens - segment.num_draft_tokens
        return VerifyWindow(segment.start + num_certain - 1, segment.token_ids[num_certain:])

    @property
    def end(self) -> int:
        return self.start + 1 + len(self.draft_token_ids)

    def row(self, sampled_ids: Sequence[int]) -> tuple[int, ...]:
        """The longest prefix of drafts that equal the samples, then the next sample.

        Args:
            sampled_ids: what the target samples behind the anchor and behind each draft, given
                that all drafts before stand.
        """
        assert len(sampled_ids) == 1 + len(self.draft_token_ids), f"{sampled_ids} behind {self}"
        num_accepted = 0
        for draft_id, sampled_id in zip(self.draft_token_ids, sampled_ids, strict=False):
            if draft_id != sampled_id:
                break
            num_accepted += 1
        return tuple(sampled_ids[: num_accepted + 1])

    def standing(self, row: Sequence[int]) -> Standing:
        """What the next segment of the request starts from."""
        assert 1 <= len(row) <= 1 + len(self.draft_token_ids), f"bad row: {row}, {self}"
        num_accepted = len(row) - 1
        assert tuple(row[:num_accepted]) == self.draft_token_ids[:num_accepted], (
            f"a row opens with accepted drafts: {row}, {self}"
        )
        return Standing(self.start + 1 + num_accepted, num_accepted)


def standing_behind(segment: Segment, row: Sequence[int]) -> Standing:
    """`VerifyWindow.of(segment).standing(row)`, shorter where nothing was drafted."""
    if segment.num_draft_tokens:
        return VerifyWindow.of(segment).standing(row)
    assert len(row) == 1, f"bad row: {row}, {segment}"
    return Standing(segment.end, 0)


def most_drafts(*, num_at_hand: int, num_left: int) -> int:
    """Drafts that a window may verify: its row must not exceed the request's last token.

    This bounds positions too: the window ends at most where the request's last forward does.

    Args:
        num_left: output tokens that the request may still get.
    """
    return max(0, min(num_at_hand, num_left - 1))


def can_use_proposal(num_left: int) -> bool:
    """Whether drafts behind a row could be verified: one token of it, a draft, and a sample.

    Args:
        num_left: output tokens that the request may still get, the row's not counted off.
    """
    return num_left >= 3
