"""What speculation has done since the start, as it is counted and as it is told."""

import msgspec


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of committed rows; only windows that verified at least one draft count as such."""

    num_windows: int = 0
    num_proposed_tokens: int = 0  # drafts that came back from the drafter
    num_draft_tokens: int = 0  # drafts that were verified
    num_accepted_tokens: int = 0  # of them, before a row was cut at a stop
    drafted_per_position: tuple[int, ...] = ()  # windows that verified a draft there, places 1..k
    accepted_per_position: tuple[int, ...] = ()
    window_lengths: tuple[int, ...] = ()  # planned decode segments with 0..k drafts
    is_paused: bool = False  # drafting does not pay, for any request: only probes are made
    num_pauses: int = 0  # times that it began not to pay

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens of a verify round on average, from 1 to k + 1; None without any round."""
        return tokens_per_round(self.num_windows, self.num_accepted_tokens)


def tokens_per_round(num_windows: int, num_accepted_tokens: int) -> float | None:
    """Mean acceptance length: the accepted drafts of a window and the target's own token.

    None without any window.
    """
    return 1 + num_accepted_tokens / num_windows if num_windows else None
